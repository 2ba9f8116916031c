"""``tapestry prove``: right programs are proved, faults are refuted with a witness, and neither is said where it is not known."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tapestry.cli.entry import main
from tapestry.tools.prove.collectives import Collective
from tapestry.tools.prove.values import Domain, join_all
from tapestry.tools.prove.verdict import PROVED, REFUTED, UNDECIDED, prove
from tapestry.tools.prove.witness import collective
from tests.support.halo_nets import FAULTS, Layer
from tests.support.halo_nets import write as write_halos
from tests.support.parallel_nets import Sizes, Style, write
from tests.support.program_faults import KINDS

SIZES = Sizes(batch=2, sequence=4, width=16, inner=16, layers=1, vocabulary=8)
RIGHT = [
    ("mlp", Style(dp=2, tp=2)),
    ("decoder", Style(tp=4)),
    ("decoder", Style(tp=2, sequence=True, head="gathered")),
    ("decoder", Style(dp=2, tp=2, context=True)),
    ("decoder", Style(dp=2, tp=2, context=True, ring=True)),
    ("encoder", Style(tp=4, context=True, ring=True)),
    ("decoder", Style(tp=2, head="rows")),
    ("encoder", Style(tp=2, sequence=True)),
    ("convolutions", Style(dp=2, tp=2)),
    ("experts", Style(tp=4)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("net", "style"), RIGHT, ids=str)
def test_a_right_program_is_proved(net: str, style: Style, tmp_path: Path) -> None:
    model, program = write(net, style, tmp_path, SIZES)
    verdict = prove(model, [program])
    assert verdict.status == PROVED, verdict.text()
    assert all(o["state"] == PROVED for o in verdict.document["outputs"])


HALOS = [
    ([Layer(kernel=4, stride=2), Layer()], 1, 2, "explicit"),
    ([Layer(dilation=2, pad=2)], 1, 4, "halo"),
    ([Layer(), Layer("MaxPool")], 2, 4, "halo"),
    ([Layer(), Layer(stride=2)], 2, 2, "whole"),
    ([Layer(), Layer("AveragePool")], 1, 2, "halo"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layers", "axes", "world", "way"), HALOS, ids=str)
def test_windows_cut_in_space_are_proved(layers: list[Layer], axes: int, world: int, way: str, tmp_path: Path) -> None:
    model, program = write_halos(tmp_path, layers, world, 16, axes, way)
    verdict = prove(model, [program])
    assert verdict.status == PROVED, verdict.text()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_halos_are_refuted_with_a_witness(fault: str, tmp_path: Path) -> None:
    model, program = write_halos(tmp_path, [Layer()], 4, 16, 1, "halo", fault)
    verdict = prove(model, [program])
    assert verdict.status == REFUTED, verdict.text()
    assert verdict.witness is not None
    assert verdict.witness["rank"] == 1


def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    model, program = write("encoder", Style(pp=2, tp=2), tmp_path, Sizes(batch=2, sequence=4, width=16, inner=16, layers=2))
    assert prove(model, [program]).status == PROVED


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_refuted_with_a_witness(kind: str, tmp_path: Path) -> None:
    styles = [("decoder", Style(tp=4)), ("decoder", Style(tp=2, sequence=True)), ("decoder", Style(tp=2, context=True))]
    styles.append(("encoder", Style(pp=2)))
    sizes = Sizes(batch=2, sequence=4, width=16, inner=16, layers=2, vocabulary=8)
    for k, (net, style) in enumerate(styles):
        model, program = write(net, style, tmp_path / str(k), sizes)
        files = [program / f"rank{r}.onnx" for r in range(style.world)]
        ranks = [onnx.load(f) for f in files]
        if KINDS[kind](ranks, random.Random(3)) is None:
            continue
        for f, m in zip(files, ranks, strict=True):
            onnx.save(m, f)
        verdict = prove(model, [program])
        assert verdict.status == REFUTED, verdict.text()
        assert verdict.witness is not None
        assert verdict.witness["rank"] in range(style.world)
        return
    pytest.fail("no network has a place for this fault")


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["Mul", "Exp", "Add"])
def test_a_ring_that_forgets_a_step_is_refuted(what: str, tmp_path: Path) -> None:
    """A state that is not rescaled, or by another number; a part that is not added."""
    model, program = write("encoder", Style(tp=4, context=True, ring=True), tmp_path, SIZES)
    for file in program.glob("*.onnx"):
        rank = onnx.load(file)
        node = [n for n in rank.graph.node if n.op_type == what and _in_ring(rank, n)][-1]
        put = {"Mul": ("Identity", node.input[:1]), "Exp": ("Sigmoid", node.input)}
        kind, ins = put.get(what, ("Identity", node.input[1:]))
        node.CopyFrom(helper.make_node(kind, list(ins), list(node.output), name=node.name))
        onnx.save(rank, file)
    verdict = prove(model, [program])
    assert verdict.status == REFUTED, verdict.text()


def _in_ring(rank: onnx.ModelProto, node: onnx.NodeProto) -> bool:
    """Whether a node is between the first greatest score and the quotient."""
    names = [n.name for n in rank.graph.node]
    first = next(k for k, n in enumerate(rank.graph.node) if n.op_type == "ReduceMax")
    last = next(k for k, n in enumerate(rank.graph.node) if n.op_type == "Div")
    return first < names.index(node.name) < last and (node.op_type != "Mul" or not node.input[1].startswith("c_"))


def test_the_witness_names_what_is_read_instead(tmp_path: Path) -> None:
    """Two ranks' parts of one bias exchanged: the sum reads row 8 of one beside row 0 of the other."""
    model, program = write("mlp", Style(tp=2), tmp_path, SIZES)
    ranks = [onnx.load(program / f"rank{r}.onnx") for r in range(2)]
    tensors = [next(t for t in m.graph.initializer if t.name == "l0.a.b") for m in ranks]
    first = tensors[0].raw_data
    tensors[0].raw_data, tensors[1].raw_data = tensors[1].raw_data, first
    for r, m in enumerate(ranks):
        onnx.save(m, program / f"rank{r}.onnx")
    verdict = prove(model, [program])
    assert verdict.status == REFUTED
    assert verdict.witness is not None
    assert verdict.witness["first"]["tensor"] == "gemm_0"
    assert "l0.a.b at 8 of axis 0" in verdict.witness["text"]


