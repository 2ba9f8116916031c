"""Everything that pages take from results and parsers: figures and tables, by name.

A page says ``<!-- from: NAME -->…<!-- /from -->``; what stands between is made here. Benchmark figures come from ``bench/results`` alone.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.docs.seed_pages import counts, seed_pages, title
from tests.support.paths import ROOT

Row = dict[str, Any]
MAKERS: dict[str, Callable[[], str]] = {}


def makes(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a function that makes the text called ``name``."""

    def register(f: Callable[[], str]) -> Callable[[], str]:
        assert name not in MAKERS, name
        MAKERS[name] = f
        return f

    return register


def generate(name: str) -> str:
    """The text called ``name``."""
    return MAKERS[name]()


def result(name: str) -> Row:
    """A document of ``bench/results``."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def rows(name: str) -> list[Row]:
    """The rows of a document of ``bench/results``."""
    return result(name)["rows"]


def table(head: str, lines: list[list[object]]) -> str:
    """A Markdown table; numbers of ``head`` with a colon behind are aligned to the right."""
    names = [h.strip() for h in head.split("|")]
    rule = ["---:" if h.endswith(":") else "---" for h in names]
    body = [[n.rstrip(":") for n in names], rule, *[[str(c) for c in line] for line in lines]]
    return "\n".join("| " + " | ".join(line) + " |" for line in body)


def percent(x: float) -> str:
    """A share, with one digit behind the point; tiny gaps are 0."""
    return "0" if x < 1e-6 else f"{x:.1%}"


def geomean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(math.log(v) for v in values) / len(values))


def measured(d: Row) -> str:
    """At which commits a result was measured; its rows say where they are older than it."""
    of = Counter((m["commit"], m["date"]) for m in (r.get("measured", d) for r in d["rows"] or [d]))
    each = [(f"{n} of {of.total()} rows " if len(of) > 1 else "", *at) for at, n in of.items()]
    return "; ".join(f"{count}measured at {commit or 'no commit'}, {date}" for count, commit, date in each)


def _provenance(name: str) -> str:
    return f"{measured(result(name))}; `bench/results/{name}.json`"


for _name in sorted(p.stem for p in (ROOT / "bench" / "results").glob("*.json")):
    MAKERS[f"{_name}.when"] = lambda n=_name: _provenance(n)
    MAKERS[f"{_name}.measured"] = lambda n=_name: measured(result(n))


@makes("seeds.table")
def _seeds() -> str:
    lines: list[list[object]] = []
    for page in seed_pages():
        n = counts(page.read_text())
        lines.append([f"[{title(page.read_text())}](seeds/{page.name})", n.statements, n.wrong, n.not_done])
    return table("document|statements:|errors in it:|not done:", lines)


# CPU beside onnxruntime


@makes("cpu.table")
def _cpu() -> str:
    by = {(r["model"], r["threads"]): r for r in rows("cpu")}
    lines = [
        [
            m,
            *(f"{x:.{d}f}" for t in (0, 1) for x, d in ((by[m, t][k], n) for k, n in MEASURED.items())),
            f"{by[m, 0]['rel_err']:.0e}",
        ]
        for m in sorted({m for m, _ in by}, key=lambda m: by[m, 0]["ratio"])
    ]
    return table(
        "model | all cores, ms: | onnxruntime: | ratio: | one thread, ms: | onnxruntime: | ratio: | relative difference:", lines
    )


MEASURED = {"wall_ms": 1, "ort_wall_ms": 1, "ratio": 2}  # with how many digits they are shown


@makes("cpu.geomean")
def _cpu_geomean() -> str:
    return f"{geomean([r['ratio'] for r in rows('cpu') if not r['threads']]):.2f}"


@makes("cpu.geomean_one")
def _cpu_geomean_one() -> str:
    return f"{geomean([r['ratio'] for r in rows('cpu') if r['threads'] == 1]):.2f}"


# bytes between devices


def _per_device(r: Row) -> float:
    return r["xla_bytes"] / result("communication")["devices"]


def _ratios(r: Row) -> dict[str, float]:
    """Our bytes over XLA's by preset, the one first that the bytes shown are planned for."""
    found = {result("communication")["topology"]: r["bytes"], **r["bytes_elsewhere"]}
    return {p: n / r["xla_bytes"] for p, n in found.items()}


@makes("communication.table")
def _communication() -> str:
    lines: list[list[object]] = [
        [
            r["case"],
            "×".join(map(str, r["mesh"])),
            f"{r['bytes_per_device']:,.0f}",
            f"{_per_device(r):,.0f}",
            f"{r['ratio_to_xla']:.3f}",
        ]
        for r in rows("communication")
        if abs(r["ratio_to_xla"] - 1) > 0.0005
    ]
    return table("case | mesh | Tapestry: | XLA: | ratio:", lines)


@makes("communication.cases")
def _communication_cases() -> str:
    return str(len(rows("communication")))


@makes("communication.fewer")
def _communication_fewer() -> str:
    return str(sum(r["ratio_to_xla"] < 0.9995 for r in rows("communication")))


@makes("communication.more")
def _communication_more() -> str:
    return str(sum(r["ratio_to_xla"] > 1.0005 for r in rows("communication")) or "none")


@makes("communication.more_tf32")
def _communication_more_tf32() -> str:
    preset = result("communication")["topology"]
    return str(sum(_ratios(r)[f"{preset}, tf32"] > 1.0005 for r in rows("communication")) or "none")


