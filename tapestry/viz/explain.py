"""A plan as a person reads it, like SQL's EXPLAIN: what was chosen, why, and how long it takes.

`document` gathers everything as data (``--json``), `explain` prints it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tapestry.build.store import Build
from tapestry.errors import PlanError, some
from tapestry.interop.placement import layout_of_boxes
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.kernel import shape, size
from tapestry.ir.plan import MeshAxis, Plan
from tapestry.ir.program import (
    Buffer,
    Free,
    Launch,
    Load,
    Program,
    Reduce,
    Transfer,
    alive_at,
    allocated,
    payload_bytes,
    peak_bytes,
    transfer_bytes,
)
from tapestry.ir.provenance import dim_names, operation_names, parts, tensor_names
from tapestry.plan.alternatives import Alternative, best_alternatives
from tapestry.plan.cost.block_cost import block_cost
from tapestry.plan.pipelines.staged_plan import stage_topology
from tapestry.plan.requests import read_pins
from tapestry.plan.simulate import COMPUTE, TRANSFER, Schedule, critical_path, simulate
from tapestry.plan.topology import Topology, from_data
from tapestry.viz.folded import folded
from tapestry.viz.format import (
    counterparts,
    duration,
    figures_text,
    human,
    kind_text,
    listed,
    moves_text,
    shape_text,
    split_text,
    split_words,
    step_text,
    together,
    wrapped,
)
from tapestry.viz.size_regions import size_region_lines
from tapestry.viz.summary import plan_lines, speed
from tapestry.viz.tables import accumulate_lines, proof

Document = dict[str, Any]
UNFELT = 1e-8  # seconds: less than a hundredth of the quickest launch


def explain(build: Build, *, why: bool = False, critical: bool = False, every: bool = False) -> str:
    """What the plan is like, and every step that computes or communicates, with splits, bytes and seconds.

    Args:
        every: each step on its own, in order; else alike ones of different layers on one line.
        why: for every operation its best alternative, and what that would cost; solves nothing, but builds the search's
            tables again.
        critical: the steps that the total time hangs on.
    """
    return text(build, document(build, why=why), critical=critical, every=every or why)


def schedule(build: Build) -> Schedule:
    """The build's program on the clock."""
    return simulate(build.plan, build.program, from_data(build.topology))


def document(build: Build, *, why: bool = False, timed: Schedule | None = None) -> Document:
    """``operations``, ``steps`` (transfers and reductions), ``memory``, ``simulated`` and ``critical_path`` as data.

    Times are in seconds; an operation's ``seconds`` are those of its kernels on the slowest device, ``transfer_seconds`` what
    is fetched for it, and the merge of its partial results: these are steps as well. So operations' ``seconds`` and steps'
    are of different things, and add up to the simulated time and what of it runs beside something else (``beside_s``).
    """
    timed = timed or schedule(build)
    return {
        "operations": _operation_rows(build, timed, why),
        "steps": _transfers(build, timed),
        "memory": _memory(build),
        "simulated": {
            "seconds": timed.total,
            "objective_s": build.report["objective_s"],
            "compute_s": timed.busy(COMPUTE).tolist(),
            "transfer_s": timed.busy(TRANSFER).tolist(),
            "exposed_s": timed.exposed().tolist(),
            "beside_s": max(0.0, sum(t.seconds for t in timed.timed) - timed.total),
            "assumption": timed.assumption,
        },
        "critical_path": _critical(build, timed),
        "nodes_run_whole": nodes_run_whole(build, timed),
    }


def nodes_run_whole(build: Build, timed: Schedule) -> Document:
    """The opaque nodes, which onnxruntime runs where it can: how many by operator, and their share of the estimated compute."""
    ops, seconds = build.plan.graph.ops, [0.0, 0.0]
    for t in timed.timed:
        step = build.program.steps[t.step]
        if isinstance(step, Launch):
            seconds[isinstance(ops[step.op], Opaque)] += t.seconds
    kinds = Counter(op.kind for op in ops if isinstance(op, Opaque))
    return {"operators": dict(kinds), "share": seconds[1] / sum(seconds) if sum(seconds) else 0.0}


