"""Text of the IR: what is printed reads back, and what does not read says on which line."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry.errors import TextError
from tapestry.ir.expr import Acc, Arg, Const, Expr, Index, call, cast
from tapestry.ir.graph import Block, Dim, Graph, Guard, Opaque, Read, Split
from tapestry.ir.index import Aff, const, dim, floordiv, modulo
from tapestry.ir.monoid import number
from tapestry.ir.syntax.ir_document import from_document, to_document
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import RESERVED, to_text
from tapestry.ir.types import DTYPES, FLOATS, Tensor, Weight

DIMS = (Dim("h", 4), Dim("w", 3), Dim("r", 5))
RANGES = {d.name: d.size for d in DIMS}
affs = st.recursive(
    st.sampled_from([dim(d.name) for d in DIMS]) | st.builds(const, st.integers(-9, 9)),
    lambda inner: (
        st.builds(lambda a, b, k: a + b * k, inner, inner, st.integers(-4, 4))
        | st.builds(floordiv, inner, st.integers(1, 6), st.sampled_from([None, RANGES]))
        | st.builds(modulo, inner, st.integers(1, 6), st.sampled_from([None, RANGES]))
    ),
    max_leaves=5,
)
SHOWN = st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp", "Zs"), include_characters=" ")
names = st.text(SHOWN, min_size=1, max_size=6) | st.sampled_from(
    [*sorted(RESERVED), "acc0", "x.1", "/layer/Add_output_0", "h", 'a"b\\', "α", "a b"]
)


def literals(dtype: str) -> st.SearchStrategy[Const]:
    if dtype in FLOATS:
        values = st.floats(width=32, allow_nan=False) | st.sampled_from([math.inf, -math.inf, -0.0, 1e30, 1e-30])
        return values.map(lambda v: Const(v, dtype))
    if dtype == "bool":
        return st.booleans().map(lambda v: Const(v, dtype))
    return st.integers(0 if dtype.startswith("u") else -100, 100).map(lambda v: Const(v, dtype))


@st.composite
def exprs(draw: st.DrawFn, leaves: tuple[Expr, ...], dtype: str, depth: int = 3) -> Expr:
    """A random expression of a dtype over some leaves."""
    same = [x for x in leaves if x.dtype == dtype]
    if depth == 0 or draw(st.booleans()):
        options: list[st.SearchStrategy[Expr]] = [literals(dtype)] + ([st.sampled_from(same)] if same else [])
        if dtype == "i64":
            options.append(affs.map(Index))
        return draw(st.one_of(options))

    def sub(kind: str) -> Expr:
        return draw(exprs(leaves, kind, depth - 1))

    shape = draw(st.sampled_from(["binary", "where", "cast", *(["compare", "logic"] if dtype == "bool" else ["unary"])]))
    if shape == "where":
        return call("where", sub("bool"), sub(dtype), sub(dtype))
    if shape == "cast":
        return cast(sub(draw(st.sampled_from(["f32", "i64", "bool", "f16"]))), dtype)
    if shape == "compare":
        return call(draw(st.sampled_from(["eq", "lt"])), sub("f32"), sub("f32"))
    if shape == "logic":
        return call("not", sub("bool"))
    if shape == "unary":
        return call(draw(st.sampled_from(["neg", "abs", *(["exp", "floor"] if dtype in FLOATS else [])])), sub(dtype))
    fns = ["and", "or"] if dtype == "bool" else ["add", "sub", "mul", "div", "max"]
    return call(draw(st.sampled_from(fns)), sub(dtype), sub(dtype))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A random graph: it need not obey the laws, only read back."""
    title, *tensors = draw(st.lists(names, min_size=5, max_size=5, unique=True))
    kinds = st.sampled_from(["f32", "i64", "bool", "bf16"])
    shape = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    made = [Tensor(name=t, dtype=draw(kinds), shape=draw(shape)) for t in tensors]
    made[0] = replace(made[0], kind="input")
    made[1] = replace(made[1], kind="weight")
    weight = Weight(file=draw(st.text(max_size=5)), offset=7, length=9, name=draw(st.text(max_size=3)), sha256="ab")
    guards = st.lists(st.builds(Guard, affs, st.sampled_from(["ge", "eq"])), max_size=2).map(tuple)
    reads: list[Read] = []
    for t in draw(st.lists(st.sampled_from(made[:2]), max_size=3)):
        other = draw(st.none() | literals(t.dtype).map(lambda c: c.value))
        reads.append(Read(tensor=t.name, index=draw(st.lists(affs, max_size=2).map(tuple)), other=other, when=draw(guards)))
    args: tuple[Expr, ...] = tuple(Arg(i, next(t.dtype for t in made if t.name == r.tensor)) for i, r in enumerate(reads))
    reduced = draw(st.booleans())
    fields = ("f32", "f32") if reduced else (made[2].dtype,)
    body = tuple(draw(exprs(args, d)) for d in fields)
    accs = tuple(Acc(i, d) for i, d in enumerate(fields))
    then = (draw(exprs((*args, *accs), made[2].dtype)),) if reduced else ()
    source = tuple(draw(st.lists(st.text(SHOWN, max_size=4), max_size=2)))
    split = st.builds(Split, st.sampled_from("hw"), st.integers(1, 9), st.sampled_from(["mesh.d0", "time"]))
    splits = tuple(draw(st.lists(split)))
    block = Block(
        outs=(tensors[2],), dims=DIMS[:2], reduce=DIMS[2:] if reduced else (), monoid="logsumexp" if reduced else None,
        reads=tuple(reads), body=body, then=then, source=source, splits=splits,
    )  # fmt: skip
    opaque = Opaque(
        outs=(tensors[3],), ins=(tensors[2], ""), kind=draw(names), node=draw(st.binary(max_size=4)), opsets=(("", 17),),
        dims=DIMS[:1], in_axes=((0,), (None,)), out_axes=((1,),), why=draw(st.text(SHOWN, max_size=4)), splits=splits[:1],
    )  # fmt: skip
    return Graph(
        name=title, tensors={t.name: t for t in made}, ops=(block, opaque), inputs=(tensors[0],),
        outputs=(tensors[3], tensors[2]), weights={tensors[1]: weight},
    )  # fmt: skip


