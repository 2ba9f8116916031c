"""What pages take from the benchmarks of blocks: orders and losses, random numbers."""

from __future__ import annotations

from tests.docs.generated import Row, makes, result, rows, table


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


@makes("generator.table")
def _generator() -> str:
    lines = [
        [r["suite"], r["test"] + (f" {r['size']}" if r.get("size") else ""), r["stream"], f"{r['bytes'] / 1e9:.3f}", f"{r['p']:.4f}",
         r.get("assessment") or ("passed" if r["passed"] else "FAILED")] for r in rows("generator")
    ]  # fmt: skip
    return table("suite | test | stream | GB: | p: | ", lines)


@makes("generator.bytes")
def _generator_bytes() -> str:
    """The most bytes that tests of each suite took: the quick ones of SP 800-22 the same, those of dieharder one after another."""
    found = rows("generator")
    quick = max(r["bytes"] for r in found if r["suite"] == "SP 800-22")
    parts = {r["test"]: r["bytes"] for r in found if r["suite"] == "dieharder"}
    return f"{quick / 1e9:.1f} GB by three tests of SP 800-22" + (
        f", {sum(parts.values()) / 1e9:.1f} GB by dieharder" if parts else ""
    )


@makes("generator.speed")
def _generator_speed() -> str:
    return ", ".join(f"{n} {v:.0f}" for n, v in result("generator")["million_words_a_second"].items())