def _operation_rows(build: Build, timed: Schedule, why: bool) -> list[Document]:
    plan, program = build.plan, build.program
    own, fetched = [0.0] * len(plan.graph.ops), [0.0] * len(plan.graph.ops)
    for t in timed.timed:
        if t.op is not None:
            (own if isinstance(program.steps[t.step], Launch) else fetched)[t.op] += t.seconds
    blocks = {s.op: s.blocks for s in program.steps if isinstance(s, Launch) and s.mode != "finish"}
    requests = build.report.get("requests", {}).get("pins", [])
    pinned = {text: _pinned(text, plan) for text in requests}
    topo, others = from_data(build.topology), list[Alternative | None]()
    if why:
        others = best_alternatives(plan, topo)
    out: list[Document] = []
    names, of_model, alike = operation_names(plan.graph), parts(plan.graph), counterparts(plan)
    for i, (op, s) in enumerate(zip(plan.graph.ops, plan.strategies, strict=True)):
        block = max((b for b in blocks[i] if b is not None), key=size)
        row: Document = {
            "name": names[i], "alike": alike[i], "part": of_model[i], "dim_names": dim_names(op, plan.graph),
            "outs": list(op.outs), "nodes": list(op.source), "kind": kind_text(op), "dims": {d.name: d.size for d in op.space},
            "split": split_text(op, s, plan.stage(i).mesh), "block": list(shape(block)), "seconds": own[i],
            "transfer_seconds": fetched[i], "pins": [t for t, ops in pinned.items() if i in ops],
        }  # fmt: skip
        if plan.stages:
            row["stage"] = plan.stage_of[i]
        if isinstance(op, Opaque):
            row["opaque_because"] = op.why
        if why:
            row["split_words"] = split_words(op, s, plan.stage(i).mesh)
            row["next_best"] = _next_best(build, i, others[i])
            row["block_cost"] = _block_cost(plan, topo, i)
        out.append(row)
    return out


def _pinned(text: str, plan: Plan) -> set[int]:
    """The operations that a pin names; of micro-batches only what it calls by a node's name."""
    try:
        return {i for i, _ in read_pins([text], plan.graph, plan.mesh)}
    except PlanError:
        return set()


def _next_best(build: Build, i: int, other: Alternative | None) -> Document | None:
    if other is None:
        return None
    return {
        "split": split_text(build.plan.graph.ops[i], other.strategy, build.plan.stage(i).mesh),
        "seconds_more": other.seconds,
        "parts": [{"what": p.what, "tensor": p.tensor, "seconds_more": p.seconds, "bytes_more": p.nbytes} for p in other.parts],
        "bytes_over_memory": other.excess,
    }


def _block_cost(plan: Plan, topo: Topology, i: int) -> Document | None:
    op = plan.graph.ops[i]
    if isinstance(op, Opaque):
        return None
    topo = stage_topology(topo, plan.stage(i)) if plan.stages else topo
    found = block_cost(op, plan.graph, plan.strategies[i], plan.stage(i).mesh, topo)
    if found is None:
        return None
    return {
        "blocks": found.blocks,
        "copies": found.copies,
        "uneven": found.uneven,
        "overlap_bytes": found.overlap,
        "seconds_a_block": found.seconds,
    }


def _transfers(build: Build, timed: Schedule) -> list[Document]:
    program, named = build.program, tensor_names(build.plan.graph)
    out: list[Document] = []
    for t in timed.timed:
        step = program.steps[t.step]
        if isinstance(step, Launch | Load | Free):
            continue
        merge = step if isinstance(step, Reduce) else None
        name = program.buffers[step.src if isinstance(step, Transfer) else step.srcs[0]].tensor
        sent = {merge.sent_as or program.buffers[b].dtype for b in merge.sent} if merge else set[str]()
        out.append(
            {
                "step": t.step,
                "op": t.op,
                "kind": step.kind,
                "tensor": name,
                "name": named[name],
                "seconds": t.seconds,
                "bytes": transfer_bytes(step, program),
                "payload_bytes": payload_bytes(step, program),
                "group": len(merge.groups[0]) if merge else None,
                "start_s": float(min(x for x in t.start.tolist() if x == x)),
                "algorithm": t.by or None,
                "sent_as": ", ".join(sorted(sent - {build.plan.graph.tensors[name].dtype})) or None,
            }
        )
    return out