@given(graphs())
def test_documents_read_back(graph: Graph) -> None:
    assert from_document(json.dumps(to_document(graph))) == graph


@given(graphs())
def test_graphs_read_back(graph: Graph) -> None:
    text = to_text(graph)
    back = parse(text)
    assert back == graph
    assert repr(back.ops) == repr(graph.ops)  # signs of zeros too
    assert to_text(back) == text


@given(affs)
def test_index_expressions_read_back(e: Aff) -> None:
    text = f"graph g\ninput x: f32[9]\ny: f32[4, 3, 5] = op [h: 4, w: 3, r: 5]\n  reads x[{e}] else nan\n  body x\noutput y\n"
    op = parse(text).ops[0]
    assert isinstance(op, Block) and op.reads[0].index == (e,)
    assert to_text(parse(text)) == text


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"host"}))
def test_literals_of_every_dtype(dtype: str) -> None:
    text = f"graph g\ny: {dtype}[] = op []\n  body {dtype}({1 if dtype != 'bool' else 'true'})\noutput y\n"
    op = parse(text).ops[0]
    assert isinstance(op, Block) and op.body == (number(1, dtype),)
    assert parse(to_text(parse(text))) == parse(text)


def test_a_reduction_over_no_dimension_reads_back():
    """ReduceMax of a scalar and what follows it: without its monoid the text would say that nothing follows."""
    x, acc = Arg(0, "f32"), (Acc(0, "f32"), Acc(1, "f32"))
    then = call("sub", call("max", acc[0], number(0, "f32")), acc[1])
    op = Block(
        outs=("y",), dims=(), reduce=(), monoid="max.min", reads=(Read(tensor="x", index=()),), body=(x, x), then=(then,)
    )
    tensors = {n: Tensor(name=n, dtype="f32", shape=(), kind=k) for n, k in (("x", "input"), ("y", "value"))}
    g = Graph(name="g", tensors=tensors, ops=(op,), inputs=("x",), outputs=("y",))
    assert parse(to_text(g)) == g
    with pytest.raises(TextError, match="one known monoid"):
        parse(to_text(g).replace("max.min", "frob"))


HEAD = "graph g\ninput x: f32[4]\n"
OP = "y: f32[4] = op [n: 4]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grph g", "line 1: expected 'graph', found 'grph'"),
        ("graph g\ninput x: f33[4]", "line 2: expected a dtype, found 'f33'"),
        ("graph g\ninput x: f32[4.5]", "line 2: expected an integer"),
        (HEAD + "input x: f32[4]", "line 3: tensor 'x' is declared twice"),
        (HEAD + OP + "  reads z[n]\n  body z\noutput y", "line 4: tensor 'z' is not declared"),
        (HEAD + OP + "  reads x[n]\n  body z\noutput y", "line 5: expected the name of a read or of a primitive, found 'z'"),
        (HEAD + OP + "  reads x[n]\n  body x + 1\noutput y", "line 5: add: arguments differ in dtype: ['f32', 'i64']"),
        (HEAD + OP + "  reads x[n]\n  body where(x, x, x)\noutput y", "line 5: where: the condition is not bool"),
        (HEAD + OP + "  reads x[n]\n  body exp(x, x)\noutput y", "line 5: exp takes 1 arguments, not 2"),
        (
            HEAD + OP + "  reads x[n]\n  body acc0\noutput y",
            "line 5: expected the name of a read or of a primitive, found 'acc0'",
        ),
        (HEAD + OP + "  reads x[n] when n\n  body x\noutput y", "line 5: expected '==', found 'body'"),
        (HEAD + "y: f32[4] = op [n: 4 | m: 3 frob]\n", "line 3: expected one known monoid for all reduced dimensions"),
        (HEAD + OP + "  reads x[n]\n  body x\n", "line 6: expected a name, found 'end of text'"),
        (HEAD + OP + "  reads x[n] ! \n", "line 4: unexpected character '!'"),
        (HEAD + "y: f32[4] = map [n: 4]", "line 3: expected 'op', found 'map'"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(TextError) as e:
        parse(text)
    line, _, what = message.partition(": ")
    assert e.value.where.startswith(line + ",")
    assert e.value.what.startswith(what)


def test_errors_point_at_the_column() -> None:
    with pytest.raises(TextError) as e:
        parse(HEAD + OP + "  reads x[n]\n  body tanh(x) + 1\noutput y", "mine.tap")
    assert str(e.value) == "mine.tap:5:8: add: arguments differ in dtype: ['f32', 'i64']\n      body tanh(x) + 1\n           ^"
    with pytest.raises(TextError) as e:
        parse("graph g\ninput x: f33[4]")
    assert str(e.value) == "line 2, column 10: expected a dtype, found 'f33'\n    input x: f33[4]\n             ^"
    with pytest.raises(TextError) as e:
        parse("graph g\ninput")
    assert str(e.value) == "line 2, column 6: expected a name, found 'end of text'\n    input\n         ^"
