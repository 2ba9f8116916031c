"""What ``tapestry prove`` says: proved, refuted with a cell, or not decided; and what that rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapestry.lift.file.symbols import Given
from tapestry.tools.prove.proof import Comparison, compare
from tapestry.tools.prove.rank_programs import OneFile, Program, read_file, read_program
from tapestry.tools.prove.values import Ref, Table
from tapestry.tools.prove.witness import Difference, difference

PROVED, REFUTED, UNDECIDED = "proved", "refuted", "undecided"
TRIES = 2  # random inputs for a witness


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer.

    Attributes:
        status: ``proved``, ``refuted`` or ``undecided``.
        witness: of what is refuted: a rank, a tensor and a cell, what is there and what should be.
        reason: why it is not decided.
        document: all of it, for ``--json``.
    """

    status: str
    witness: dict[str, Any] | None = None
    reason: str = ""
    document: dict[str, Any] = field(default_factory=dict[str, Any])

    def text(self) -> str:
        """As a person reads it."""
        d = self.document
        lines = [f"{self.status}: {d['ranks']} ranks, {d['operations']} operations, {d['collectives']} collectives"]
        if self.witness:
            lines.append("  " + self.witness["text"])
        if self.reason:
            lines.append(f"  {self.reason}")
        lines += [f"  {o['output']}: {o['state']}" for o in d["outputs"]]
        lines += [f"  taken as given: {a}" for a in d["assumed"]]
        return "\n".join([*lines, f"  evidence: {d['evidence']['what']}"])


def prove(model: Path, program: Sequence[Path], shapes: Given = {}) -> Verdict:  # noqa: B006
    """Whether a parallel program computes a model.

    Args:
        program: a folder with a file per rank, or the files; ``program.json`` says what shapes and data leave open. Or a
            JSON file alone with a ``tp_plan`` as transformers has it, which is applied to the model.
        shapes: sizes of symbols.

    Raises:
        TapestryError: a file cannot be read.
    """
    whole, ranks = read_file(model, shapes), read_program(program, shapes, model)
    found = compare(whole, ranks)
    if not found.proved and found.stuck is None:
        other = compare(whole, ranks, 1)
        found = other if other.proved else found
    document = _document(model, whole, ranks, found)
    if found.proved:
        return _verdict(document, PROVED)
    if found.stuck is not None and found.unread:
        rank, tensor = found.unread[0]
        why = "it stays on the host, or its size depends on the data"
        return _verdict(document, UNDECIDED, None, f"rank {rank}: '{tensor}' cannot be followed: {why}")
    if (stuck := found.stuck) is not None:
        text = f"rank {stuck.rank}, '{stuck.tensor}': {stuck.text}"
        return _verdict(document, REFUTED, {"rank": stuck.rank, "tensor": stuck.tensor, "cell": None, "text": text})
    missing = next((n for n, s in found.outputs.items() if s in ("no rank has it", "the ranks do not have all of it")), None)
    if missing is not None:
        text = f"output '{missing}': {found.outputs[missing]}"
        return _verdict(document, REFUTED, {"rank": 0, "tensor": missing, "cell": None, "text": text})
    apart: Difference | str = ""
    for seed in range(TRIES):
        apart = difference(whole, ranks, found, seed)
        if isinstance(apart, Difference) and found.leaves.open:
            why = f"parts of {', '.join(sorted(found.leaves.open))} can lie on the ranks in several orders: program.json says"
            return _verdict(document, UNDECIDED, None, why)
        if isinstance(apart, Difference):
            wrong = next(o for o in document["outputs"] if o["output"] == apart.output)
            wrong["state"] = f"rank {apart.rank} has another value"
            return _verdict(document, REFUTED, _witness(found, ranks, apart))
    return _verdict(document, UNDECIDED, None, f"no proof was found: {_where(found, ranks)}; {apart}")


def _verdict(document: dict[str, Any], status: str, witness: dict[str, Any] | None = None, reason: str = "") -> Verdict:
    document |= {"status": status, "proved": status == PROVED, "witness": witness, "reason": reason}
    kinds = {
        PROVED: ("normal form", "every output cell of every rank is the model's function of the model's inputs and weights, "
                 "over the real numbers: up to rounding and the order of merges, for finite values"),
        REFUTED: ("exact arithmetic on instances",
                  "both were run on random input, in float64 and in the model's own types, or the ranks cannot go on"),
        UNDECIDED: ("none", "nothing was shown"),
    }  # fmt: skip
    document["evidence"] = {"kind": kinds[status][0], "what": kinds[status][1]} | document.pop("counts")
    return Verdict(status=status, witness=witness, reason=reason, document=document)


