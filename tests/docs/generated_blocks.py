"""What pages take from the benchmarks of blocks and stages: orders, random numbers, PopRT's examples."""

from __future__ import annotations

from tests.docs.generated import makes, rows, table


@makes("schedules.table")
def _schedules() -> str:
    lines: list[list[object]] = []
    for r in rows("schedules"):
        lines.append([r["model"], r["mesh"], r["blocks"], f"{r['same_bits']} of {r['runs']}", r["orders"]])
    return table("model | mesh | blocks: | same bits: | orders:", lines)


@makes("schedules.runs")
def _schedules_runs() -> str:
    same, runs = (sum(r[k] for r in rows("schedules")) for k in ("same_bits", "runs"))
    return f"{same:,} of {runs:,}"


@makes("generator.sp800")
def _sp800() -> str:
    found = [r for r in rows("generator") if r["suite"] == "SP 800-22"]
    most = max(r["bytes"] for r in found)
    streams = ", ".join(dict.fromkeys(r["stream"] for r in found))
    return f"{sum(r['passed'] for r in found)} of {len(found)} passed ({streams}; up to {most / 1e9:.1f} GB of one stream)"


@makes("generator.dieharder")
def _dieharder() -> str:
    found = [r for r in rows("generator") if r.get("suite") == "dieharder"]
    tests = len({r["test"] for r in found})
    weak = sum(r["assessment"] == "WEAK" for r in found)
    passed, size = sum(r["passed"] for r in found), sum({(r["test"], r["bytes"]): r["bytes"] for r in found}.values())
    return f"{passed} of {len(found)} results of {tests} tests of dieharder did not fail ({weak} weak), on {size / 1e9:.1f} GB in all"


def _stage_example(name: str) -> str:
    (r,) = (r for r in rows("stage_examples") if r["model"] == name)
    return "\n".join(["", "```text", f"$ {r['command']}", *r["lines"], "```", ""])


@makes("stage_examples.deberta_like")
def _deberta_like() -> str:
    return _stage_example("deberta_like")


@makes("stage_examples.vit_l_like")
def _vit_l_like() -> str:
    return _stage_example("vit_l_like")
