"""Operators of the user's own domain: a file of IR text, or a Python function, says the graph that a node stands for.

The graph takes the node's place where a model is lifted, and the verifier's interpreter of it is the reference for the node.
Nothing of it comes from a model or a plan. The grammar of the files is in docs/howto/operator.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TypeProto

from tapestry.errors import LawError, ModelError, TapestryError
from tapestry.ir import laws
from tapestry.ir.graph import Block, Graph
from tapestry.ir.syntax.parser import Token, Tokens, parse, parse_tokens
from tapestry.ir.types import DTYPES, HOST, Tensor, numpy_dtype
from tapestry.lift.builder import DTYPE_OF, LIFTERS, Entry, Node, tensor_of
from tapestry.lift.file.protos import MICROSOFT, STANDARD, node_name, static_shape
from tapestry.onnx_eval import reference_fixes
from tapestry.verify import interp

# Files of operators: definitions in IR text in which the names of sizes, of types and of attributes are open.
#
# They are bound by a node's inputs and attributes, token by token; what comes of it is read as any graph. The grammar is in
# docs/howto/operator.md.


Number = int | float
_SIGNS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "//": lambda a, b: a // b,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Template:
    """A definition in a file: the tokens of its parts, in which names of sizes, types and attributes are open."""

    domain: str
    name: str
    text: str
    file: str
    attributes: Mapping[str, Number | None]
    inputs: tuple[tuple[str, str, tuple[str | int, ...]], ...]
    sizes: tuple[tuple[str, list[Token]], ...]
    tests: tuple[tuple[list[Token], list[Token]], ...]
    graph: list[Token]

    def define(self, inputs: Sequence[Tensor], attributes: Mapping[str, Number]) -> Graph | str:
        """The graph for some inputs and attributes, or why it is not for these."""
        bound: dict[str, Number | str] = {}
        if len(inputs) != len(self.inputs):
            return f"it has {len(self.inputs)} inputs, the node {len(inputs)}"
        for (name, dtype, shape), t in zip(self.inputs, inputs, strict=True):
            pairs = [(dtype, t.dtype), *zip(shape, t.shape, strict=False)]
            fits = len(shape) == len(t.shape) and all((w if w in DTYPES else bound.setdefault(w, g)) == g if isinstance(w, str)
                                                      else w == g for w, g in pairs)  # fmt: skip
            if not fits:
                known = f" with {', '.join(f'{k} = {v}' for k, v in bound.items())}" if bound else ""
                return f"its '{name}' is {dtype}[{', '.join(map(str, shape))}]{known}, the node's {t.dtype}{list(t.shape)}"
        odd = next((a for a in attributes if a not in self.attributes), None)
        missing = next((a for a, v in self.attributes.items() if v is None and a not in attributes), None)
        if odd is not None or missing is not None:
            return f"it has no attribute '{odd}'" if odd is not None else f"the node lacks '{missing}'"
        bound |= {a: v for a, v in {**self.attributes, **attributes}.items() if v is not None}
        for name, tokens in self.sizes:
            bound[name] = _Sum(tokens, bound, self).value()
        for sides in self.tests:
            a, b = (_Sum(s, bound, self).value() for s in sides)
            if a != b:
                return f"it is for {' == '.join(' '.join(t.text for t in s[:-1]) for s in sides)}, and these are {a} and {b}"
        return parse_tokens([x for t in self.graph for x in _filled(t, bound)], self.text, self.file)


def _filled(t: Token, bound: Mapping[str, Number | str]) -> list[Token]:
    """A token, or those of what it stands for."""
    if t.kind != "ident" or t.text not in bound:
        return [t]
    value = bound[t.text]
    text = value if isinstance(value, str) else repr(abs(value))
    kind = "ident" if text[0].isalpha() else "number"
    sign = [Token("punct", "-", t.at)] if not isinstance(value, str) and value < 0 else []
    return [*sign, Token(kind, text, t.at)]


class _Sum(Tokens):
    """Arithmetic on sizes: ``H // 2 + 1``."""

    def __init__(self, tokens: list[Token], bound: Mapping[str, Number | str], of: Template) -> None:
        super().__init__("", of.file)
        self.text, self.tokens, self.bound = of.text, tokens, bound

    def value(self) -> int:
        """What it is.

        Raises:
            TextError: it is no arithmetic on whole numbers.
        """
        out = self.some("+", "-", lambda: self.some("*", "//", self.atom))
        if self.next.kind != "end":
            raise self.fail("a sign, or the end")
        return out

    def some(self, a: str, b: str, part: Callable[[], int]) -> int:
        """Terms between two signs."""
        out = part()
        while self.peek(a) or self.peek(b):
            sign = a if self.take(a) else b
            self.take(sign)
            other = part()
            if sign == "//" and other == 0:
                raise self.wrong("division by 0")
            out = _SIGNS[sign](out, other)
        return out

    def atom(self) -> int:
        """A number, a name or a sum in parentheses."""
        if self.take("("):
            out = self.some("+", "-", lambda: self.some("*", "//", self.atom))
            self.need(")")
            return out
        if self.next.kind == "ident":
            value = self.bound.get(self.next.text)
            if type(value) is not int:
                raise self.fail("a size")
            self.at += 1
            return value
        return self.integer()


