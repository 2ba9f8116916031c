"""Rewrites are proved by what they did: the evidence for each, and what is refused; the log of a build, undone and proved again."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tapestry.build import store
from tapestry.compiler import passes
from tapestry.compiler.saved_build import replay_rewrites
from tapestry.errors import BuildError, LawError, TextError
from tapestry.ir.graph import Graph, Rewrite, changes
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.lift import lift
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule import parse_move
from tapestry.rewrites.core.rule_check import documented
from tapestry.verify.rewriting import history, proofs, rewrite_log
from tapestry.verify.rewriting.regions import MOST_KEPT
from tests.support.command_line import attention_build, document, run
from tests.support.rule_cases import opaque_graph
from tests.support.small_models import case, save

PRODUCT = """graph g
input x: f32[{rows}, 768]
input w: f32[768, 3072]
y: f32[{rows}, 3072] = op [i: {rows}, n: 3072 | m: 768 sum]
  reads x[i, m], w[m, n]
  body {body}
  then {then}
output y
"""


def shown(before: str, after: str, exact: bool = False) -> dict[str, int]:
    return dict(proofs.prove_step(Rewrite("mine@y", parse(before), parse(after), exact)))


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", sorted(RULES))
def test_the_example_of_every_rule_is_proved(name: str) -> None:
    before, move, _ = documented(RULES[name])
    after = apply_moves(parse(before), [parse_move(move)])
    (step,) = changes(after)
    found = proofs.prove_step(step)
    assert found and proofs.UNPROVED not in found


def test_evidence_says_what_it_is() -> None:
    plain = PRODUCT.format(rows=4, body="x * w", then="acc0")
    assert shown(plain, plain.replace("x * w", "w * x")) == {"normal form": 1}
    scaled = PRODUCT.format(rows=4, body="(x * w) * 0.5", then="acc0")
    behind = PRODUCT.format(rows=4, body="x * w", then="acc0 * 0.5")
    assert shown(scaled, behind) == {"normal form in real arithmetic and isl and sampled cells": 1}
    tiny = plain.replace("768", "8").replace("3072", "9")
    assert shown(tiny, tiny.replace("x * w", "w / (1.0 / x)")) == {"isl and exact arithmetic on instances": 1}


SHARED = """graph g
input x: f32[3]
a: f32[3] = op [i: 3]
  body 0.5
{b}y: f32[3] = op [i: 3]
  reads x[i], a[i], {other}[i]
  body (x - a) * {name}
output y
"""


def test_what_is_read_twice_is_followed_back_to_its_twin() -> None:
    """Both read x and a, so that nothing else says that b, which went, was the same as a."""
    after = SHARED.format(b="", other="a1 = a", name="a1")
    for body, fine in (("0.5", True), ("0.75", False)):
        before = SHARED.format(b=f"b: f32[3] = op [i: 3]\n  body {body}\n", other="b", name="b")
        if fine:
            (kind,) = shown(before, after)
            assert kind != proofs.UNPROVED
        else:
            with pytest.raises(LawError, match="same_values"):
                shown(before, after)


@pytest.mark.parametrize("length", [5, 40])
def test_what_is_the_same_far_back_is_not_refused(length: int) -> None:
    """A result reads the end of another chain of the same operations: alike where all are looked at, else nobody knows."""

    def text(reads: str, step: str = "1.0") -> str:
        lines = ["graph g", "input x: f32[3]"]
        for chain in "ab":
            for k in range(length):
                before, number = f"{chain}{k - 1}" if k else "x", "1.0" if chain == "a" else step
                lines.append(f"{chain}{k}: f32[3] = op [i: 3]\n  reads {before}[i]\n  body {before} + {number}")
        end = length - 1
        lines.append(f"y: f32[3] = op [i: 3]\n  reads {reads}{end}[i]\n  body {reads}{end} * 2.0")
        return "\n".join([*lines, f"output y, a{end}, b{end}"])

    (kind,) = shown(text("a"), text("b"))
    assert (kind == proofs.UNPROVED) == (length > MOST_KEPT // 2)
    if length <= MOST_KEPT // 2:
        with pytest.raises(LawError, match="same_values"):
            shown(text("a", "2.0"), text("b", "2.0"))


@pytest.mark.parametrize("length", [5, 40])
def test_products_that_become_one_are_proved_however_long_the_way_to_their_weights_is(length: int) -> None:
    """The fused operation reads both weights, each of its results needs one: what made the other is no matter of its proof."""
    lines = ["graph g", "input x: f32[2, 3]", "input v: f32[3, 4]", "input w: f32[3, 4]"]
    for w in "vw":
        for k in range(length):
            before = f"{w}{k - 1}" if k else w
            lines.append(f"{w}{k}: f32[3, 4] = op [m: 3, n: 4]\n  reads {before}[m, n]\n  body {before} + {k + 1}.0")
    end = length - 1
    for y, w in (("p", f"v{end}"), ("q", f"w{end}")):
        lines.append(f"{y}: f32[2, 4] = op [i: 2, n: 4 | m: 3 sum]\n  reads x[i, m], {w}[m, n]\n  body x * {w}")
    before = parse("\n".join([*lines, "output p, q\n"]))
    (move,) = RULES["fuse_sums"].find(before)
    after = apply_moves(before, [move])
    assert proofs.prove_step(Rewrite("fuse_sums", before, after, True)) == {"normal form": 2}


def test_large_products_are_compared_at_their_own_size() -> None:
    plain = PRODUCT.format(rows=512, body="x * w", then="max(acc0, 0.0)")
    with pytest.raises(LawError, match=r"mine@y, operation 'y': law 'same_values' is broken: 'y' differs\n  because: at \("):
        shown(plain, plain.replace("max(acc0, 0.0)", "acc0"))


def test_a_read_that_a_mask_excludes_may_go() -> None:
    text = "graph g\ninput x: f32[9]\ny: f32[9] = op [i: 9]\n  reads x[i]{}\n  body where(ge(index(i), 3), x, 0.0)\noutput y\n"
    found = shown(text.format(""), text.format(" when i - 2 >= 0 else nan"))
    assert found == {"exact arithmetic on instances": 1}  # (not by isl)
    with pytest.raises(LawError, match=r"at \(3,\): \S+ became 0\.0"):
        shown(text.format(""), text.format(" when i - 4 >= 0 else 0.0"))


@pytest.mark.parametrize(("dtype", "monoid", "right", "wrong"), [("f32", "max", "-inf", "0.0"), ("i32", "min", "9", "0")])
def test_what_is_filled_in_at_a_border_is_seen_where_all_else_has_one_sign(dtype, monoid, right, wrong) -> None:
    # drawn values of both signs nearly always hide a 0 among nine cells
    text = f"""graph g
