"""Everything that pages take from results and parsers: figures and tables, by name.

A page says ``<!-- from: NAME -->…<!-- /from -->``; what stands between is made here. Benchmark figures come from ``bench/results`` alone.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from bench.support import record
from tests.docs.seed_pages import counts, seed_pages, title
from tests.support.paths import ROOT

Row = dict[str, Any]
_SOURCES = record.tree()
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
    of = Counter((m["commit"], m["date"]) for m in (r.get("measured", d) for r in d["rows"]))
    each = [(f"{n} of {of.total()} rows " if len(of) > 1 else "", *at) for at, n in of.items()]
    return "; ".join(f"{count}measured at {commit or 'no commit'}, {date}" for count, commit, date in each)


def is_current(name: str, d: Row) -> bool:
    """Whether a result is of its sources as they are, all of its rows."""
    return d.get("code") == record.code(name, _SOURCES) and not any("measured" in r for r in d["rows"])


@cache
def headline() -> tuple[str, list[str]]:
    """(commit, names) of the headline's results that are of one commit and of the sources as they are: the most that are."""
    found: dict[str, list[str]] = {}
    for name in record.ROOMS:
        if is_current(name, d := result(name)):
            found.setdefault(d["commit"], []).append(name)
    return max(found.items(), key=lambda x: len(x[1]), default=("", []))


@makes("headline.commit")
def _headline_commit() -> str:
    commit, names = headline()
    if not names:
        return "No result is of the code as it is now: each says the commit at which it was measured."
    others = "" if len(names) == len(record.ROOMS) else "; the others say the commit at which they were measured"
    return f"{len(names)} of the {len(record.ROOMS)} results are of commit `{commit}`, and of its code as it is now{others}."


def _provenance(name: str) -> str:
    d = result(name)
    m = d.get("machine") or d["versions"]
    when = d["date"] if name in headline()[1] else measured(d)
    parts = [f"{m['cores']} {m['arch']} cores" if "cores" in m else "", f"Python {m['python']}", f"torch {m['torch']}"]
    parts.append(f"onnxruntime {m['onnxruntime']}" if "onnxruntime" in m else "")
    return f"{when}; {', '.join(p for p in parts if p)}; `bench/results/{name}.json`"


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
    lines = [
        [r["model"], f"{r['cpu_ms']:.1f}", f"{r['ort_cpu_ms']:.1f}", f"{r['ratio']:.2f}", f"{r['rel_err']:.0e}"]
        for r in sorted(rows("cpu"), key=lambda r: r["ratio"])
    ]
    return table("model | Tapestry, ms: | onnxruntime, ms: | ratio: | relative difference:", lines)


def _corpus(part: str) -> list[Row]:
    """Rows of a part of the corpus, on one thread, that ran; those that did not fail the page."""
    found = [r for r in rows("cpu_corpus") if r["part"] == part and r["threads"] == 1]
    assert all("ratio" in r for r in found)
    return sorted(found, key=lambda r: r["ratio"])


def _spread(part: str) -> str:
    ratios = [r["ratio"] for r in _corpus(part)]
    return f"{geomean(ratios):.2f} on {len(ratios)} models ({ratios[0]:.2f} to {ratios[-1]:.2f})"


MAKERS["corpus.opened"], MAKERS["corpus.unopened"] = lambda: _spread("opened"), lambda: _spread("unopened")


@makes("corpus.dated")
def _corpus_dated() -> str:
    found = [r for r in rows("cpu_corpus") if "date" in r and r["threads"] == 1]
    return f"{len(found)} ({', '.join('`' + r['model'] + '`' for r in found)})"


@makes("corpus.table")
def _corpus_table() -> str:
    lines: list[list[object]] = [
        [r["model"], r["part"], f"{r['cpu_ms']:.1f}", f"{r['ort_cpu_ms']:.1f}", f"{r['ratio']:.2f}", f"{r['rel_err']:.0e}"]
        for r in (*_corpus("opened"), *_corpus("unopened"))
    ]
    return table("model|part|Tapestry, ms:|onnxruntime, ms:|ratio:|relative difference:", lines)


