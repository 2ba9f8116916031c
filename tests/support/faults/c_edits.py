"""Faults put into the text of a kernel in C, or into a call of one: each gives the kernel with one, or None without a place for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from tapestry.tools.kernel_proofs.kernel_text import Argument, KernelText

Edit = Callable[[KernelText], KernelText | None]


def _more(by: int) -> Callable[[re.Match[str]], str]:
    return lambda m: f"{m[1]}{int(m[2]) + by}{m[3]}"


IN_TEXT: dict[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    # generated functions
    "a loop's bound is one too many": (r"(d\d < )(\d+)(; d\d\+\+\) \{\ny)", _more(1)),
    "a loop's bound is one too few": (r"(d\d < )(\d+)(; d\d\+\+\) \{\ny)", _more(-1)),
    "the tail of a row is forgotten": (r"(d\d < )(\d+)(; d\d\+\+\) \{\ny)", lambda m: f"{m[1]}{int(m[2]) // 16 * 16}{m[3]}"),
    "a loop begins at its second step": (r"(int64_t d\d = )(\d+)(; d)", _more(1)),
    "the stride of the output is wrong": (r"(\ny\[\()(\d+)( \*)", _more(1)),
    "the stride of an input is wrong": (r"(p\d\[\()(\d+)( \*)", _more(-1)),
    "rows and columns are exchanged where it writes": (
        r"\ny\[\((\d+) \* \(d0 - 0\) \+ \(d1 - 0\)\)\]", r"\ny[(\1 * (d1 - 0) + (d0 - 0))]",
    ),
    "an input is read from the next cell": (r"(p\d\[)(\()", r"\g<1>1 + \2"),
    "an input is read from the other argument": (r"\*restrict p0 = p\[0\];\n(.*) = p\[1\];", r"*restrict p0 = p[1];\n\1 = p[0];"),
    "the output is an input": (r"(\*restrict y = p\[)\d+(\])", r"\g<1>0\2"),
    "an input has another type": (r"const float \*restrict p0", "const int32_t *restrict p0"),
    "a difference becomes a sum": (r"\] - p", "] + p"),
    "a product becomes a sum": (r"\) \* t_sigmoid", ") + t_sigmoid"),
    "what follows is dropped": (r" \* t_sigmoid\(.*\)\);", ");"),
    "a minimum for a maximum": (r"(\ny.*?)t_max\(", r"\1t_min("),
    "an image is read above its first row": (r"\(\(d0 \+ -2 \* 1\)\) >= 0 && ", ""),
    "an image is read beside its last column": (r"(\(\(d1 \+ -1 \* 1\)\) < )(\d+)( )", _more(1)),
    "padding is one": (r"\(0x0\.0p\+0f\)", "(0x1.0p+0f)"),
    "a constant is another": (r"0x1\.0000000000000p-1f", "0x1.0000000000000p-2f"),
    "a row of a table is the one before": (r"\* \(v\)", "* (v - 1)"),
    "a row before the table is read": (r"v >= 0", "v >= -1"),
    "a row that is not there is one": (r" : 0\.0f;\ny", " : 1.0f;\ny"),
    "numbers are divided before they are floats": (r"\(\(float\)(p\d\[[^;]*?\])\) / \(\(float\)(p\d\[[^;]*?\])\)", r"\1 / \2"),
    # contracts
    "a contract: what is summed does not begin at zero": (r"float sum = 0\.0f", "float sum = 1.0f"),
    "a contract: sums are not added up": (r"sum \+= v \*", "sum = v *"),
    "a contract: weighted values are not added up": (r"weighted \+=", "weighted ="),
    "a contract: a maximum begins at zero": (r"(float best = )-__builtin_inff\(\)", r"\g<1>0.0f"),
    "a contract: the last channel is left out": (r"(k = 0; k < c->channels)", r"\1 - 1"),
    "a contract: a feature too many": (r"(f = 0; f <)( c->(features|channels))", r"\1=\2"),
    "a contract: padding on the other side": (r"- c->pad_h", "+ c->pad_h"),
    "a contract: a step of windows is forgotten": (r"y \* c->stride_h", "y"),
    "a contract: gaps of windows are forgotten": (r"j \* c->dilation_w", "2 * j"),
    "a contract: the image is read around itself": (r"row >= 0 && row < c->in_h && ", ""),
    "a contract: no bias": (r"float out = sum \+ bias \+ more", "float out = sum + more"),
    "a contract: no clamp": (r"c->clamped \? .*? : out;", "out;"),
    "a contract: bounds exchanged": (r"smaller\(larger\(out, c->low\), c->high\)", "larger(smaller(out, c->low), c->high)"),
    "a contract: weights turned": (r"i \* t->row \+ j \* t->column", "j * t->row + i * t->column"),
    "a contract: scores without a scale": (r"sum \* a->scale \+ bias", "sum + bias"),
    "a contract: not divided": (r"weighted / sum", "weighted"),
    "a contract: a key too few": (r"(k < a->keys)(; k\+\+\) \{)", r"\1 - 1\2"),
    "a contract: keys for values": (r"h->v\[", "h->k["),
    "a contract: no epsilon": (r"sum / r->count \+ r->epsilon", "sum / r->count"),
    "a contract: no root": (r"1\.0f / sqrtf\((.*?)\)\)\)", r"1.0f / (\1)))"),
    "a contract: no mean": (r"sum / c->high", "sum"),
}  # fmt: skip
IN_FUNCTION: dict[str, tuple[str, str, str]] = {  # of functions that come along, in kernels that call them
    "exp: a digit of its polynomial": ("t_exp", r"1\.6666665459e-1f", "1.6666665459e-2f"),
    "exp: half of the exponent": ("t_exp", r"return p \* a \* b;", "return p * a;"),
    "sigmoid: the sign": ("t_sigmoid", r"t_exp\(-x\)", "t_exp(x)"),
}
IN_CALL: dict[str, Callable[[dict[str, Any]], None]] = {
    "a call: an image is a row less": lambda f: f.update(out_h=f["out_h"] - 1),
    "a call: a row of the output is longer": lambda f: f.update(y_row=f["y_row"] + 1),
    "a call: a pixel of the image is wider": lambda f: f.update(x_pixel=f["x_pixel"] + 1),
    "a call: one padding less": lambda f: f.update(pad_h=f["pad_h"] - 1),
    "a call: one channel less": lambda f: f.update(channels=f["channels"] - 1),
    "a call: no clamp": lambda f: f.update(clamped=0) if f["clamped"] else None,
    "a call: fewer keys": lambda f: f.update(keys=f["keys"] - 1),
    "a call: another scale": lambda f: f.update(scale=f["scale"] * 2),
    "a call: strides of another axis": lambda f: f.update(q=(f["q"][1], f["q"][0], f["q"][2])),
    "a call: a narrower row": lambda f: f.update(width=f["width"] - 1),
    "a call: another count": lambda f: f.update(count=f["count"] + 1),
}


def _in_text(pattern: str, by: str | Callable[[re.Match[str]], str]) -> Edit:
    def edit(text: KernelText) -> KernelText | None:
        made, count = re.subn(pattern, by, text.source, count=1)
        return replace(text, source=made) if count and made != text.source else None

    return edit


def _in_function(name: str, pattern: str, by: str) -> Edit:
    edit = _in_text(pattern, by)
    return lambda text: edit(text) if name in _called(text.source) else None


def _called(source: str) -> set[str]:
    """The functions beside a kernel's own that it calls, through others too."""
    begin = source.find("\nvoid ")
    bodies = {m[1]: p for p in source[:begin].split("\nINLINE ") if (m := re.match(r"\w+ (\w+)\(", p))}
    found, stack = set[str](), [source[begin:]]
    while stack:
        text = stack.pop()
        new = {n for n in bodies.keys() - found if re.search(rf"\b{n}\(", text)}
        found |= new
        stack += [bodies[n] for n in new]
    return found


def _in_call(change: Callable[[dict[str, Any]], None]) -> Edit:
    def edit(text: KernelText) -> KernelText | None:
        launch, *rest = text.launches
        params = dict[str, Argument](launch.params)
        name = next(iter(params))
        if not isinstance(params[name], Mapping):
            return None
        fields = dict(cast("Mapping[str, Any]", params[name]))
        try:
            change(fields)
        except KeyError:
            return None
        if fields == params[name]:
            return None
        return replace(text, launches=(replace(launch, params={**params, name: fields}), *rest))

    return edit


C_EDITS: dict[str, Edit] = (
    {n: _in_text(*e) for n, e in IN_TEXT.items()}
    | {n: _in_function(*e) for n, e in IN_FUNCTION.items()}
    | {n: _in_call(e) for n, e in IN_CALL.items()}
)