def placed(plan: Plan, program: Program) -> dict[str, dict[str, int]]:
    """For each tensor that is cut where it is first held, by the author's name: mesh axis to the axis of it that is cut.

    Tensors held in parts that no such cut gives (halos, pipeline stages) are left out.
    """
    names, first = tensor_names(plan.graph), dict[str, Buffer]()
    for step in program.steps:
        for b in (program.buffers[name] for name in allocated(step)):
            if b.field is None:
                first.setdefault(b.tensor, b)
    out: dict[str, dict[str, int]] = {}
    for t, b in first.items():
        boxes = tuple(box for box in b.boxes if box is not None)
        layout = layout_of_boxes(boxes, plan.graph.tensors[t].shape, plan.mesh) or ()
        if cut := {a.name: k for a, k in zip(plan.mesh, layout, strict=False) if k is not None}:
            out[names[t]] = cut
    return out


def alive_bytes(program: Program, device: int) -> list[int]:
    """Bytes alive on a device after every step."""
    alive, out = 0, list[int]()
    for step in program.steps:
        alive += sum(program.buffers[b].nbytes(device) for b in allocated(step))
        alive -= sum(program.buffers[b].nbytes(device) for b in (step.buffers if isinstance(step, Free) else ()))
        out.append(alive)
    return out


def _memory(build: Build) -> Document:
    program, graph = build.program, build.plan.graph
    peak, at = peak_bytes(program)
    worst = max(range(len(peak)), key=lambda d: peak[d])
    loads = [program.buffers[s.buffer] for s in program.steps if isinstance(s, Load)]
    resident = set(graph.weights) - build.plan.streamed
    alive = sorted(alive_at(program, at[worst]), key=lambda b: -program.buffers[b].nbytes(worst))
    return {
        "peak_bytes": peak,
        "allowed_bytes": build.memory,
        "device": worst,
        "peak_step": at[worst],
        "peak_at": step_text(program.steps[at[worst]], program, graph.ops),
        "steps": len(program.steps),
        "first_step": next((i for i, s in enumerate(program.steps) if not isinstance(s, Load | Free)), 0),
        "weight_bytes": sum(b.nbytes(worst) for b in loads if b.tensor in resident),
        "alive_bytes": alive_bytes(program, worst),
        "largest": [{"buffer": b, "bytes": program.buffers[b].nbytes(worst)} for b in alive[:5]],
    }


def _critical(build: Build, timed: Schedule) -> list[Document]:
    return [
        {
            "step": hop.timed.step,
            "what": step_text(step := build.program.steps[hop.timed.step], build.program, build.plan.graph.ops),
            "kind": step.kind if isinstance(step, Transfer | Reduce) else "compute",
            "device": hop.device,
            "start_s": float(hop.timed.start[hop.device]),
            "seconds": hop.seconds,
            "share": hop.seconds / (timed.total or 1.0),
        }
        for hop in critical_path(timed)
    ]


# text


def text(build: Build, facts: Document, *, critical: bool = False, every: bool = False) -> str:
    """A `document` as a person reads it; ``every`` step on its own, or alike ones once."""
    head, notes = _head(build, facts["simulated"]), _notes(build, facts["simulated"])
    sized = build.report.get("sizes", {})
    sizes = [*size_region_lines(sized), "", "the plan of region a:"] if "regions" in sized else []
    steps = _steps(build, facts) if every else folded(build, facts)  # (one line each, for grep)
    lines = [
        *sizes, build.model, *_folded_out(head), "", *steps, "", *_folded_out(_memory_text(facts["memory"])), "",
        *_folded_out((*notes, *_whole_text(facts["nodes_run_whole"]))),
    ]  # fmt: skip
    if critical:
        lines += ["", *_folded_out(_critical_text(facts))]
    return "\n".join(lines) + "\n"


def _folded_out(lines: Iterable[str]) -> Iterator[str]:
    """Lines of any length as lines of at most 80 columns."""
    for line in lines:
        yield from wrapped(line, " " * (4 + len(line) - len(line.lstrip())))