@makes("classes.table")
def _classes_table() -> str:
    lines: list[list[object]] = [
        [r["model"], r["inputs"], f"{r['cpu_ms']:.2f}", f"{r['ort_cpu_ms']:.2f}", f"{r['ratio']:.2f}", r["date"]]
        for r in sorted(rows("cpu_classes"), key=lambda r: r["ratio"])
        if r["threads"] == 1
    ]
    return table("class|inputs|Tapestry, ms:|onnxruntime, ms:|ratio:|measured", lines)


@makes("cpu.geomean")
def _cpu_geomean() -> str:
    return f"{geomean([r['ratio'] for r in rows('cpu')]):.2f}"


@makes("cpu.range")
def _cpu_range() -> str:
    ratios = [r["ratio"] for r in rows("cpu")]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


@makes("cpu.models")
def _cpu_models() -> str:
    return str(len(rows("cpu")))


# bytes between devices


def _per_device(r: Row) -> float:
    return r["xla_bytes"] / result("communication")["devices"]


def _ratios(r: Row) -> dict[str, float]:
    """Our bytes over XLA's by preset, the one first that the bytes shown are planned for."""
    found = {result("communication")["topology"]: r["bytes"], **r["bytes_elsewhere"]}
    return {p: n / r["xla_bytes"] for p, n in found.items()}


@makes("communication.table")
def _communication() -> str:
    lines = [
        [
            r["case"],
            "×".join(map(str, r["mesh"])),
            f"{r['bytes_per_device']:,.0f}",
            f"{_per_device(r):,.0f}",
            *(f"{x:.3f}" for x in _ratios(r).values()),
            ", ".join(r["free"]) or "none",
        ]
        for r in rows("communication")
    ]
    presets = " | ".join(f"{p}:" for p in _ratios(rows("communication")[0]))
    return table(f"case | mesh | Tapestry: | XLA: | {presets} | free ends", lines)


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


@makes("communication.same")
def _communication_same() -> str:
    return str(sum(0.9995 <= r["ratio_to_xla"] <= 1.0005 for r in rows("communication")))


@makes("communication.lost")
def _communication_lost() -> str:
    """Cases in which the plan for another preset sends more than XLA."""
    worse = [
        [r["case"], preset, f"{x * _per_device(r):,.0f}", f"{x:.3f}"]
        for r in rows("communication")
        for preset, x in _ratios(r).items()
        if x > 1.0005
    ]
    return table("case | planned for | bytes per device: | ratio to XLA:", worse)


@makes("communication.worse")
def _communication_worse() -> str:
    """The same in a line."""
    worse = [f"{r['case']} ({p} {x:.3f})" for r in rows("communication") for p, x in _ratios(r).items() if x > 1.0005]
    return "; ".join(worse) or "none"


# kernels


@makes("fusion.table")
def _fusion() -> str:
    lines = [
        [
            r["model"],
            r["launches"],
            " / ".join(map(str, (r["inductor_launches"] or {}).values())) or "–",
            r.get("launches_per_layer") or "–",
            f"{r['bytes'] / 1e6:,.1f}",
            f"{r['inductor_bytes'] / 1e6:,.1f}" if r.get("inductor_bytes") else "–",
        ]
        for r in rows("fusion")
    ]
    return table("model | launches: | Inductor, default / frozen: | per layer: | MB: | Inductor, MB:", lines)


# the compiler


@makes("compiler.table")
def _compiler() -> str:
    lines = [
        [r["model"], r["nodes"], r["signatures"], f"{r['seconds']['search']:.1f}", f"{r['seconds']['total']:.1f}"]
        for r in rows("compiler")
    ]
    return table("model | nodes: | distinct operations: | search, s: | total, s:", lines)


@makes("scale.table")
def _scale() -> str:
    lines = [
        [
            r["model"],
            r["mesh"],
            r["devices"],
            r.get("memory") or "–",
            f"{r['seconds']['total']:.1f}",
            f"{r['cpu_s']:.1f}",
            f"{r['verify_cpu_s']:.1f}",
            f"{r['peak_mb']:,.0f}",
            percent(r["gap"]),
        ]
        for r in rows("scale")
    ]
    head = "model | mesh | devices: | limit: | seconds: | processor seconds: | verified in, processor seconds: | compiler's memory, MB: | gap:"
    return table(head, lines)


