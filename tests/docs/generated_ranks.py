"""Figures of processes and of doors out, for the pages (`tests.docs.generated`)."""

from __future__ import annotations

from tests.docs.generated import MAKERS, makes, result, rows, table

# several processes


@makes("distributed.table")
def _distributed() -> str:
    lines = [
        [
            r["model"],
            r["mesh"],
            f"{r['planned_bytes']:,}",
            "yes" if r["same_bits"] else "no",
            f"{r['rel_diff_to_one_device']:.0e}",
        ]
        for r in rows("distributed")
    ]
    return table("model | processes | bytes sent, as planned: | bits of one process | difference to one device:", lines)


@makes("distributed.cases")
def _distributed_cases() -> str:
    return str(len(rows("distributed")))


@makes("scaling.speed_up")
def _scaling() -> str:
    found = [r for r in rows("distributed_scaling") if "speed_up" in r]
    return ", ".join(f"{r['model']} {r['speed_up']:.2f}" for r in found)


@makes("clock.table")
def _clock() -> str:
    lines = [
        [
            r["model"], r["world"], f"{r['plans']['chosen']['measured_s'] * 1e3:.1f}",
            f"{r['plans']['chosen']['predicted_s'] * 1e3:.1f}", r["fastest"],
            f"{r['plans'][r['fastest']]['measured_s'] * 1e3:.1f}", f"{r['ratio']:.2f}",
            f"{r['plans']['one device']['measured_s'] * 1e3:.1f}",
        ]
        for r in rows("clock") if "plans" in r
    ]  # fmt: skip
    return table("model | world | chosen, ms: | predicted, ms: | fastest | its ms: | ratio: | one device, ms:", lines)


@makes("clock.close")
def _clock_close() -> str:
    s = result("clock")["summary"]
    return f"{s['within_5_percent']} of {s['rows']}"


MAKERS["clock.worst"] = lambda: f"{result('clock')['summary']['worst_ratio']:.2f}"


@makes("clock.summary")
def _clock_summary() -> str:
    s = result("clock")["summary"]
    return (
        f"Of {s['rows']} rows the chosen plan is within 5 % of the fastest in {s['within_5_percent']}, beyond 15 % in "
        f"{s['beyond_15_percent']} (worst {s['worst_ratio']:.2f}); its time is predicted within 20 % in "
        f"{s['total_within_20_percent']}, and a step within {s['median_step_factor']:.2f}× (median). Spearman's correlation of "
        f"predicted and measured times is {s['median_rank_correlation']:.2f} among a row's plans (median), "
        f"{s['rank_correlation_of_all']:.2f} among all"
    )


# doors out


@makes("doors.equal")
def _doors_equal() -> str:
    found = {d: [r["equal"] for r in rows("doors") if r["door"] == d] for d in dict.fromkeys(r["door"] for r in rows("doors"))}
    return ", ".join(f"`{door}` {sum(equal)} of {len(equal)}" for door, equal in found.items())


@makes("doors.unequal")
def _doors_unequal() -> str:
    return table("format | row | what is found", [[r["door"], r["name"], r["why"]] for r in rows("doors") if not r["equal"]])


MAKERS["doors.ran"] = lambda: ", ".join(r["name"] for r in rows("doors") if r["door"] == "tp-plan" and r["equal"])