def test_a_sum_over_ranks_that_hold_the_same_is_not_the_value(tmp_path: Path) -> None:
    """``x + x`` on every rank, all-reduced: terms are counted, once for every rank and every use."""
    x = helper.make_tensor_value_info("x", 1, [4])
    y = helper.make_tensor_value_info("y", 1, [4])
    four = helper.make_node("Constant", [], ["c"], value_float=4.0)
    model = helper.make_model(helper.make_graph([four, helper.make_node("Mul", ["x", "c"], ["y"])], "g", [x], [y]))
    summed = helper.make_node("DistCollective", ["s"], ["y"], collective_operation="ALL_REDUCE", reduce_op="SUM", nb_rank=2)
    rank = helper.make_model(helper.make_graph([helper.make_node("Add", ["x", "x"], ["s"]), summed], "g", [x], [y]))
    alone = helper.make_model(helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [x], [y]))
    for m, name in ((model, "model"), (rank, "rank"), (alone, "alone")):
        m.ir_version = 10
        m.opset_import[0].version = 20
        onnx.save(m, tmp_path / f"{name}.onnx")
    assert prove(tmp_path / "model.onnx", [tmp_path / "rank.onnx"]).status == PROVED
    assert prove(tmp_path / "alone.onnx", [tmp_path / "rank.onnx"]).status == REFUTED