input x: {dtype}[6, 6]
y: {dtype}[6, 6] = op [h: 6, w: 6 | r: 3 {monoid}, s: 3 {monoid}]
  reads x[h + r - 1, w + s - 1] else FILLED
  body x
output y
"""
    before, after = (parse(text.replace("FILLED", f)) for f in (right, wrong))
    with pytest.raises(LawError, match="differs"):
        proofs.whole(before, after, "test")


def test_bits_are_claimed_by_exact_rules_alone() -> None:
    scaled = PRODUCT.format(rows=4, body="(x * w) * 0.3", then="acc0")
    behind = PRODUCT.format(rows=4, body="x * w", then="acc0 * 0.3")
    assert shown(scaled, behind)
    with pytest.raises(LawError, match=r"became .* \(in its own type\)"):
        shown(scaled, behind, exact=True)


def test_an_opaque_operation_is_compared_by_its_node_and_inputs(caplog: pytest.LogCaptureFixture) -> None:
    graph = opaque_graph()
    (op,) = graph.ops
    other = replace(op, node=op.node + b"\x00")
    assert dict(proofs.prove_step(Rewrite("r", graph, replace(graph, ops=(replace(op, why="other"),))))) == {"normal form": 1}
    with caplog.at_level("INFO"):
        found = proofs.prove_step(Rewrite("r", graph, replace(graph, ops=(other,))))
    assert dict(found) == {proofs.UNPROVED: 1}
    assert caplog.messages == [f"not proved: '{op.outs[0]}' of r: an opaque operation became another one"]


def test_what_was_shown_is_said_in_words() -> None:
    counts = {"normal form": 11, "isl and sampled cells": 2, "normal form in real arithmetic and isl and sampled cells": 1}
    said = "14 results checked: 11 proved equal, 2 compared on sampled cells, "
    assert proofs.shown_text(counts) == f"{said}1 proved equal in real arithmetic and compared on sampled cells"
    assert (
        proofs.shown_text({proofs.UNPROVED: 3, proofs.UNREAD: 1}) == "4 results checked: 3 not proved (-v lists them), 1 unused"
    )


def test_results_that_are_lost_or_of_another_type() -> None:
    before = parse(PRODUCT.format(rows=4, body="x * w", then="acc0"))
    gone = replace(before, ops=())
    with pytest.raises(LawError, match="'y' is read and no longer written"):
        proofs.prove_step(Rewrite("r", before, gone))
    wide = to_text(before).replace("y: f32", "y: f64").replace("body x * w", "body cast(x, f64) * cast(w, f64)")
    with pytest.raises(LawError, match=r"f32.* became f64"):
        proofs.prove_step(Rewrite("r", before, parse(wide)))


def test_a_tensor_that_was_left_alone_has_its_type() -> None:
    text = "graph g\ninput x: f32[4]\nt: f32[4] = op [i: 4]\n  reads x[i]\n  body {}\ny: f32[4] = op [i: 4]\n  reads t[i]\n  body exp(t)\noutput y\n"
    before, after = parse(text.format("neg(x)")), parse(text.format("x * -1.0".replace("-1.0", "f32(-1.0)")))
    assert proofs.prove_step(Rewrite("r", before, after))
    after = replace(after, tensors={**after.tensors, "y": replace(after.tensors["y"], shape=(5,))})
    with pytest.raises(LawError, match="'y' is another tensor than before"):
        proofs.prove_step(Rewrite("r", before, after))


@pytest.mark.parametrize("name", ["attention", "norms", "conv_chain", "halves", "selections", "opaques", "residual"])
def test_simplifications_of_small_models(name: str) -> None:
    lifted = case(name, simplified=False).graph
    graph = simplify(lifted)
    steps = changes(graph)
    assert steps[0].before.ops == lifted.ops and steps[-1].after.ops == graph.ops
    data, found = rewrite_log.proved(lifted, steps)
    assert found and proofs.UNPROVED not in found
    assert rewrite_log.replay(rewrite_log.read(data, "log"), graph).shown == found


# the log of a build


def log() -> tuple[rewrite_log.Log, Graph]:
    graph = store.read(attention_build())[0].plan.graph
    return rewrite_log.read((attention_build() / store.REWRITES).read_bytes(), "log"), graph


def test_a_build_has_its_log_and_verify_proves_it() -> None:
    report = store.read(attention_build())[0].report["rewrites"]
    d = document("verify", attention_build())["rewrites"]
    assert d == report and d["steps"] > 1 and sum(d["shown"].values()) >= d["steps"]
    text = run("verify", attention_build())[1]
    assert " results checked: " in text and " proved equal" in text


def test_the_log_begins_with_the_lifted_graph() -> None:
    found, graph = log()
    lifted = lift(save("attention"), {}).graph
    assert len(rewrite_log.replay(found, graph).begin) == len(lifted.ops)
    assert found.begin == rewrite_log.digest({op.outs[0]: (op, lifted) for op in lifted.ops})


@pytest.mark.parametrize("kind", ["missing", "first", "order", "other", "result"])
def test_a_log_that_is_not_of_the_plan(kind: str) -> None:
    found, graph = log()
    steps = found.steps
    last = steps[-1]
    if kind == "other":
        text = to_text(last.after)
        assert " * " in text
        last = replace(last, after=parse(text.replace(" * ", " + ", 1)))
    elif kind == "result":
        last = replace(last, before=replace(last.before, outputs=()), after=replace(last.after, outputs=()))
    steps = {"missing": steps[:-1], "first": steps[1:], "order": steps[::-1]}.get(kind, [*steps[:-1], last])
    with pytest.raises(LawError, match="law 'rewrites' is broken"):
        rewrite_log.replay(replace(found, steps=steps), graph)


@pytest.mark.parametrize("text", [b"graph", b'# rewrites of version 1 of 0\nstep "a"\ngraph\n=>\ngraph\n', b"\xff"])
def test_a_log_that_does_not_read(text: bytes) -> None:
    for data in (gzip.compress(text), text):
        with pytest.raises(BuildError):
            rewrite_log.read(data, "log")


def test_what_a_log_says_wrongly_is_refused() -> None:
    """A step whose region before is another one is consistent with the plan, and not proved."""
    found, graph = log()
    steps = found.steps
    k = next(k for k, s in enumerate(steps) if "exp(" in to_text(s.before))
    steps[k] = replace(steps[k], before=parse(to_text(steps[k].before).replace("exp(", "tanh(")))
    with pytest.raises(LawError):
        rewrite_log.replay(found, graph)


def test_a_plan_without_rewrites_has_a_log() -> None:
    graph = case("mlp").graph
    data, _ = rewrite_log.proved(graph, [])
    assert rewrite_log.replay(rewrite_log.read(data, "log"), graph).steps == 0


def test_micro_batches_and_stages_are_in_the_log(tmp_path: Path) -> None:
    flags = ["--devices", "4", "--stages", "2", "--micro-batches", "2"]
    d = document("compile", save("attention"), "-o", tmp_path / "b", *flags)
    assert any(m.startswith("micro_batch") for m in d["moves"]) and d["rewrites"]["steps"] > 1
    assert document("verify", tmp_path / "b")["rewrites"] == d["rewrites"]


def test_a_build_without_a_log_says_so(tmp_path: Path) -> None:
    assert replay_rewrites(tmp_path, store.read(attention_build())[0].plan.graph) is None


def test_a_change_outside_of_the_log_is_refused() -> None:
    lifted = case("mlp", simplified=False)
    graph = simplify(lifted.graph)
    op = graph.ops[0]
    changed = replace(graph, ops=(replace(op, source=("other",)), *graph.ops[1:]))

    def proved(graph: Graph) -> None:
        plan = SimpleNamespace(plan=SimpleNamespace(graph=graph))
        passes.prove_rewrites(SimpleNamespace(plan=plan, lifted=lifted, whole=None))  # type: ignore[arg-type]

    with pytest.raises(LawError, match="changed outside of the log"):
        proved(changed)
    with pytest.raises(LawError, match="does not begin with the lifted graph"):
        proved(replace(graph, log=None))


def test_drawn_values_do_not_depend_on_what_is_asked_together() -> None:
    from tapestry.ir.types import Tensor
    from tapestry.verify.rewriting.draws import Draw

    t = Tensor(name="x", dtype="f32", shape=(100,))
    for kind in ("exact", "range", "dense", "positive", "awkward"):
        draw = Draw(kind, (3.0,))
        whole = draw.values(t, 1, np.arange(100))
        np.testing.assert_array_equal(draw.values(t, 1, np.array([7, 3])), whole[[7, 3]])
        assert len({*whole.tolist()}) > 3


PROBABILITIES = """graph g
input s: bf16[4, 32]
input v: bf16[32, 16]
m: f32[4], l: f32[4] = op [i: 4 | k: 32 logsumexp]
  reads s[i, k]
  body cast(s, f32), 1.0
  then acc0, acc1
