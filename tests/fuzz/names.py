"""``python -m tests.fuzz.names``: small models with names that mean something in other languages, through every command.

No command ends in a traceback; no name ends a line, a comment or a string of what is written (Python that parses and calls
nothing that a name says, HTML, JSON, dot), or reaches a terminal as a control sequence. Runs give the values that the model
gives under plain names.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

import tapestry
from tests.support.command_line import run
from tests.support.small_models import MODELS, save

EVIL = (
    "n\nimport evil_code\n#", "n\rimport evil_code\r#", "n\x0cimport evil_code\x0c#", '"""\nimport evil_code\n"""', "'''\nimport evil_code\n'''",
    '"; import evil_code; "', "*/ int evil_code; /*", "?" "?/\nint evil_code;", "</script><script>evil_code()</script>", "<img src=x onerror=evil_code()>",
    "[/bold][red]evil_code", "[link=file:evil_code]x[/link]", "\x1b[2J\x1b[31mevil_code", "\x9b31mevil_code", "nul\x00evil_code", "line\u2028evil_code",
    "para\u2029evil_code", "bidi\u202eevil_code", "../../evil_code", "/evil_code", "a b", "ü名", "$(evil_code)", "`evil_code`", "%s{evil_code}%n",
    "{0.__class__}", "\\", '\\"', "-o", "--help", "a=b", "x:0=2@d0", "harmless", "", "for", "tl", "triton", "lambda", "operator", "name",
)  # fmt: skip
FORMATS = (
    "onnx",
    "onnx-ranks",
    "onnx-fused",
    "tp-plan",
    "dtensor",
    "jax",
    "json",
    "kernels",
    "ir",
    "history",
)


def renamed(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """The model under other names: one of them for each tensor, node and symbol, made different by a number."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    names: dict[str, str] = {}

    def new(name: str) -> str:
        if name and name not in names:
            names[name] = f"{rng.choice(EVIL)}{len(names)}"
        return names.get(name, "")

    def graph(g: onnx.GraphProto) -> None:
        for v in (*g.input, *g.output, *g.value_info, *g.initializer):
            v.name = new(v.name)
        for s in g.sparse_initializer:
            s.values.name = new(s.values.name)
        for n in g.node:
            n.input[:], n.output[:] = map(new, n.input), map(new, n.output)
            n.name = rng.choice(EVIL)
            for a in n.attribute:
                for inner in (a.g, *a.graphs):
                    graph(inner)

    out.graph.name, out.graph.doc_string = rng.choice(EVIL) or "g", rng.choice(EVIL)  # (a name must not be empty)
    graph(out.graph)
    return out


def commands(model: Path, folder: Path, target: str) -> Iterator[list[str | Path]]:
    """Every command on a model and on its build."""
    b = folder / "build"
    yield ["compile", model, "-o", b, "--devices", "2", "--topology", "cpu", "--target", target]
    yield ["doctor", model, "-v"]
    yield ["explain", b, "--why", "--critical-path", "--kernels", "-v"]
    yield ["verify", b, "-v"]
    yield ["kernels", b, "-o", folder / "kernels"]
    yield ["view", b, "-o", folder / "view.html"]
    yield ["check-sharding", model]
    yield ["rules", "--refused", model]
    yield ["tiles", model]
    yield ["compile", model, "-o", folder / "other", "--devices", "2", "--topology", "cpu", "--print-after", "simplify"]
    for form in FORMATS:
        yield [
            "export",
            b,
            "--format",
            form,
            "-o",
            folder / f"export_{form.replace('-', '_')}",
            *(["--nearest"] if form == "tp-plan" else []),
        ]
    if target == "torch-cpu":
        yield ["run", b, "--check", "--output", folder / "outputs"]


def wrong(said: str) -> list[str]:
    """What must not be in what a command says: control signs, and lines of a name's own."""
    found = [f"sign {c!r}" for c in set(said) if not c.isprintable() and c != "\n"]
    return found + [
        f"a line of its own: {line[:60]}" for line in said.split("\n") if re.match(r"import evil_code|int evil_code", line)
    ]


def faults(folder: Path) -> list[str]:
    """What is wrong with the files that were written."""
    out: list[str] = []
    for path in (p for p in folder.rglob("*") if p.is_file() and "model" not in p.relative_to(folder).parts):
        if path.suffix == ".py":
            try:
                tree = ast.parse(path.read_text())
            except (SyntaxError, ValueError) as e:
                out.append(f"{path.name}: {e}")
                continue
            assigned = [a for a in tree.body if isinstance(a, ast.Assign)]  # a package of kernels has operators of nodes' names
            own = [a for a in assigned if re.match(r"OPERATORS = |(\w+) = _operator\(", ast.unparse(a))]
            names = {n for n in ast.walk(tree) if isinstance(n, ast.Name)} - {n for a in own for n in ast.walk(a)}
            used = {n.id for n in names} | {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
            out += [f"{path.name} uses evil_code"] if "evil_code" in used else []
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".html" and re.search(r"<script>evil|<img src=x", path.read_text()):
            out.append(f"{path.name} has a name's markup")
    return out


def trial(name: str, seed: int) -> list[str]:
    """What is wrong with one model under other names."""
    rng = random.Random(f"{name} {seed}")
    target, out = ("torch-cpu", "triton:sm90")[seed % 2], list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "in"
        folder.mkdir()
        model = folder / "model.onnx"
        model.write_bytes(renamed(onnx.load(save(name)), rng).SerializeToString())
        for command in commands(model, folder, target):
            status, said, error = run(*command)
            shown = f"{name} {seed} {command[0]} {command[-1] if command[0] == 'export' else ''}"
            if status not in (0, 1, 2) or (status and command[0] == "compile"):
                out.append(f"{shown}: status {status}, {error[:300]}")
            out += [f"{shown}: {w}" for w in wrong(said + error)]
            if status == 2 and command[0] == "compile" and command[4:5] == ["--devices"]:
                return out
        out += [f"{name} {seed}: {f}" for f in faults(folder)]
        outside = [str(p) for p in Path(scratch).rglob("*evil_code*") if not p.is_relative_to(folder)]
        out += [f"{name} {seed} wrote {outside}"] if outside else []
        if target == "torch-cpu" and name != "noise":  # whose draws are those of its nodes' names
            plain, other = (tapestry.compile(str(m), devices=1, topology="cpu") for m in (save(name), model))
            feeds = plain.random_feeds(1)
            mine = other.run(dict(zip(other.build.plan.graph.inputs, feeds.values(), strict=True)))
            for a, b in zip(plain.run(feeds).values(), mine.values(), strict=True):
                if not np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f"):
                    out.append(f"{name} {seed}: other values")
    return out


def main() -> int:
    """Print what is wrong; status 1 where something is."""
    p = argparse.ArgumentParser(prog="python -m tests.fuzz.names", description=__doc__)
    p.add_argument("--seeds", type=int, default=2)
    p.add_argument("--models", nargs="*", default=list(MODELS))
    args = p.parse_args()
    found = [f for name in args.models for seed in range(args.seeds) for f in trial(name, seed)]
    print(*found, sep="\n")
    print(f"{len(args.models)} models, {args.seeds} times each: {len(found)} faults")
    return min(1, len(found))


if __name__ == "__main__":
    sys.exit(main())