def chosen_text(rows: Sequence[Mapping[str, Any]], graph: Graph) -> str:
    """What computes each operation, alike ones once; below, what comes before that in the table, and why it does not."""
    names = tensor_names(graph)
    alike = together(rows, lambda row: (str(row["way"]), tuple((t["way"], t["why"]) for t in row["tried"])))
    lines = ["", f"kernels of {some(len(rows), 'distinct block')} on this machine, and what was tried before each:"]
    for (way, tried), same in alike.items():
        of = listed([names.get(r["kernel"]) or r["kernel"] for r in same])
        lines += [f"  {way}: {of} ({some(sum(r['launches'] for r in same), 'launch')})"]
        lines += [f"      not {name}: {why}" for name, why in tried]
    return "\n".join(lines) + "\n"


def _head(build: Build, simulated: Document) -> Iterator[str]:
    r, plan = build.report, build.plan
    mesh = ", ".join(f"{a.name}={a.size}{shares_text(a)}" for a in plan.mesh) or "one device"
    yield f"{some(r['nodes'], 'node')}, {some(r['ops'], 'operation')}, {r['signatures']} distinct"
    d = (topo := from_data(build.topology)).device
    kept = f", {human(d.reserve)} kept back" if d.reserve else ""
    yield f"mesh {mesh} ({build.topology['name']}), memory {human(build.memory + d.reserve)} a device{kept}"
    if "tf32" in d.flops:
        yield f"products of float32 in {build.precision}: {d.rate('f32') / 1e12:.3g} TFLOP/s a device"
    yield from (*_kinds_text(topo), *_joined_text(topo))
    costs = [duration(r[k]) for k in ("objective_s", "lower_bound_s")]
    yield f"objective {costs[0]}, lower bound {costs[1]}, gap {r['gap']:.2%}{proof(r)}"
    yield from (*accumulate_lines(r), *figures_text(r["topology"], r["devices"]))
    yield from speed(build, simulated)
    yield from plan_lines(plan)
    yield from _fit_text(r.get("fit"))
    yield from _stages_text(r)


def _notes(build: Build, simulated: Document) -> Iterator[str]:
    """What the times and the bound are of, what else was looked at, and what was asked for."""
    r, plan = build.report, build.plan
    if "bound_of" in r:
        yield f"  the bound covers {r['bound_of']}"
    yield f"  assumed: {simulated['assumption']}"
    for tried in r.get("equations", ()):
        yield f"  {_equations_text(tried)}"
    for m in moves_text(build.moves):
        yield f"rewritten by {m}"
    for pin in r.get("requests", {}).get("pins", []):
        yield f"pinned {pin}"
    for k, node in enumerate(r.get("requests", {}).get("stage_at", [])):
        yield f"stage {k} ends at {node}, as asked"
    for t, layout in (*plan.inputs.items(), *plan.outputs.items()):
        cut = ", ".join(f"axis {x} over {a.name}" for a, x in zip(plan.mesh, layout, strict=True) if x is not None)
        yield f"'{t}' is fixed: {cut or 'replicated'}"


def _equations_text(tried: Document) -> str:
    """What the book of equations derived, what it would save on one device, and what came of it."""
    what = f"{some(tried['regions'], 'region')}, {duration(tried['before_s'])} → {duration(tried['after_s'])} on one device"
    planned = "no better plan" if tried["objective_s"] is None else f"planned {duration(tried['objective_s'])}"
    return f"equations {tried['equations']}: {what}; {planned}: {'used' if tried['taken'] else 'not used'}"


def _whole_text(nodes: Document) -> Iterator[str]:
    """What does not run on kernels of Tapestry's own."""
    if nodes["operators"]:
        which = ", ".join(f"{kind} {n}" for kind, n in nodes["operators"].items())
        share = f"{nodes['share']:.0%} of the kernels' time"
        yield f"opaque nodes run on onnxruntime, or the ONNX reference where it cannot: {which}; {share}"


def shares_text(axis: MeshAxis) -> str:
    """`` (shares 5:1:1)`` and `` (devices 3,2,1,0)``, or nothing where all are equal and count on."""
    shares = f" (shares {':'.join(map(str, axis.weights))})" if axis.weights else ""
    return shares + (f" (devices {','.join(map(str, axis.order))})" if axis.order else "")


