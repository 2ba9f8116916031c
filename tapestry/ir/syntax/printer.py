"""Text of the IR: what a person reads, and what `ir.syntax.parser` reads back (``parse(to_text(g)) == g``)."""

from __future__ import annotations

import base64
import json
import math
import re

from tapestry.ir.expr import PRIMITIVES, Acc, Arg, Const, Expr, Index, Let
from tapestry.ir.graph import Block, Dim, Graph, Op, Opaque, Read, names_of
from tapestry.ir.types import DTYPES, Tensor

IDENT = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
RESERVED = (
    {"floor", "mod", "else", "when", "inf", "nan", "true", "false", "index", "cast", "op", "opaque", "reads", "body", "then"}
    | {"from", "split", "graph", "input", "output", "weight", "dims", "node", "opsets", "why", "and", "at", "let"}
    | set(PRIMITIVES)
    | set(DTYPES)
)


def to_text(graph: Graph) -> str:
    """The whole graph."""
    lines = [f"graph {name(graph.name)}"]
    lines += [f"input {_tensor(graph.tensors[t])}" for t in graph.inputs]
    for t, w in graph.weights.items():
        where = f"{_quoted(w.file)} {w.offset} {w.length} {_quoted(w.name)} {_quoted(w.sha256)}"
        lines.append(f"weight {_tensor(graph.tensors[t])} at {where}")
    for op in graph.ops:
        lines.append(op_text(op, graph))
    lines.append("output " + ", ".join(name(t) for t in graph.outputs))
    return "\n".join(lines) + "\n"


def op_text(op: Op, graph: Graph) -> str:
    """One operation, on several lines."""
    outs = ", ".join(_tensor(graph.tensors[t]) for t in op.outs)
    return f"{outs} = " + (_block(op) if isinstance(op, Block) else _opaque_text(op))


def signature(op: Op, graph: Graph) -> str:
    """Text of an operation without tensor and node names: equal for operations that differ in names alone.

    Two reads of one tensor stay the same tensor, so that what may be shared is part of the signature.
    """
    tensors = [graph.tensors[t] for t in (*op.inputs, *op.outs)]
    before = op.known.get("signature")  # (operations never change, but another graph may give its tensors other types)
    if before is not None and before[0] == tensors:
        return before[1]
    text = _signature(op, graph)
    op.known["signature"] = tensors, text
    return text


def _signature(op: Op, graph: Graph) -> str:
    alias = {t: f"t{i}" for i, t in enumerate(op.inputs)}
    types = " ".join(_type_text(graph.tensors[t]) for t in (*op.inputs, *op.outs))
    if isinstance(op, Opaque):
        body = base64.b64encode(op.node).decode()
        return f"{types} opaque {[alias.get(t, '') for t in op.ins]} {_dims_text(op.dims)} {op.in_axes} {op.out_axes} {body}"
    reads = " ".join(_read_text(Read(tensor=alias[r.tensor], index=r.index, other=r.other, when=r.when)) for r in op.reads)
    names = [f"%{i}" for i in range(len(op.reads))]
    body = "; ".join(expr(e, names) for e in op.point + op.then)
    inner = " ".join(f"{_dims_text(s.dims)} {s.monoid}" for s in op.inner)
    return f"{types} {_space(op)} {inner} {reads} {body}"


def name(text: str) -> str:
    """A name as it stands when it is a plain identifier, else quoted."""
    return text if IDENT.fullmatch(text) and text not in RESERVED and not re.fullmatch(r"(acc|let)\d+", text) else _quoted(text)


def expr(e: Expr, args: list[str]) -> str:
    """An expression, with the names of the reads."""
    if isinstance(e, Arg):
        return args[e.pos]
    if isinstance(e, Acc):
        return f"acc{e.field}"
    if isinstance(e, Let):
        return f"let{e.pos}"
    if isinstance(e, Index):
        return f"index({e.aff})"
    if isinstance(e, Const):
        return _literal(e.value, e.dtype)
    if e.fn == "cast":
        return f"cast({expr(e.args[0], args)}, {e.dtype})"
    parts = [expr(a, args) for a in e.args]
    if e.fn in INFIX:
        return f"({parts[0]} {INFIX[e.fn]} {parts[1]})"
    return f"{e.fn}({', '.join(parts)})"