class _File(Tokens):
    """Definitions, one after another."""

    def template(self) -> Template:
        """``operator "com.example" Name {alpha = 1.0} size H = N // 2 when N == 2 * H``, and a graph."""
        self.need("operator")
        domain, name = self.string(), self.name()
        attributes: dict[str, Number | None] = {}
        if self.take("{"):
            while not self.take("}"):
                a = self.kind("ident", "an attribute")
                attributes[a] = self.literal() if self.take("=") else None
                self.take(",")
        sizes: list[tuple[str, list[Token]]] = []
        tests: list[tuple[list[Token], list[Token]]] = []
        while self.take("size"):
            size = self.open("a size")
            self.need("=")
            sizes.append((size, self.until("size", "when", "graph")))
        while self.take("when") or (tests and self.take(",")):
            left = self.until("==")
            self.need("==")
            tests.append((left, self.until(",", "when", "graph")))
        start = self.at
        inputs = self.inputs()
        while self.next.kind != "end" and not self.begins():
            self.at += 1
        graph = [*self.tokens[start : self.at], Token("end", "end of the definition", self.next.at)]
        opened = {w for _, dtype, shape in inputs for w in (dtype, *shape) if isinstance(w, str)} | {s for s, _ in sizes}
        twice = ({n for n, _, _ in inputs} & (opened | attributes.keys())) | (opened & attributes.keys())
        if twice:
            raise self.error(f"'{sorted(twice)[0]}' stands for two things", self.tokens[start].at)
        return Template(domain, name, self.text, self.file, attributes, tuple(inputs), tuple(sizes), tuple(tests), graph)

    def begins(self) -> bool:
        """Whether a definition begins here."""
        return self.peek("operator") and self.tokens[self.at + 1].kind == "string"

    def until(self, *ends: str) -> list[Token]:
        """The tokens before a word or sign."""
        start = self.at
        while self.next.kind != "end" and not any(map(self.peek, ends)):
            self.at += 1
        return [*self.tokens[start : self.at], Token("end", "end", self.next.at)]

    def open(self, what: str, known: Collection[str] = ()) -> str:
        """A known word, or a name in capitals that stands for any."""
        word = self.kind("ident", what)
        if word not in known and not word[0].isupper():
            raise self.wrong(f"expected {what}, or a name for it that begins with a capital, found '{word}'")
        return word

    def inputs(self) -> list[tuple[str, str, tuple[str | int, ...]]]:
        """The inputs' names, and their types and sizes as far as they are said."""
        self.need("graph")
        self.name()
        out: list[tuple[str, str, tuple[str | int, ...]]] = []
        while self.take("input"):
            name = self.name()
            self.need(":")
            dtype, shape = self.open("a dtype", DTYPES), list[str | int]()
            self.need("[")
            while not self.take("]"):
                shape.append(self.open("a size") if self.next.kind == "ident" else self.integer())
                self.take(",")
            out.append((name, dtype, tuple(shape)))
        return out


