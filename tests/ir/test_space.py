"""Relations of isl as Tapestry uses them: access, dependence, witnesses, hulls."""

import pytest

from tapestry.ir import space
from tapestry.ir.graph import Block, Dim, Guard, Read
from tapestry.ir.index import const, dim, modulo
from tapestry.ir.laws import dependences
from tapestry.ir.syntax.parser import parse

H, R = dim("h"), dim("r")
OP = Block(outs=("y",), dims=(Dim("h", 5),), reduce=(Dim("r", 3),), monoid="sum")


def read(*index: space.Aff, other: float | None = None, when: tuple[Guard, ...] = ()) -> Read:
    return Read(tensor="x", index=index, other=other, when=when)


def test_a_guarded_read_touches_only_cells_inside() -> None:
    assert space.access(OP, read(H + R - 1), (5,)).hull() == ((-1, 6),)
    assert space.access(OP, read(H + R - 1, other=0.0), (5,)).hull() == ((0, 5),)
    odd = space.access(OP, read(H + R, other=0.0, when=(Guard(modulo(H, 2) - 1, "eq"),)), (7,))
    assert odd.hull() == ((1, 6),)


def test_reduced_dimensions_are_projected_out_of_dependences() -> None:
    relation = space.reads_of_outputs(OP, read(H + R), (7,))
    block = relation.image(((2, 4),))
    assert block is not None and block.hull() == ((2, 6),)
    assert relation.image(((5, 9),)) is None


def test_equality_is_of_sets_not_of_text() -> None:
    a = space.access(OP, read(H + modulo(R, 3)), (7,))
    b = space.access(OP, read(H + R), (7,))
    assert a.equals(b) and a.inside(b) and a.witness(b) is None
    c = space.access(OP, read(H + R + 1), (8,))
    assert not a.equals(c)
    pair = a.witness(c)
    assert pair is not None and pair[1][0] == sum(pair[0])


def test_leaving_a_tensor_has_a_witness() -> None:
    relation = space.access(OP, read(H + R), (7,))
    assert relation.leaves(((0, 7),)) is None
    found = relation.leaves(((0, 6),))
    assert found == ((4, 2), (6,))


@pytest.mark.parametrize(("index", "injective"), [(H * 3 + R, True), (H * 2 + R, False), (H + R * 5, True)])
def test_injectivity(index: space.Aff, injective: bool) -> None:
    relation = space.access(OP, read(index), (100,))
    assert relation.injective() is injective
    found = relation.collision()
    assert (found is None) is injective
    if found:
        (h, r), (i, s) = found
        assert (h, r) != (i, s) and 2 * h + r == 2 * i + s


def test_composition_and_union() -> None:
    shift = space.access(OP, read(H + 1), (6,))
    twice = space.reads_of_outputs(OP, read(H + 1), (6,)).then(space.identity((9,)))
    assert twice.equals(space.reads_of_outputs(OP, read(H + 1), (6,)))
    both = shift.union(space.access(OP, read(H), (6,)))
    assert shift.inside(both) and both.hull() == ((0, 6),)


def test_used_ignores_other_dimensions() -> None:
    assert space.used(OP, read(H)).injective()
    assert not space.access(OP, read(H), (5,)).injective()
    assert space.used(OP, read(const(0))).injective()


def test_a_gap_in_blocks_is_a_point() -> None:
    dims = (Dim("p", 7),)
    some = space.blocks(dims, {"p": 3}).image(((0, 2),))
    assert some is not None and space.covers(some, dims) in {(4,), (5,), (6,)}


def test_scalars() -> None:
    op = Block(outs=("y",), dims=(), reduce=(Dim("r", 3),), monoid="sum")
    assert space.access(op, read(), ()).hull() == ()
    assert space.reads_of_outputs(op, read(R), (3,)).hull() == ((0, 3),)
    assert space.identity(()).injective()


def test_dependences_chain_through_operations() -> None:
    graph = parse("""graph two
input x: f32[8]
t: f32[6] = op [h: 6 | r: 3 sum]
  reads x[h + r]
  body x
y: f32[4] = op [h: 4 | r: 3 sum]
  reads t[h + r], x[h]
  body t * x
output y
""")
    relation = dependences(graph, "y")["x"]
    first = relation.image(((1, 2),))
    assert first is not None and first.hull() == ((1, 6),)