def aliases(op: Block) -> list[str]:
    """A distinct, readable name for each read: the tensor's own where it can be."""
    taken = names_of(op.space)
    out: list[str] = []
    for i, r in enumerate(op.reads):
        plain = r.tensor if name(r.tensor) == r.tensor and r.tensor not in taken and "." not in r.tensor else f"a{i}"
        while plain in taken:
            plain += "_"
        taken.add(plain)
        out.append(plain)
    return out


def _block(op: Block) -> str:
    names = aliases(op)
    lines = [f"op {_space(op)}"]
    if op.reads:
        lines.append("reads " + ", ".join(_read_text(r, a) for a, r in zip(names, op.reads, strict=True)))
    lines += [f"let [{_dims_text(s.dims)} {s.monoid}] {bare(expr(s.body, names))}" for s in op.inner]
    lines.append("body " + ", ".join(bare(expr(e, names)) for e in op.body))
    if op.monoid and op.lowers:
        lines.append("then " + ", ".join(bare(expr(e, names)) for e in op.then))
    return "\n  ".join(lines + _tail(op))


def _opaque_text(op: Opaque) -> str:
    lines = [f"opaque {name(op.kind)} [{_dims_text(op.dims)}]"]
    ins = ", ".join(_axes_text(t, a) for t, a in zip(op.ins, op.in_axes, strict=True))
    lines.append(f"reads {ins}" if ins else "reads")
    lines.append("writes " + ", ".join(_axes_text(t, a) for t, a in zip(op.outs, op.out_axes, strict=True)))
    lines.append(f"node {_quoted(base64.b64encode(op.node).decode())}")
    lines.append("opsets " + ", ".join(f"{_quoted(d)} {v}" for d, v in op.opsets))
    lines.append(f"why {_quoted(op.why)}")
    return "\n  ".join(lines + _tail(op))


def _axes_text(tensor: str, axes: tuple[int | None, ...]) -> str:
    return f"{name(tensor)}[{', '.join('_' if a is None else str(a) for a in axes)}]"


def _tail(op: Op) -> list[str]:
    out = [f"from {', '.join(_quoted(s) for s in op.source)}"] if op.source else []
    return out + ([f"split {', '.join(f'{s.dim}/{s.parts} {s.to}' for s in op.splits)}"] if op.splits else [])


def _space(op: Block) -> str:
    reduced = ", ".join(f"{d.name}: {d.size} {op.monoid}" for d in op.reduce) or op.monoid  # (over no dimension: one element)
    return f"[{_dims_text(op.dims)}" + (f" | {reduced}]" if op.monoid else "]")


def _dims_text(dims: tuple[Dim, ...]) -> str:
    return ", ".join(f"{d.name}: {d.size}" for d in dims)


def _read_text(r: Read, alias: str = "") -> str:
    tensor = name(r.tensor)
    text = f"{tensor}[{', '.join(map(str, r.index))}]"
    if alias and alias != tensor:
        text = f"{alias} = {text}"
    for g in r.when:
        text += f" when {g.aff} {'>=' if g.op == 'ge' else '=='} 0"
    return text if r.other is None else f"{text} else {plain(r.other)}"


def plain(value: float | int | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _literal(value: float | int | bool, dtype: str) -> str:
    if dtype == "bool":
        return str(bool(value)).lower()
    text = repr(value)
    default = "f32" if isinstance(value, float) else "i64"
    if dtype == default and math.isfinite(value) and value >= 0 and not text.startswith("-"):
        return text
    return f"{dtype}({text})"


def _tensor(t: Tensor) -> str:
    return f"{name(t.name)}: {_type_text(t)}"


def _type_text(t: Tensor) -> str:
    if t.on_host:
        return f"{t.dtype} {_quoted(t.about)}"
    return f"{t.dtype}[{', '.join(map(str, t.shape))}]"


def bare(text: str) -> str:
    """The text without a pair of parentheses around the whole."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text)