def _kinds_text(topo: Topology) -> Iterator[str]:
    """One line per kind of device, where they differ."""
    for kind in dict.fromkeys(map(repr, topo.kinds)):
        at = [n for n, d in enumerate(topo.kinds) if repr(d) == kind]
        d = topo.kinds[at[0]]
        which = ", ".join(map(str, at[:8])) + (f" and {len(at) - 8} more" if len(at) > 8 else "")
        rates = f"{d.rate('f32') / 1e9:,.4g} GFLOP/s (f32), {human(d.bandwidth)}/s"
        yield f"device{'s' if len(at) > 1 else ''} {which}{f' {d.name!r}' if d.name else ''}: {human(d.memory)}, {rates}"


def _joined_text(topo: Topology) -> Iterator[str]:
    """What joins the devices, where it is not one switch per mesh axis."""
    if topo.joined:
        yield "joined by " + ", ".join(
            f"{f.kind} of {f.size}{f' ({f.stride} apart)' if f.stride > 1 else ''}, {duration(f.link.alpha)}, "
            f"{human(1 / f.link.beta) if f.link.beta else 'any number of bytes'}/s"
            for f in topo.joined
        )
    for note in topo.notes:
        yield f"topology: {note}"


def _stages_text(report: Mapping[str, Any]) -> Iterator[str]:
    """One line per pipeline stage, and what the plan would be without."""
    micro = f" per micro-batch, {report['micro_batches']} of them" if report.get("micro_batches", 1) > 1 else ""
    for k, s in enumerate(report.get("stages", ())):
        where = f"devices {s['devices'][0]} to {s['devices'][-1]}" if len(s["devices"]) > 1 else f"device {s['devices'][0]}"
        took, peak = duration(s["seconds"]), human(max(s["peak_bytes"]))
        yield f"stage {k}: {where} ({s['mesh']}), {some(s['ops'], 'operation')}, {took}{micro}, peak {peak}"
    other = report.get("pipeline")
    if other:
        for name, key in (("with stages", "objective_s"), ("without stages", "spatial_objective_s")):
            what = "no plan as asked for" if other[key] is None else f"objective {duration(other[key])}"
            yield f"{name}{' (chosen)' if other['chosen'] == (name == 'with stages') else ''}: {what}"


def _steps(build: Build, facts: Document) -> Iterator[str]:
    rows = {t["step"]: t for t in facts["steps"]}
    for i, step in enumerate(build.program.steps):
        if i in rows:
            yield "  " + _transfer_text(rows[i])
        elif isinstance(step, Launch) and step.mode != "finish":
            yield from _operation_text(facts["operations"][step.op])


def _operation_text(row: Mapping[str, Any]) -> Iterator[str]:
    dims = ", ".join(f"{name}: {n}" for name, n in row["dims"].items())
    block = f"block {shape_text(tuple(row['block']))}"
    at = f" in stage {row['stage']}" if "stage" in row else ""
    yield f"{', '.join(row['outs'])} = [{dims}] {row['kind']}  split {row['split']}{at}  {block}  {duration(row['seconds'])}"
    if row["nodes"]:
        of = f"{row['name']}, " if row["part"] else ""
        yield f"    {of}from {', '.join(row['nodes'])}"
    if "opaque_because" in row:
        yield f"    opaque: {row['opaque_because']}"
    if row["pins"]:
        yield f"    pinned by {', '.join(row['pins'])}"
    if "next_best" in row:
        yield f"    {row['split_words']}"
        yield f"    {why_text(row['next_best'], bool(row['pins']))}"
        if row["block_cost"] is not None:
            yield f"    {block_text(row['block_cost'])}"


def block_text(cost: Mapping[str, Any]) -> str:
    """``4 blocks, 1.2 µs for each beyond the first: they read 96.00 KiB of 'w' more than once``, and how uneven they are."""
    text = f"{cost['blocks']} blocks, {duration(cost['seconds_a_block'])} for each beyond the first"
    more = sorted(cost["overlap_bytes"].items(), key=lambda item: -item[1])[:3]
    text += ": they read " + ", ".join(f"{human(n)} of '{t}'" for t, n in more) + " more than once" if more else ", no overlap"
    text += f"; the largest is {cost['uneven']:.0%} over the mean" if cost["uneven"] > 5e-3 else ""
    return text + (f"; {cost['copies']} devices compute each" if cost["copies"] > 1 else "")