def test_what_is_equal_for_another_reason_is_not_decided(tmp_path: Path) -> None:
    """``x * (a + b)`` for ``x * a + x * b``: no counterpart, no difference, and so no answer; status 2."""
    info = {n: helper.make_tensor_value_info(n, 1, [4]) for n in "xaby"}
    ins = [info[n] for n in "xab"]
    apart = [helper.make_node("Mul", ["x", n], [f"x{n}"]) for n in "ab"]
    one = [helper.make_node("Add", ["a", "b"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
    for name, nodes in (("model", [*apart, helper.make_node("Add", ["xa", "xb"], ["y"])]), ("rank", one)):
        opset = [helper.make_opsetid("", 20)]
        onnx.save(
            helper.make_model(helper.make_graph(nodes, "g", ins, [info["y"]]), opset_imports=opset, ir_version=10),
            tmp_path / f"{name}.onnx",
        )
    assert prove(tmp_path / "model.onnx", [tmp_path / "rank.onnx"]).status == UNDECIDED
    assert main(["prove", str(tmp_path / "model.onnx"), str(tmp_path / "rank.onnx"), "-q"]) == 2


def test_parts_that_may_lie_in_two_orders(tmp_path: Path) -> None:
    """Without ``program.json`` shapes do not say which ranks share a batch: a proof for one order, no refutation by another."""
    model, program = write("mlp", Style(dp=2, tp=2), tmp_path, SIZES)
    (program / "program.json").unlink()
    assert prove(model, [program]).status == PROVED
    for r in range(4):
        m = onnx.load(program / f"rank{r}.onnx")
        next(n for n in m.graph.node if n.op_type == "Tanh").op_type = "Sigmoid"
        onnx.save(m, program / f"rank{r}.onnx")
    assert prove(model, [program]).status == UNDECIDED


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, program = write("mlp", Style(tp=2), tmp_path, SIZES)
    assert main(["prove", str(model), str(program), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["proved"] and document["evidence"]["kind"] == "normal form"
    assert main(["prove", str(model), str(program / "rank0.onnx"), str(program / "rank0.onnx"), "-q"]) == 1
    assert main(["prove", str(model), str(tmp_path / "nothing"), "-q"]) == 2
    (program / "program.json").write_text('{"mesh": {"tp": 3}}')
    assert main(["prove", str(model), str(program), "-q"]) == 2


def test_weights_without_data_are_taken_as_given(tmp_path: Path) -> None:
    model, program = write("decoder", Style(tp=2), tmp_path, SIZES, data=False)
    verdict = prove(model, [program])
    assert verdict.status == PROVED
    assert any("l0.q" in a for a in verdict.document["assumed"])


def _program(
    path: Path, nodes: list[onnx.NodeProto], kind: int, shapes: dict[str, list[int]], data: dict[str, np.ndarray]
) -> Path:
    ins = [helper.make_tensor_value_info(n, kind, s) for n, s in shapes.items()]
    outs = [helper.make_tensor_value_info("y", kind, None)]
    graph = helper.make_graph(nodes, "g", ins, outs, [numpy_helper.from_array(a, n) for n, a in data.items()])
    path.parent.mkdir(exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


_N = helper.make_node
_AX, _FOUR = {"ax": np.array([0])}, {"four": np.array(4, np.int32)}
_EXP = [_N("Sub", ["a", "b"], ["s"]), _N("Exp", ["s"], ["e"]), _N("Exp", ["e"], ["f"])]
LIKELY = {
    "a quotient of a sum": (
        [_N("Div", ["a", "b"], ["q"]), _N("ReduceSum", ["q", "ax"], ["y"])],
        [_N("ReduceSum", ["a", "ax"], ["s"]), _N("Div", ["s", "b"], ["y"])], onnx.TensorProto.INT32, _AX,
    ),
    "a quotient times its divisor": (
        [_N("Identity", ["a"], ["y"])],
        [_N("Div", ["a", "four"], ["q"]), _N("Mul", ["q", "four"], ["y"])], onnx.TensorProto.INT32, _FOUR,
    ),
    "a choice of what is one factor alone": (
        [*_EXP[:2], _N("Exp", ["e"], ["y"])],
        [*_EXP, _N("Equal", ["a", "b"], ["t"]), _N("Where", ["t", "e", "f"], ["y"])], onnx.TensorProto.FLOAT, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LIKELY)
def test_what_only_looks_equal_is_not_proved(what: str, tmp_path: Path) -> None:
    model, rank, kind, data = LIKELY[what]
    shapes = {"a": [4], "b": [4] if kind == onnx.TensorProto.FLOAT else []}
    read = {i for n in (*model, *rank) for i in n.input}
    shapes = {n: s for n, s in shapes.items() if n in read}
    files = [_program(tmp_path / n, nodes, kind, shapes, data) for n, nodes in (("m.onnx", model), ("r.onnx", rank))]
    assert prove(files[0], [files[1]]).status != PROVED


def test_a_sum_that_decays_is_added_in_parts(tmp_path: Path) -> None:
    """MatMul(exp(x-a), v)·exp(a-b): the factor is the model's own, and no rescaled state."""
    v = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)

    def decayed(out: str) -> list[onnx.NodeProto]:
        factors = [_N("Sub", ["x", "a"], ["u"]), _N("Exp", ["u"], ["e"]), _N("Sub", ["a", "b"], ["t"]), _N("Exp", ["t"], ["f"])]
        return [*factors, _N("MatMul", ["e", "v"], ["s"]), _N("Mul", ["s", "f"], [out])]

    sides = {"a": [2, 1], "b": [2, 1]}
    model = _program(tmp_path / "m.onnx", decayed("y"), onnx.TensorProto.FLOAT, {"x": [2, 8], **sides}, {"v": v})
    how = {"collective_operation": "ALL_REDUCE", "reduce_op": "SUM", "nb_rank": 2}
    for r in range(2):
        nodes = [*decayed("part"), _N("DistCollective", ["part"], ["y"], **how)]
        _program(
            tmp_path / "r" / f"rank{r}.onnx", nodes, onnx.TensorProto.FLOAT, {"x": [2, 4], **sides}, {"v": v[4 * r : 4 * r + 4]}
        )
    assert prove(model, [tmp_path / "r"]).status == PROVED


def test_domains() -> None:
    parts = [Domain((((lo, lo + 4),),)) for lo in (0, 4, 8)]
    whole = join_all(parts, False)
    assert whole is not None and whole.whole((12,))
    assert join_all([*parts, parts[1]], False) is None
    assert join_all([*parts, parts[1]], True) == whole
    gap = join_all(parts[::2], False)
    assert gap is not None and not gap.whole((12,))
    corners = [Domain((((0, 2),), ((0, 2),))), Domain((((2, 4),), ((2, 4),)))]
    assert join_all(corners, False) is None


@pytest.mark.parametrize("kind", ["ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL", "SCATTER", "GATHER", "BROADCAST", "REDUCE"])
def test_what_collectives_move_is_what_they_are_proved_to_move(kind: str, tmp_path: Path) -> None:
    """A model written from a collective's definition, and a program that has the collective: its symbolic side against numpy's."""
    n, shape = 2, (4, 3)
    op = "SUM" if kind in ("REDUCE", "REDUCE_SCATTER") else "NONE"
    c = Collective("c", kind, op, 0, tuple(range(n)), "x", "y")
    whole = np.arange(n * 12, dtype=np.float32).reshape(n, *shape)
    results = [r for r in collective(c, list(whole)) if r is not None]
    out = list(results[0].shape)
    x, y = helper.make_tensor_value_info("x", 1, list(shape)), helper.make_tensor_value_info("y", 1, out)
    root = {"root": 0} if kind in ("BROADCAST", "REDUCE", "SCATTER", "GATHER") else {}
    node = helper.make_node("DistCollective", ["x"], ["y"], collective_operation=kind, reduce_op=op, nb_rank=n, **root)
    rank = helper.make_model(
        helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    (tmp_path / "p").mkdir()
    for r in range(n):
        onnx.save(rank, tmp_path / "p" / f"rank{r}.onnx")
    from tapestry.tools.prove.proof import compare
    from tapestry.tools.prove.rank_programs import read_file, read_program

    given = helper.make_tensor_value_info("x", 1, [n * shape[0], shape[1]])
    nodes = [helper.make_node("Identity", ["x"], ["z"])]
    z = helper.make_tensor_value_info("z", 1, [n * shape[0], shape[1]])
    onnx.save(
        helper.make_model(
            helper.make_graph(nodes, "g", [given], [z]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
        ),
        tmp_path / "model.onnx",
    )
    found = compare(read_file(tmp_path / "model.onnx", {}), read_program([tmp_path / "p"], {}))
    for r, expected in enumerate(collective(c, list(whole))):
        value = found.ranks[r].get("y")
        if expected is None:
            assert value is None
            continue
        got = np.array([_cell(found, value, at, whole.reshape(-1, 3)) for at in np.ndindex(*expected.shape)])
        assert np.array_equal(got.reshape(expected.shape), expected)


def _two_sections(path: Path, w: np.ndarray, u: np.ndarray, v: np.ndarray, ranks: int) -> None:
    """``y`` = ``a`` u + ``b`` v, where ``a`` and ``b`` are the sections of x wᵀ; summed over ranks where there are some."""
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["ab"], transB=1),
        helper.make_node("Split", ["ab", "sizes"], ["a", "b"], axis=1),
    ]
    nodes += [helper.make_node("MatMul", [a, c], [d]) for a, c, d in (("a", "u", "au"), ("b", "v", "bv"))]
    nodes.append(helper.make_node("Add", ["au", "bv"], ["part" if ranks else "y"]))
    if ranks:
        how = {"collective_operation": "ALL_REDUCE", "reduce_op": "SUM", "nb_rank": ranks}
        nodes.append(helper.make_node("DistCollective", ["part"], ["y"], **how))
    weights = [numpy_helper.from_array(a, n) for a, n in ((w, "w"), (u, "u"), (v, "v"), (np.array([len(u), len(v)]), "sizes"))]
    info = [helper.make_tensor_value_info(n, 1, [2, k]) for n, k in (("x", 4), ("y", 3))]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sections", [(6, 6), (8, 4)])
@pytest.mark.parametrize("halves", [True, False])
def test_a_weight_that_is_cut_within_its_sections(sections: tuple[int, int], halves: bool, tmp_path: Path) -> None:
    """Halves of each section, or every second row: regular runs, and runs of several sizes; two rows exchanged are refuted."""
    rng = np.random.default_rng(0)
    w, u, v = (rng.standard_normal(s).astype(np.float32) for s in ((12, 4), (sections[0], 3), (sections[1], 3)))
    _two_sections(tmp_path / "model.onnx", w, u, v, 0)
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        mine = [np.arange(n).reshape(2, -1)[rank] if halves else np.arange(rank, n, 2) for n in sections]
        rows = np.concatenate([mine[0], mine[1] + sections[0]])
        _two_sections(tmp_path / "ranks" / f"rank{rank}.onnx", w[rows], u[mine[0]], v[mine[1]], 2)
    verdict = prove(tmp_path / "model.onnx", [tmp_path / "ranks"])
    assert verdict.status == PROVED, verdict.text()
    rows[[0, 1]] = rows[[1, 0]]
    _two_sections(tmp_path / "ranks" / "rank1.onnx", w[rows], u[mine[0]], v[mine[1]], 2)
    verdict = prove(tmp_path / "model.onnx", [tmp_path / "ranks"])
    assert verdict.status == REFUTED and verdict.witness is not None and verdict.witness["cell"]


@pytest.mark.parametrize("op", ["SUM", "MAX"])
def test_a_sum_over_ranks_of_sums_over_experts(op: str, tmp_path: Path) -> None:
    """What is partial lies inside another sum, times gates, as in experts whose inner axis is cut."""
    d = np.random.default_rng(0).standard_normal((3, 8, 4)).astype(np.float32)
    (tmp_path / "ranks").mkdir()

    def write_one(path: Path, mine: np.ndarray, ranks: int) -> None:
        nodes = [helper.make_node("MatMul", ["h", "d"], ["e"]), helper.make_node("Mul", ["e", "g"], ["w"])]
        nodes.append(helper.make_node("ReduceSum", ["w", "axis"], ["part" if ranks else "y"], keepdims=0))
        if ranks:
            how = {"collective_operation": "ALL_REDUCE", "reduce_op": op, "nb_rank": ranks}
            nodes.append(helper.make_node("DistCollective", ["part"], ["y"], **how))
        shapes = {"h": [3, 2, mine.shape[1]], "g": [3, 2, 1], "y": [2, 4]}
        info = [helper.make_tensor_value_info(n, 1, s) for n, s in shapes.items()]
        weights = [numpy_helper.from_array(mine, "d"), numpy_helper.from_array(np.array([0]), "axis")]
        graph = helper.make_graph(nodes, "g", info[:2], info[2:], weights)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)

    write_one(tmp_path / "model.onnx", d, 0)
    for rank in range(2):
        write_one(tmp_path / "ranks" / f"rank{rank}.onnx", d[:, 4 * rank : 4 * rank + 4], 2)
    verdict = prove(tmp_path / "model.onnx", [tmp_path / "ranks"])
    assert verdict.status == (PROVED if op == "SUM" else REFUTED), verdict.text()


def _cell(found: object, value: object, at: tuple[int, ...], x: np.ndarray) -> float:
    """The number that a value has at a cell, by its nodes."""
    from tapestry.ir.expr import Const
    from tapestry.ir.index import evaluate
    from tapestry.tools.prove.proof import Comparison
    from tapestry.tools.prove.values import Ref

    assert isinstance(found, Comparison)
    if isinstance(value, Const):
        return float(value.value)
    assert isinstance(value, Ref)
    place = {f"y{k}": i for k, i in enumerate(at)}
    node, index = found.table.nodes[value.node], [int(evaluate(e, place)) for e in value.index]
    if node.kind == "leaf":
        return float(x[tuple(index)]) if node.label == ("x",) else float(index[0])
    test, *args = [a if isinstance(a, Const) else Ref(a.node, tuple(_at(e, index) for e in a.index)) for a in node.args]
    if node.label[0] == "where":
        return _cell(found, args[0] if _cell(found, test, (), x) else args[1], (), x)
    if node.label[0] == "test ge":
        return _cell(found, test, (), x) >= 0
    assert node.label[0] == "add"
    return _cell(found, test, (), x) + _cell(found, args[0], (), x)


def _at(e: object, index: list[int]):
    from tapestry.ir.index import Aff, const, evaluate

    assert isinstance(e, Aff)
    return const(int(evaluate(e, {f"v{k}": i for k, i in enumerate(index)})))


def test_a_value_of_the_host_is_not_followed(tmp_path: Path) -> None:
    """How many places NonZero gives depends on the data: ranks that have to wait for it are not said to wait for ever."""
    x, y = helper.make_tensor_value_info("x", 1, [4]), helper.make_tensor_value_info("y", 1, [])
    nodes = [
        helper.make_node("NonZero", ["x"], ["n"]),
        helper.make_node("Cast", ["n"], ["f"], to=1),
        helper.make_node("ReduceSum", ["f"], ["s"], keepdims=0),
    ]
    most = helper.make_node("DistCollective", ["s"], ["y"], collective_operation="ALL_REDUCE", reduce_op="MAX", nb_rank=2)
    for name, last in (("model", helper.make_node("Identity", ["s"], ["y"])), ("rank", most)):
        graph = helper.make_graph([*nodes, last], "g", [x], [y])
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / f"{name}.onnx"
        )
    assert prove(tmp_path / "model.onnx", [tmp_path / "rank.onnx"]).status == UNDECIDED


def single(folder: Path, nodes: list, ins: dict, outs: dict, weights: dict) -> Path:
    """A model in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(n, *t) for n, t in ins.items()],
        [helper.make_tensor_value_info(n, *t) for n, t in outs.items()],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 19)])
    onnx.save(model, folder / "rank0.onnx")
    return folder / "rank0.onnx"


def test_an_input_called_index_is_not_its_own_place(tmp_path: Path) -> None:
    ints, outs = {"index": (onnx.TensorProto.INT64, [4])}, {"y": (onnx.TensorProto.INT64, [4])}
    added = {"c": np.array([7, 9, 3, 4]), "r": np.arange(4)}
    model = single(tmp_path / "m", [helper.make_node("Add", ["index", "c"], ["y"])], ints, outs, added)
    wrong = single(tmp_path / "p", [helper.make_node("Add", ["r", "c"], ["y"])], ints, outs, added)
    assert prove(model, [wrong.parent]).status == REFUTED


def test_padding_of_padding_of_one_row(tmp_path: Path) -> None:
    """The value that is padded is another node inside than outside."""
    nodes = [
        helper.make_node(*n) for n in (("Expand", ["x", "s"], ["e"]), ("Pad", ["e", "p1"], ["a"]), ("Pad", ["a", "p2"], ["y"]))
    ]
    ends = {"x": (onnx.TensorProto.FLOAT, [6])}, {"y": (onnx.TensorProto.FLOAT, [6, 6])}
    sizes = {"s": np.array([4, 6]), "p1": np.array([4, 0, 0, 0]), "p2": np.array([-4, 0, 2, 0])}
    model = single(tmp_path / "m", nodes, *ends, sizes)
    assert prove(model, [model.parent]).status == PROVED


def test_ranks_without_a_cell_of_an_output_have_not_all_of_it(tmp_path: Path) -> None:
    def relu(folder: str, cells: int, cut: list) -> Path:
        ends = {"x": (onnx.TensorProto.FLOAT, [cells])}, {"y": (onnx.TensorProto.FLOAT, [0 if cut else cells])}
        nodes = [*cut, helper.make_node("Relu", ["q" if cut else "x"], ["y"])]
        return single(tmp_path / folder, nodes, *ends, {"s": np.array([0]), "e": np.array([0])})

    model, program = relu("m", 4, []), relu("p", 2, [helper.make_node("Slice", ["x", "s", "e"], ["q"])])
    program.with_name("rank1.onnx").write_bytes(program.read_bytes())
    (program.parent / "program.json").write_text(json.dumps({"mesh": {"r": 2}, "placement": {"x": ["r"], "y": ["r"]}}))
    assert prove(model, [program.parent]).status == UNDECIDED


def test_a_placed_output_with_an_axis_too_many_is_no_part(tmp_path: Path) -> None:
    x = {"x": (onnx.TensorProto.FLOAT, [4])}
    model = single(tmp_path / "m", [helper.make_node("Relu", ["x"], ["y"])], x, {"y": (onnx.TensorProto.FLOAT, [4])}, {})
    nodes = [helper.make_node("Relu", ["x"], ["q"]), helper.make_node("Unsqueeze", ["q", "a"], ["y"])]
    program = single(tmp_path / "p", nodes, x, {"y": (onnx.TensorProto.FLOAT, [4, 1])}, {"a": np.array([1])})
    (program.parent / "program.json").write_text(json.dumps({"mesh": {"r": 1}, "placement": {"y": [None]}}))
    assert "rank 0 has [4, 1] of [4]" in prove(model, [program.parent]).text()