@makes("iopddl.table")
def _iopddl() -> str:
    lines = [
        [
            r["instance"],
            f"{r['nodes']:,}",
            f"{r['ratio']:.4f}" if r.get("ratio") else "–",
            percent(r["gap"]) if r.get("gap") is not None else "–",
            f"{r['seconds']:.1f}",
        ]
        for r in rows("iopddl")
    ]
    return table("instance | nodes: | cost ÷ best of 20 teams: | gap to our bound: | seconds:", lines)


# correctness


@makes("models.cases")
def _models_cases() -> str:
    return str(len(rows("models")))


@makes("models.passed")
def _models_passed() -> str:
    return str(sum(bool(r["passed"]) for r in rows("models")))


@makes("models.count")
def _models_count() -> str:
    return str(len({r["model"] for r in rows("models")}))


@makes("models.table")
def _models() -> str:
    out: list[list[object]] = []
    for model in dict.fromkeys(r["model"] for r in rows("models")):
        mine = [r for r in rows("models") if r["model"] == model]
        meshes = ", ".join(r["mesh"] + (" with a quarter of the memory" if r["memory"] else "") for r in mine)
        worst = max(float(r["rel_err"]) for r in mine)
        out.append(
            [model, mine[0]["nodes"], mine[0]["signatures"], meshes, f"{worst:.0e}", percent(max(r["gap"] for r in mine))]
        )
    return table("model | nodes: | distinct operations: | meshes | largest relative difference: | largest gap:", out)


@makes("memory.table")
def _memory() -> str:
    base = {(r["model"], r["devices"]): r["objective_s"] for r in rows("memory") if r["limit"] is None}
    lines = [
        [r["model"], f"{r['limit']:,}", *_fitted(r, base.get((r["model"], r["devices"])))] for r in rows("memory") if r["limit"]
    ]
    return table("model | allowed, bytes: | peak, bytes: | weights streamed, bytes: | estimated time ×:", lines)


def _fitted(r: Row, alone: float | None) -> list[str]:
    if "planned_peak" not in r:
        return ["none found in the time", "–", "–"]
    return [f"{r['planned_peak']:,}", f"{r['streamed_bytes']:,}", f"{r['objective_s'] / alone:.2f}" if alone else "–"]


@makes("faults.count")
def _faults() -> str:
    return str(len(rows("faults")))


@makes("faults.handled")
def _faults_handled() -> str:
    return str(sum(bool(r["ok"]) for r in rows("faults")))


@makes("fuzz_power.share")
def _fuzz_power() -> str:
    found = [r for r in rows("fuzz_power") if r.get("found_by")]
    return f"{len(found)} of {len(rows('fuzz_power'))}"


@makes("mutations.kinds")
def _mutations() -> str:
    never = result("mutations")["never"]
    return f"{len(rows('mutations')) - len(never)} of {len(rows('mutations'))}"


@makes("fuzz_series.summary")
def _series() -> str:
    r = rows("fuzz_series")[0]
    return f"{r['cases']:,} cases (seed {r['seed']}), {len(r['failures'])} failures"


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
    word = {"affine": "affine", "partly": "partly", "opaque": "opaque"}
    known = result("conformance")["lifting"]["operators"]
    lines = []
    for name, row in sorted(known.items()):
        counts = ", ".join(f"{row[k]} {k}" for k in ("affine", "partly", "opaque", "refused") if row.get(k))
        lines.append([f"`{name}`", word[row["class"]], counts])
    return table("operator | class | cases of the suite", lines)


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
        common = [a for a in actions if a.dest in ("json", "quiet", "verbose")]
        lines = [[_flag(a), _default(a), (a.help or "").replace("|", "\\|")] for a in actions if a not in common]
        lines = [[c.replace("|", "\\|") if k == 0 else c for k, c in enumerate(line)] for line in lines]
        out.append(f"## {name}\n\n{(helps.get(name) or '').capitalize()}.\n\n{table('argument | default | meaning', lines)}")
    return "\n\n".join(out)