def why_text(other: Mapping[str, Any] | None, pinned: bool = False) -> str:
    """``next best: n/8@d0, 12 µs slower: 14 µs more for all_gather of 'h' (7.00 MiB more), 2 µs less for compute``."""
    if other is None:
        return "no other split is possible"
    more, excess = other["seconds_more"], other["bytes_over_memory"]
    parts = ", ".join(_share_text(p) for p in other["parts"][:3] if abs(p["seconds_more"]) >= UNFELT)
    head = f"next best: {other['split']}, "
    if abs(more) < UNFELT:
        return f"{head}as fast ({parts})" if parts else f"{head}as fast"
    reason = ""
    if more < 0 and pinned:
        reason = "; the pin forbids it"
    elif more < 0 and excess:
        reason = f"; but {human(excess)} too big for a device's memory"
    elif more < 0:
        reason = "; memory, an annotation of the model or the time limit decided"
    return f"{head}{duration(abs(more))} {'slower' if more > 0 else 'faster'}: {parts}{reason}"


def _share_text(part: Mapping[str, Any]) -> str:
    """What one share of a difference is for, and the bytes behind it."""
    seconds, nbytes = part["seconds_more"], part.get("bytes_more", 0)
    of = f" of '{part['tensor']}'" if part["tensor"] else ""
    sent = f" ({human(abs(nbytes))} {'more' if nbytes > 0 else 'less'})" if nbytes else ""
    return f"{duration(abs(seconds))} {'more' if seconds > 0 else 'less'} for {part['what']}{of}{sent}"


def _transfer_text(t: Mapping[str, Any]) -> str:
    head, tail = f"{t['kind']} of '{t['tensor']}'", f"{human(t['bytes'])} in all, {duration(t['seconds'])}"
    if t["group"] is None:
        return f"{head}: {tail}"
    sent_as = f", sent as {t['sent_as']}," if t["sent_as"] else ""
    return f"{head}{sent_as} in groups of {t['group']}: {human(t['payload_bytes'])} per device, {tail} by {t['algorithm']}"


def _fit_text(fit: Mapping[str, Any] | None) -> Iterator[str]:
    """Why the plan is one in time, and which weights it streams."""
    if not fit:
        return
    held = ", ".join(f"'{b['buffer']}' {human(b['bytes'])}" for b in fit["largest"])
    short = f"device {fit['device']} would need {fit['short_bytes']:,} bytes more, holding {held}"
    if "in_space_s" in fit:
        space = duration(fit["in_space_s"])
        why = f"; without the limit {short}" if fit["short_bytes"] > 0 else ""
        yield f"split in time, as the best plan in space that fits takes {space}{why}"
    else:
        yield f"no plan in space fits: {short}"
    if fit["streamed"]:
        first = ", ".join(f"'{t}'" for t in fit["streamed"][:3]) + (", …" if len(fit["streamed"]) > 3 else "")
        yield f"{some(len(fit['streamed']), 'weight')} ({human(fit['streamed_bytes'])}) loaded again at each use: {first}"


def _memory_text(memory: Mapping[str, Any]) -> Iterator[str]:
    worst, peak = memory["device"], memory["peak_bytes"]
    peaks = ", ".join(map(human, peak))
    if len(peak) > 8 or len({*peak}) == 1:
        peaks = f"{human(min(peak))} to {human(max(peak))}" if min(peak) < max(peak) else f"{human(peak[0])} on each"
    yield f"peak memory per device: {peaks}"
    weights, at = human(memory["weight_bytes"]), f"at step {memory['peak_step']}, {memory['peak_at']}"
    yield f"  peak {human(peak[worst])} of {human(memory['allowed_bytes'])}, {weights} of it weights, {at}"
    largest = ", ".join(f"'{b['buffer']}' {human(b['bytes'])}" for b in memory["largest"])
    yield f"  on device {worst} at the peak: {largest}"


def _critical_text(facts: Document) -> Iterator[str]:
    total = facts["simulated"]["seconds"]
    yield f"critical path, {duration(total)} (assumed: {facts['simulated']['assumption']})"
    kinds = Counter[str]()
    for hop in facts["critical_path"]:
        kinds[hop["kind"]] += hop["share"]
    yield "  " + ", ".join(f"{k} {v:.1%}" for k, v in kinds.most_common())
    for hop in facts["critical_path"]:
        where = f"step {hop['step']:>4}, device {hop['device']}"
        yield f"  {hop['share']:>6.1%} {duration(hop['seconds']):>9}  {where}: {hop['what']}"