@makes("communication.worse")
def _communication_worse() -> str:
    """Cases in which a plan for one of the presets sends more than XLA, and by how much it is quicker than those that do not."""
    found = {r["case"]: [(p, x, _saved(r, p)) for p, x in _ratios(r).items() if x > 1.0005] for r in rows("communication")}
    worse = [f"{case}: {', '.join(f'{p} {x:.2f} ({saved})' for p, x, saved in of)}" for case, of in found.items() if of]
    return "; ".join(worse) or "none"


def _saved(r: Row, preset: str) -> str:
    """The share of the time that a plan saves, of the quickest one that sends no more than XLA."""
    ours, thrifty = r.get("bought", {}).get(preset, (None, None))
    return "" if thrifty is None else f"{(1 - ours / thrifty) * 100:.1f}%"


# the compiler


@makes("scale.table")
def _scale() -> str:
    lines: list[list[object]] = [
        [
            r["model"],
            r["mesh"],
            r.get("memory") or "–",
            f"{r['cpu_s']:.0f}",
            f"{r['verify_cpu_s']:.0f}",
            f"{r['peak_mb']:,.0f}",
            percent(r["gap"]),
        ]
        for r in rows("scale")
        if r["model"].startswith("llama")
    ]
    return table("model | mesh | limit | processor seconds: | to verify: | compiler's memory, MB: | gap:", lines)


# operators


@makes("conformance.passed")
def _conformance() -> str:
    ours = next(r for r in rows("conformance") if r["backend"] == "tapestry")
    return f"{ours['pass']:,} of {ours['pass'] + ours['fail'] + ours['skip']:,}"


@makes("conformance.table")
def _conformance_table() -> str:
    lines = [[r["backend"], f"{r['pass']:,}", r["fail"], r["skip"]] for r in rows("conformance")]
    return table("backend | passes: | fails: | skipped:", lines)


@makes("conformance.not_passing")
def _not_passing() -> str:
    reasons: dict[str, list[str]] = {}
    for case, (_, why) in sorted(result("conformance")["not_passing"].items()):
        reasons.setdefault(_first_words(why), []).append(f"`{case.removeprefix('test_')}`")
    return table("cases | why", [[", ".join(cases), why] for why, cases in reasons.items()])


def _first_words(why: str) -> str:
    line = why.splitlines()[0].split(": ", 1)[-1].strip()
    line = line.replace("|", "/").split(" because:")[0]
    line = line.split(" rtol=")[0].split(" (kn")[0]
    if line.startswith("node "):
        line = line.split(": ", 1)[-1]
    return line[:100].rstrip(" :")


@makes("operators.table")
def _operators() -> str:
    known = result("conformance")["lifting"]["operators"]
    of = {c: [n for n, row in sorted(known.items()) if row["class"] == c] for c in ("affine", "partly", "opaque")}
    return table("class | operators", [[c, ", ".join(f"`{n}`" for n in names)] for c, names in of.items()])


@makes("operators.counts")
def _operator_counts() -> str:
    c = result("conformance")["lifting"]["counts"]
    return f"{c['affine']} affine, {c['partly']} partly, {c['opaque']} opaque"


# the command line


def _flag(a: argparse.Action) -> str:
    name = ", ".join(a.option_strings) or a.dest.upper()
    if not a.option_strings:
        return f"`{a.metavar or name}`"
    value = "" if a.nargs == 0 else f" {a.metavar or a.dest.upper()}"
    return f"`{name}{value}`"


def _default(a: argparse.Action) -> str:
    nothing = a.nargs == 0 or a.default is None or a.default is False or a.default == [] or a.default == argparse.SUPPRESS
    return "" if nothing else f"`{a.default}`"


@makes("flags")
def _flags() -> str:
    from tapestry.cli.entry import command_parser

    commands = next(a for a in command_parser()._actions if isinstance(a, argparse._SubParsersAction))
    helps = {a.dest: a.help for a in commands._choices_actions}
    out: list[str] = []
    for name, parser in commands.choices.items():
        actions = [a for a in parser._actions if not isinstance(a, argparse._HelpAction)]
        shared = {a.dest for a in commands.choices["compile"]._actions} - {"model"} if name == "compare" else set()
        common = [a for a in actions if a.dest in ("json", "quiet", "verbose", *shared)]
        lines = [[_flag(a), _default(a), (a.help or "").replace("|", "\\|")] for a in actions if a not in common]
        lines = [[c.replace("|", "\\|") if k == 0 else c for k, c in enumerate(line)] for line in lines]
        lines += [["the flags of `compile`", "", "what both plans are asked for"]] if shared else []
        out.append(f"## {name}\n\n{(helps.get(name) or '').capitalize()}.\n\n{table('argument | default | meaning', lines)}")
    return "\n\n".join(out)


# pipeline stages


def _stage_example(name: str) -> str:
    (r,) = (r for r in rows("stage_examples") if r["model"] == name)
    return "\n".join(["", "```text", f"$ {r['command']}", *r["lines"], "```", ""])


@makes("stage_examples.deberta_like")
def _deberta_like() -> str:
    return _stage_example("deberta_like")


@makes("stage_examples.vit_l_like")
def _vit_l_like() -> str:
    return _stage_example("vit_l_like")


# what the clock says


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