def read_operators(text: str, file: str) -> list[Template]:
    """The definitions of a file.

    Raises:
        TextError: with the line and what was expected.
    """
    reader, out = _File(text, file), list[Template]()
    while reader.next.kind != "end":
        out.append(reader.template())
    return out


Define = Callable[[Sequence[Tensor], Mapping[str, Number]], "Graph | str"]
"""The graph of a node by its inputs' types and its attributes, or why there is none for these."""
_CODES = {name: code for code, name in DTYPE_OF.items()}
_NAMES = {numpy_dtype(name): name for name in DTYPES if name != HOST}


@dataclass(slots=True)
class OwnOperator:
    """An operator: its definitions, of which the first that fits a node's inputs counts, and where each was read."""

    domain: str
    name: str
    definitions: list[Define] = field(default_factory=list[Define])
    files: list[str] = field(default_factory=list[str])

    def graph(self, inputs: Sequence[Tensor], attributes: Mapping[str, Any], where: str) -> Graph:
        """The graph for some inputs, its laws checked.

        Raises:
            ModelError: no definition fits; TapestryError: one that does is wrong.
        """
        odd = next((a for a, v in attributes.items() if type(v) not in (int, float)), None)
        if odd is not None:
            raise ModelError("attributes of operators of one's own are numbers", where=where, why=f"'{odd}' is none")
        why: list[str] = []
        for define, file in zip(self.definitions, self.files, strict=True):
            found = define(inputs, attributes)
            if isinstance(found, Graph):
                _check(found, inputs, file)
                return found
            why.append(f"{file}: {found}")
        hint = "a definition for these inputs as well"
        raise ModelError(f"no definition of {self.domain}.{self.name} fits", where=where, why="; ".join(why), hint=hint)

    def lift(self, n: Node) -> None:
        """The graph's operations in the place of a node."""
        inputs = [n.tensor(k) for k in range(_given(n.proto, n.where))]
        graph = self.graph(inputs, _attributes(n.proto), n.where)
        _check_outputs(graph, n.proto, n.where)
        outs = dict(zip(graph.outputs, n.outs, strict=False))
        names = dict(zip(graph.inputs, (t.name for t in inputs), strict=True))
        names |= {t: outs.get(t) or n.temp(t) for op in graph.ops for t in op.outs}
        for op in graph.ops:
            assert isinstance(op, Block)
            reads = tuple(replace(r, tensor=names[r.tensor]) for r in op.reads)
            new = replace(op, outs=tuple(names[t] for t in op.outs), reads=reads, source=(n.source,))
            n.b.emit(new, [replace(graph.tensors[t], name=names[t]) for t in op.outs])

    def evaluate(self, node: NodeProto, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of a node for some arrays, by the verifier's interpreter."""
        given = [np.asarray(a) for a in arrays[: _given(node, node_name(node))]]
        inputs = [Tensor(name=f"in{k}", dtype=_NAMES[a.dtype], shape=a.shape) for k, a in enumerate(given)]
        graph = self.graph(inputs, _attributes(node), f"node '{node_name(node)}'")
        values = interp.run(graph, dict(zip(graph.inputs, given, strict=True)))
        return tuple(values[t] for t in graph.outputs[: len(node.output)])


OWN: dict[tuple[str, str], OwnOperator] = {}


def operator(domain: str, name: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """A decorator: a function gives the IR text of an operator's graph.

    The function takes the inputs as tensors (``dtype``, ``shape``), then the node's attributes by name. It is in force in this
    process, in the place of what was there for the operator. Its text has an ``input`` for each of the node's, in their order.

    Raises:
        TapestryError: the domain is not the user's own.
    """

    def add(function: Callable[..., str]) -> Callable[..., str]:
        file = getattr(function, "__qualname__", repr(function))

        def define(inputs: Sequence[Tensor], attributes: Mapping[str, Number]) -> Graph | str:
            try:
                signature(function).bind(*inputs, **attributes)
            except TypeError as e:
                return str(e)
            return parse(function(*inputs, **attributes), file)

        _put(domain, name, [define], [file])
        return function

    return add


def load_operators(*paths: Path) -> None:
    """The operators of some files, in the place of what was there for them.

    Raises:
        TapestryError: one does not read or parse, or an operator is not of the user's own domain.
    """
    found: dict[tuple[str, str], tuple[list[Define], list[str]]] = {}
    for path in paths:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as e:
            raise TapestryError("operators cannot be read", where=str(path), why=str(e)) from None
        for template in read_operators(text, str(path)):
            definitions, files = found.setdefault((template.domain, template.name), ([], []))
            definitions.append(template.define)
            files.append(str(path))
    for key, (definitions, files) in found.items():
        _put(*key, definitions, files)


def own_types(model: ModelProto, types: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
    """Types of results of own operators that ``types`` lacks, where the inputs' are known.

    Raises:
        ModelError: no definition fits a node; TapestryError: one that does is wrong.
    """
    out: dict[str, TypeProto] = {}
    for node in model.graph.node if OWN else ():
        own = OWN.get((node.domain, node.op_type))
        if own is None:
            continue
        where = f"node '{node_name(node)}' ({node.op_type})"
        given = [types.get(i, TypeProto()) for i in node.input[: _given(node, where)]]
        open_ = any(o and static_shape(types.get(o, TypeProto())) is None for o in node.output)
        if not open_ or any(static_shape(t) is None for t in given):
            continue
        inputs = [tensor_of(i, t) for i, t in zip(node.input, given, strict=False)]
        graph = own.graph(inputs, _attributes(node), where)
        _check_outputs(graph, node, where)
        for o, t in zip(node.output, (graph.tensors[t] for t in graph.outputs), strict=False):
            out |= {o: onnx.helper.make_tensor_type_proto(_CODES[t.dtype], t.shape)} if o else {}
    return out


def _put(domain: str, name: str, definitions: list[Define], files: list[str]) -> None:
    if domain in {*STANDARD, MICROSOFT, *(s.domain for s in onnx.defs.get_all_schemas())} or domain.startswith("tapestry."):
        hint = 'operator "com.example" …'
        raise TapestryError(f"'{domain}' is not a domain of your own", where=f"{files[0]}, {name}", hint=hint)
    own = OwnOperator(domain, name, definitions, files)
    OWN[domain, name] = own
    LIFTERS[domain, name] = [Entry(1, own.lift)]
    reference_fixes.EVALUATORS[domain, name] = own.evaluate


def _given(node: NodeProto, where: str) -> int:
    """How many inputs a node has: those that it leaves out are its last."""
    count = max((k + 1 for k, i in enumerate(node.input) if i), default=0)
    if not all(node.input[:count]):
        hint = "another operator of one's own, for fewer inputs"
        raise ModelError("an input is left out before another one", where=where, hint=hint)
    return count


def _attributes(node: NodeProto) -> dict[str, Any]:
    named = (a for a in node.attribute if not a.name.startswith("tapestry."))
    return {a.name: onnx.helper.get_attribute_value(a) for a in named}


def _check(graph: Graph, inputs: Sequence[Tensor], file: str) -> None:
    """The graph is of blocks alone, over these inputs, and keeps the laws."""
    wanted = [(t.dtype, t.shape) for t in inputs]
    got = [(graph.tensors[t].dtype, graph.tensors[t].shape) for t in graph.inputs]
    if wanted != got:
        raise TapestryError("the graph is of other inputs than the node", where=file, why=f"{got}, the node has {wanted}")
    written = {t for op in graph.ops for t in op.outs}
    lost = next((t for t in graph.outputs if t not in written), None)
    if graph.weights or lost is not None or any(not isinstance(op, Block) for op in graph.ops):
        why = f"no operation writes its output '{lost}'" if lost is not None else "it has weights, or opaque operations"
        raise TapestryError("an operator's graph is of block operations over its inputs", where=file, why=why)
    try:
        laws.check(graph)
    except LawError as e:
        raise TapestryError("the operator breaks a law", where=f"{file}, {e.where}", why=f"{e.what} {e.why}".strip()) from None


def _check_outputs(graph: Graph, node: NodeProto, where: str) -> None:
    if len(node.output) > len(graph.outputs):
        why = f"it has {len(node.output)}, its definition {len(graph.outputs)}"
        raise ModelError("the node has too many outputs", where=where, why=why)