p: bf16[4, 32] = op [i: 4, k: 32]
  reads s[i, k], a1 = m[i], a2 = l[i]
  body cast((exp((cast(s, f32) - a1)) / a2), bf16)
y: {to}[4, 16] = op [i: 4, n: 16 | k: 32 sum]
  reads p[i, k], v[k, n]
  body cast(p, f32) * cast(v, f32)
  then {then}
output y
"""
STREAMED = """graph g
input s: bf16[4, 32]
input v: bf16[32, 16]
y: {to}[4, 16] = op [i: 4, n: 16 | k: 32 softsum]
  reads s[i, k], v[k, n]
  body cast(s, f32), 1.0, cast(v, f32)
  then {then}
output y
"""


def test_a_rounding_to_a_half_type_may_go_where_the_result_has_that_type() -> None:
    """Attention in bf16 without the rounding of its probabilities; a result in f32 shows that this went."""
    before = PROBABILITIES.format(to="bf16", then="cast(acc0, bf16)")
    assert shown(before, STREAMED.format(to="bf16", then="cast(acc2 / acc1, bf16)"))
    with pytest.raises(LawError, match=r"differs\n  because: at \(.*\): \S+ became \S+$"):
        shown(before, STREAMED.format(to="bf16", then="cast((acc2 / acc1) * 1.01, bf16)"))
    with pytest.raises(LawError, match=r"\(rounded as its types say\)"):
        shown(PROBABILITIES.format(to="f32", then="acc0"), STREAMED.format(to="f32", then="acc2 / acc1"))
    whole = (
        "graph g\ninput x: f32[9, 8]\ny: i32[9, 8] = op [i: 9, k: 8]\n  reads x[i, k]\n  body cast({} * 64.0, i32)\noutput y\n"
    )
    with pytest.raises(LawError, match="became"):  # of whole numbers nothing is rounded, so that it is seen at once
        shown(whole.format("cast(cast(x * 0.3, bf16), f32)"), whole.format("(x * 0.3)"))


@pytest.mark.parametrize("field", ["gone", "come", "kept"])
def test_a_history_that_lists_other_operations_than_its_texts_is_refused(field: str) -> None:
    found, plan = log()
    document = json.loads(json.dumps(history.to_document(found, plan)))
    history.from_document(json.dumps(document).encode(), "h")
    document["steps"][0][field] = ["other"]
    with pytest.raises(LawError, match="'gone', 'come' and 'kept' are not those"):
        history.from_document(json.dumps(document).encode(), "h")


def test_text_that_is_nested_too_deeply_is_refused() -> None:
    text = "graph g\ninput x: f32[2]\ny: f32[2] = op [i: 2]\n  reads x[i]\n  body {}x{}\noutput y\n"
    with pytest.raises(TextError, match="nested too deeply"):
        parse(text.format("(" * 5000, ")" * 5000))
