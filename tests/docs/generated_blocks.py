"""What pages take from the benchmarks of blocks and stages: orders and losses, random numbers, PopRT's examples."""

from __future__ import annotations

from tests.docs.generated import Row, makes, rows, table


@makes("schedules.table")
def _schedules() -> str:
    def shares(r: Row, way: str) -> list[str]:
        sums = r.get(way)
        return [f"{sums[f'again_{k}'] / sums[f'restart_{k}']:.1%}" if sums else "–" for k in ("flops", "bytes")]

    lines: list[list[object]] = []
    for r in rows("schedules"):
        lost = [w["lost_blocks"] for w in (r["lost_blocks"], r.get("lost_device", {"lost_blocks": 0}))]
        part = [*shares(r, "lost_blocks"), *shares(r, "lost_device")]
        lines.append([r["model"], r["mesh"], r["blocks"], f"{r['same_bits']} of {r['runs']}", r["orders"], sum(lost), *part])
    shown = " | ".join(f"{k}, {what}:" for what in ("blocks", "device") for k in ("FLOPs", "bytes"))
    return table(f"model | mesh | blocks: | same bits: | orders: | blocks lost: | {shown}", lines)


@makes("schedules.runs")
def _schedules_runs() -> str:
    same, runs = (sum(r[k] for r in rows("schedules")) for k in ("same_bits", "runs"))
    return f"{same:,} of {runs:,}"


@makes("rank_losses.table")
def _rank_losses() -> str:
    lines: list[list[object]] = []
    for r in rows("rank_losses"):
        shares = [f"{r[f'again_{k}'] / max(1, r[f'restart_{k}']):.1%}" for k in ("blocks", "flops", "bytes")]
        lines.append([r["model"], f"{r['same_bits']} of {r['runs']}", r["losses"], r["lost_blocks"], *shares])
    return table("model | same bits: | losses: | blocks lost: | blocks: | FLOPs: | bytes:", lines)


@makes("rank_losses.runs")
def _rank_losses_runs() -> str:
    same, runs = (sum(r[k] for r in rows("rank_losses")) for k in ("same_bits", "runs"))
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