# the book of equations


@makes("rules.table")
def _rules() -> str:
    lines: list[list[object]] = []
    for r in sorted(rows("rules"), key=lambda r: -r["faster"]):
        used = dict.fromkeys(m.partition("@")[0] for m in r["moves"] if not m.startswith("simplified"))
        a, b = r["before"], r["after"]
        pairs = [f"{a[k] * u:.3g} → {b[k] * u:.3g}" for k, u in (("flops", 1e-6), ("bytes", 1e-6), ("wire_bytes_8", 1e-6))]
        times = [f"{a['cpu_s'] * 1e3:.2f} → {b['cpu_s'] * 1e3:.2f}", f"{r['faster']:.2f}"]
        lines.append([r["graph"] + " \\*" * r["unopened"], *pairs[:2], *times, pairs[2], ", ".join(used) or "none"])
    return table("graph | MFLOP: | MB: | CPU, ms: | faster: | MB between 8 devices: | moves", lines)


@makes("rules.won")
def _rules_won() -> str:
    return f"{sum(r['faster'] >= 1.2 for r in rows('rules'))} of {len(rows('rules'))}"


@makes("auto_shard.exact")
def exact_stages() -> str:
    """The exact stage search against the traversal after PopRT."""
    found = [r for r in rows("auto_shard") if "refused" not in r]
    both = [r for r in found if r["heuristic"]["interval_s"] and r["heuristic"]["proportion"] == r["dynamic"]["proportion"]]
    ratios = sorted(r["dynamic"]["interval_s"] / r["heuristic"]["interval_s"] for r in both)
    models, seconds = len({r["model"] for r in found}), sorted(r["seconds"]["dynamic"] for r in found)
    better = (
        f"its slowest stage takes {percent(1 - ratios[len(ratios) // 2])} less in the median, {percent(1 - ratios[0])} at most"
    )
    worse = sum(x > 1 for x in ratios)
    return (
        f"On {models} models over 2, 4 and 8 devices ({len(both)} cases) it is worse in {worse}; {better}. It takes "
        f"{seconds[len(seconds) // 2]:.2f} s in the median and {seconds[-1]:.1f} s at most."
    )


@makes("kernels_static.table")
def _kernels_static() -> str:
    """Models in f16 for sm_90: launches, and the times that the model of the chip has of their kernels, added up."""
    lines: list[list[object]] = []
    for r in (r for r in rows("kernels_static") if (r["dtype"], r["target"]) == ("f16", "sm90")):
        ms = [sum(k["ops"] * k[of] for k in r["kernels"]) / 1e3 for of in ("predicted_us", "roofline_us")]
        shared = sum(k["ops"] for k in r["kernels"] if k["kind"] == "dot" and k["programs"] > 1)
        products, faulty = sum(k["ops"] for k in r["kernels"] if k["kind"] == "dot"), len(r["spilling"]) + len(r["serialized"])
        lines.append([r["model"], r["launches"], *(f"{t:.2f}" for t in ms), f"{shared} of {products}", faulty, r["refused"]])
    heads = "model | launches of a run: | predicted, ms: | roofline, ms: | products of which several share a multiprocessor:"
    return table(f"{heads} | spilling or serialised: | candidates passed over:", lines)


@makes("half_rows.summary")
def _half_rows() -> str:
    cases = sum(r["cases"] for r in rows("half_rows"))
    return f"{cases - sum(len(r['failed']) for r in rows('half_rows')):,} of {cases:,}"


@makes("models_bf16.summary")
def _models_bf16() -> str:
    found = rows("models_bf16")
    run = [r for r in found if "rel_err" in r and r["passed"]]
    worst = max(run, key=lambda r: r["rel_err"])
    return (
        f"{sum(r['passed'] for r in found)} of {len(found)} cases of {len({r['model'] for r in found})} models pass, {len(run)} of "
        f"them run; the worst relative difference is {worst['rel_err']:.1e} ({worst['model']})"
    )