def _document(model: Path, whole: OneFile, program: Program, found: Comparison) -> dict[str, Any]:
    placed = [
        {"rank": r, "tensor": n, "of": p.tensor, "start": list(p.start), "known_by": p.source}
        | ({"axis": p.axis, "runs": [[k.here, k.there, k.size] for k in p.runs]} if p.runs else {})
        for (r, n), p in sorted(found.leaves.placed.items())
        if any(p.start) or p.source != "shape"
    ]
    assumed = sorted({f"'{p['of']}' is cut in the order of the ranks" for p in placed if p["known_by"] == "order of ranks"})
    assumed += [f"'{n}' holds the model's data (there is none to compare)" for n in sorted(found.leaves.unchecked)][:20]
    assumed += [f"the plan's '{p}' is of nothing in the model" for p in program.unused]
    return {
        "model": str(model),
        "ranks": len(program.ranks),
        "mesh": dict(program.mesh),
        "operations": sum(len(f.graph.ops) for f in program.ranks),
        "collectives": sum(len(f.collectives) for f in program.ranks),
        "outputs": [
            {"output": n, "state": s, "starts": [None if p is None else list(p) for p in found.placed.get(n, [])]}
            for n, s in found.outputs.items()
        ],
        "placed": placed,
        "assumed": assumed,
        "counts": {"values": len(found.table.nodes), "model_values": sum(n.model for n in found.table.nodes)},
    }


def _witness(found: Comparison, program: Program, d: Difference) -> dict[str, Any]:
    first = found.missed(d.rank)
    cell, there = list(d.cell), list(d.model_cell)
    text = (
        f"rank {d.rank}: {d.output}{cell} is {d.value:.6g}, the model's {d.output}{there} is {d.expected:.6g} (seed {d.seed})"
    )
    out: dict[str, Any] = {
        "rank": d.rank,
        "tensor": d.output,
        "cell": cell,
        "model_cell": there,
        "value": d.value,
        "expected": d.expected,
        "seed": d.seed,
    }
    if first is not None:
        out["first"] = {"rank": first.rank, "tensor": first.tensor, "model_tensor": first.origin, "text": first.text}
        text += f"; rank {first.rank}, '{first.tensor}' (the model's '{first.origin}'): {first.text}"
    else:
        text += f"; {_where(found, program)}"
    return out | {"text": text}


def _where(found: Comparison, program: Program) -> str:
    """The first value that the wrong output is made of, and that is none of the model's."""
    rank = found.wrong[1] if found.wrong else 0
    first = found.missed(rank)
    if first is not None:
        return f"rank {first.rank}, '{first.tensor}' (the model's '{first.origin}'): {first.text}"
    table, used = found.table, found.used(rank)
    file = program.ranks[rank]
    sums = [found.ranks[rank].get(c.source) for c in file.collectives]  # partial states are on their way to a collective
    for op in file.graph.ops:
        v = found.ranks[rank].get(op.outs[0])
        if isinstance(v, Ref) and v.node in used and table.nodes[v.node].kind != "part" and v not in sums:
            first = f"'{op.outs[0]}' of rank {rank} is the first value that is not known as the model's"
            part = _part(table, v.node)
            return first if part is None else f"{first}, of '{part[0]}' merged over {part[1]} alone"
    return f"rank {rank} returns another of the model's values"


def _part(table: Table, at: int) -> tuple[str, str] | None:
    """The partial reduction that a node is made of: its name in the model, and which of its points."""
    node = table.nodes[at]
    if node.kind == "part":
        base, domain = table.parted(at)
        sizes = " x ".join(map(str, table.nodes[base].bound))
        return node.origin, f"points {domain.text()} of {sizes}"
    inside = (_part(table, a.node) for a in node.args if isinstance(a, Ref) and not table.nodes[a.node].model)
    return next((p for p in inside if p is not None), None)
