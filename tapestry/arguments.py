"""Arguments of the commands that have many; those of ``run`` are those of ``python -m tapestry.runtime`` too. Light, because
every ``--help`` imports it; those of ``compile`` are in `options`."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from tapestry.errors import TapestryError
from tapestry.options import flags
from tapestry.plugins import offered
from tapestry.viz.tool_kinds import ExportFormat


def whole(low: int, high: int = 1 << 63) -> Callable[[str], int]:
    """A type of argument: integers from ``low`` to ``high``."""

    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not {low} {'or more' if high == 1 << 63 else f'to {high}'}")
        return value

    return integer


def seconds(text: str) -> float:
    """A type of argument: a time of at least 0, without end as well."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text}: seconds must be ≥ 0")
    return value


@contextmanager
def one_document(asked: bool, *, for_good: bool) -> Generator[TextIO]:
    """Where ``--json`` writes its document: to standard output, and nobody else does. What libraries print there, their C
    code too, goes to standard error; ``for_good`` also what they print as the process ends."""
    if not asked or sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] (it was closed)
        yield cast("TextIO", sys.stdout)
        return
    shown, own = sys.stdout, os.dup(1)
    shown.flush()
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield open(own, "w", closefd=False) if shown is sys.__stdout__ else shown  # noqa: SIM115
    finally:
        sys.stdout = shown
        if not for_good:
            os.dup2(own, 1)
            os.close(own)


def print_json(document: object, out: TextIO) -> None:
    """One JSON document; numbers that JSON has not become null."""
    print(json.dumps(_finite_json(document), indent=1), file=out, flush=True)


def _finite_json(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _finite_json(v) for k, v in cast("dict[str, Any]", x).items()}
    if isinstance(x, list | tuple):
        return [_finite_json(v) for v in cast("list[Any]", x)]
    return None if isinstance(x, float) and not math.isfinite(x) else x


class Parser(argparse.ArgumentParser):
    """A parser whose lists of ``NAME=VALUE`` end at the first word that is none, and whose errors are a line."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """The arguments, each item of a list with its option."""
        lists = {o for a in self._actions if a.nargs == "+" and "=" in str(a.metavar) for o in a.option_strings}
        out, option = list[str](), ""
        for word in sys.argv[1:] if args is None else args:
            if out and out[-1] in lists and not word.startswith("-"):
                option = out.pop()
            elif word.startswith("-") or not {"=", ":"} & {*word}:
                option = ""
            out.append(f"{option}={word}" if option else word)
        return super().parse_known_args(out, namespace)

    def error(self, message: str, hint: str = "") -> NoReturn:
        """Refuse the command line.

        Raises:
            TapestryError: always.
        """
        raise TapestryError(f"error: {message}", where=self.prog, hint=hint or f"{self.prog} --help")


def shapes(items: list[str]) -> dict[str, str]:
    """``--shape symbol=size …``.

    Raises:
        TapestryError: an item has no name or no size.
    """
    out: dict[str, str] = {}
    for item in items:
        name, eq, value = item.rpartition("=")
        if not eq or not name:
            raise TapestryError(f"'{item}' is not symbol=size", where="--shape", hint="batch=8, or input=8x3x224x224")
        out[name] = value
    return out


def build(p: argparse.ArgumentParser) -> None:
    """A build directory."""
    p.add_argument("build", type=Path, help="a folder that tapestry compile wrote")


def moved_model(p: argparse.ArgumentParser) -> None:
    """Where a build's model is."""
    p.add_argument("--model", type=Path, metavar="FILE", help="the model, if it was moved (and is not beside the build)")


def output_folder(p: argparse.ArgumentParser) -> None:
    """A folder for what is written."""
    p.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")


def model(p: argparse.ArgumentParser) -> None:
    """An ONNX file and the sizes of its symbols."""
    p.add_argument("model", type=Path, help="an ONNX file")
    flags(p, "shapes")


def doctor(p: argparse.ArgumentParser) -> None:
    """A model, and what may be missing."""
    model(p)
    flags(p, "ops", "weights")


def several(p: argparse.ArgumentParser, name: str, form: str, text: str) -> None:
    """An option that takes one or more values, and may be given again."""
    p.add_argument(name, action="extend", nargs="+", default=[], metavar=form, help=text)


def kernels(p: argparse.ArgumentParser) -> None:
    """For which GPU."""
    p.add_argument("--target", default="triton:sm90", help="triton: followed by sm80, sm86, sm89, sm90, sm100 or gfx942")


def verify(p: argparse.ArgumentParser) -> None:
    """Where the model is, and what is proved besides."""
    moved_model(p)
    flags(p, "ops")
    p.add_argument("--kernels", action="store_true", help="also prove the sources of the kernels against their operations")


def export_arguments(p: argparse.ArgumentParser) -> None:
    """In which format, and where to."""
    text = "default onnx: the model with the plan as annotations; docs/howto/export.md describes each format"
    p.add_argument("--format", choices=offered(ExportFormat), default="onnx", help=text)
    text = "if the format cannot express the plan: write the nearest plan that it can, and say how many more bytes that takes"
    p.add_argument("--nearest", action="store_true", help=text)
    p.add_argument("-o", "--output", type=Path, metavar="PATH", help="a file (default: that of --into), or a folder of several")
    p.add_argument("--into", type=Path, metavar="MODEL", help="onnx: a file of the same model, whose configurations are kept")
    p.add_argument("--configuration", default="tapestry", metavar="NAME", help="onnx: the plan's configuration (tapestry)")
    p.add_argument("--copy-data", action="store_true", help="onnx, ir: copy external data that would be out of reach")


def tiles_arguments(p: argparse.ArgumentParser) -> None:
    """A tensor's shape with a pattern, a model with tilings, or a map of links."""
    p.add_argument("model", type=Path, nargs="?", help="an ONNX file whose tensors carry tilings: both evaluations, with bytes")
    several(p, "--shape", "7x4|SYMBOL=SIZE", "shape of the tensor, or sizes of a model's symbols")
    p.add_argument("--pattern", metavar="5,1", help="tiles per axis; leading ones may be left out; {2,1: 0,1} with instances")
    text = "the instance that holds each tile, -1 for none (--assign=-1,0); with pattern 1, all instances that hold the tensor"
    p.add_argument("--assign", metavar="3,2,4,1,0", help=text)
    p.add_argument("--to", metavar="PATTERN", help="another tiling, to show what the change moves: {1: 0,1}")
    p.add_argument("--dtype", default="f32", choices=("f64", "f32", "f16", "bf16", "i64", "i32", "i8"), help="for bytes (f32)")
    p.add_argument("--svg", type=Path, metavar="FILE", help="also write a drawing")
    p.add_argument("--topology", metavar="MAP", help="instead: what a map of links such as {4, [[1],[2],[3],[0]]} is")


def check_sharding(p: argparse.ArgumentParser) -> None:
    """How strictly."""
    p.add_argument("--strict", action="store_true", help="fail on warnings too (implied communication, uneven parts)")


def prove_arguments(p: argparse.ArgumentParser) -> None:
    """A model, and a parallel program of it."""
    model(p)
    text = "a folder with a file per rank (rank0.onnx, ...) and, if needed, program.json; or these files; or one for all ranks"
    p.add_argument("program", type=Path, nargs="+", help=text)


def opt(p: argparse.ArgumentParser) -> None:
    """A graph, and moves."""
    p.add_argument("graph", type=Path, nargs="?", help="a file of IR text, an IR document (.json), or - for IR text")
    p.add_argument("-r", "--rule", action="append", default=[], metavar="MOVE", help="as split@y{dim=n,parts=8,to=mesh.d0}")
    p.add_argument("--print-between", action="store_true", help="print the graph after every move")
    text = "instead of a graph: apply and prove, step by step, a document that export --format history wrote"
    p.add_argument("--replay", type=Path, metavar="HISTORY.json", help=text)
    flags(p, "rules")


def topology_arguments(p: argparse.ArgumentParser) -> None:
    """Whose figures are shown."""
    p.add_argument("show", choices=("show",), help="print each figure, and where it comes from")
    p.add_argument("topology", metavar="NAME", help="a preset, or a topology file")
    flags(p, "mesh")


def run_arguments(p: argparse.ArgumentParser) -> None:
    """What is run, on what, and how long silence is borne."""
    build(p)
    moved_model(p)
    p.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="an input, as numpy.save wrote it")
    flags(p, "shapes")
    p.add_argument("--output", type=Path, metavar="DIR", help="write every output as a .npy file")
    p.add_argument("--seed", type=whole(0), default=0, help="seed of the random inputs that stand in for missing ones")
    p.add_argument("--timeout", type=seconds, default=30.0, metavar="S", help="seconds of silence that count as a failure (30)")
    p.add_argument("--trace", type=Path, metavar="FILE", help="write a timeline of the real run, for https://ui.perfetto.dev")
    p.add_argument("--threads", type=whole(1), metavar="T", help="threads of each process (default: the cores, shared evenly)")


def checked(p: argparse.ArgumentParser) -> None:
    """What a run on this host may do besides."""
    p.add_argument("--check", action="store_true", help="compare the results with onnxruntime")
    flags(p, "ops")
    p.add_argument("--library", action="store_true", help="on a GPU: use the vendor's library where tune found it faster")


def processes(p: argparse.ArgumentParser) -> None:
    """How ranks are started on this host."""
    p.add_argument("--processes", type=whole(1), metavar="N", help="run on N processes, with the devices shared evenly")
    p.add_argument("--port", type=whole(0, 65535), default=0, help="port at which the ranks meet (default: a free one)")


def scheduled(p: argparse.ArgumentParser) -> None:
    """A run in another order than the plan's."""
    text = "run block by block in a random legal order, each block twice; results must have the bits of a plain run"
    p.add_argument("--schedule", choices=("random",), help=text)


def by_ranks(args: argparse.Namespace) -> bool:
    """Whether a run was asked for something that ranks do, or one rank alone."""
    return any((args.processes, args.threads, args.port, args.trace))


def calibrate(p: argparse.ArgumentParser) -> None:
    """What is measured."""
    to = p.add_mutually_exclusive_group(required=True)
    to.add_argument("-o", "--output", type=Path, metavar="FILE.json")
    to.add_argument("--auto", action="store_true", help="measure again what --topology auto uses for N devices")
    p.add_argument("--processes", type=whole(1, 64), default=1, metavar="N", help="processes to measure with, at the same time")
    p.add_argument("--threads", type=whole(1), metavar="T", help="threads of each process (default: the cores, shared evenly)")
    p.add_argument("--seconds", type=seconds, metavar="S", help="about how long to measure (40; with --auto 3 for each round)")
    p.add_argument("--device", metavar="FILE_OR_PRESET", help="take the device from there; measure calls alone (GPUs: NCCL)")


def tune(p: argparse.ArgumentParser) -> None:
    """What is measured, and for how long."""
    build(p)
    p.add_argument("--library", action="store_true", help="also measure the vendor's library, for run --library")
    p.add_argument("--again", action="store_true", help="measure again what has been measured already")
    p.add_argument("--time-limit", type=seconds, default=600.0, metavar="S", help="seconds for all measurements")
    p.add_argument("--seed", type=whole(0), default=0, help="seed of the random data")


def rules(p: argparse.ArgumentParser) -> None:
    """Which rules, and where they do not apply."""
    p.add_argument("rule", nargs="?", metavar="NAME")
    p.add_argument("--refused", type=Path, metavar="MODEL", help="print why rules do not apply to a model")
    p.add_argument("--check", action="append", type=Path, default=[], metavar="FILE", help="prove the rules of a file")
    text = "print the forms that cuts and equations make of a graph (IR text, or Linear, Conv, StridedConv, Sum, Stddev)"
    p.add_argument("--derive", metavar="GRAPH.tap", help=text)
    p.add_argument("--mesh", default="1", metavar="2x4", help="with --derive: also cut the forms over these devices (1)")
    p.add_argument("--forms", type=whole(1), default=100, metavar="N", help="with --derive: at most N forms (100)")
    p.add_argument("--dot", action="store_true", help="with --derive: print a graph for Graphviz")
    text = "compare plans and runs with the book of equations, without it, without each equation used, with each one alone"
    p.add_argument("--ablate", action="append", type=Path, default=[], metavar="MODEL", help=text)
    text = "look for equations that the book lacks, prove them, and rank them by what they save on the models"
    p.add_argument("--discover", nargs="*", type=Path, metavar="MODEL", help=text)
    p.add_argument("--terms", type=whole(1), default=12_000, metavar="N", help="with --discover: terms to try in each family")
    flags(p, "shapes")
    flags(p, "rules")


def auto_shard(p: argparse.ArgumentParser) -> None:
    """The options of PopRT, and ours."""
    p.add_argument("--input-model", type=Path, required=True, metavar="MODEL")
    p.add_argument("--num-devices", type=int, metavar="N", help="number of devices; with --cut: one more than the cuts")
    several(p, "--cut", "NODE", "your own stages, by the nodes at which they end (A,B: two nodes, one stage)")
    p.add_argument("--measure", action="store_true", help="compile every candidate and run those that fit")
    p.add_argument("--apart", action="store_true", help="with --measure: one process per device; each sends to the next")
    p.add_argument(
        "--max-candidates",
        type=whole(0),
        default=24,
        metavar="C",
        help="with --measure: compile at most C candidates (24); 0: no limit",
    )
    p.add_argument("--output-model", type=Path, metavar="FILE", help="default: MODEL.auto_sharded.onnx beside the model")
    p.add_argument("--optimal-perf", action="store_true", help="let the heuristic continue after the first scheme that fits")
    p.add_argument("--num-processes", type=int, default=2, metavar="P", help="with --measure: processes that compile schemes")
    p.add_argument(
        "--memory-proportion",
        type=float,
        nargs="+",
        metavar="SHARE",
        help="share of a device's memory for weights and activations; if nothing fits, the next one is tried (0.4 0.7 0.9)",
    )
    flags(p, "shapes")
    p.add_argument("--topology", default="cpu", metavar="FILE_OR_PRESET")
    p.add_argument("--memory", metavar="16GiB", help="memory of a device, instead of the topology's")


def explain(p: argparse.ArgumentParser) -> None:
    """What is shown."""
    build(p)
    p.add_argument("--why", action="store_true", help="also the best alternative of every operation, and its cost")
    p.add_argument("--diff", type=Path, metavar="OTHER", help="print what differs from another build, instead of the plan")
    p.add_argument("--kernels", action="store_true", help="also what computes each operation, and why other kernels cannot")
    p.add_argument("--critical-path", action="store_true", help="also the steps that decide the simulated time")
    p.add_argument("--analyze", action="store_true", help="run the plan, and print estimated and measured seconds of each step")
    p.add_argument("--processes", type=whole(1), metavar="N", help="for --analyze: run on N processes (one per device)")


def view(p: argparse.ArgumentParser) -> None:
    """Which builds, and where the page goes."""
    build(p)
    p.add_argument("other", type=Path, nargs="?", metavar="BUILD2", help="another build, shown beside the first one")
    p.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="the page to write (default: BUILD.html)")
    p.add_argument("--open", action="store_true", help="open the page in the browser")
    p.add_argument("--trace", type=Path, metavar="FILE", help="a file of run --trace: measured beside simulated times")


def compare_arguments(p: argparse.ArgumentParser) -> None:
    """The model, what it is held against, and `options.Options`."""
    p.add_argument("model", type=Path, help="an ONNX file")
    text = "megatron, fsdp or sequence; or a tp-plan, DTensor's placements, pins (a line each), an annotated model"
    p.add_argument("--with", dest="beside", required=True, metavar="IDEA_OR_FILE", help=text)
    flags(p)


def compile(p: argparse.ArgumentParser) -> None:
    """The model, where the build goes, and `options.Options`."""
    p.add_argument("model", type=Path, help="an ONNX file, or IR text (.tap)")
    p.add_argument("--bundle", action="store_true", help="copy the model and its weights into the build")
    p.add_argument("-o", "--output", type=Path, required=True, metavar="BUILD", help="the folder to write")
    flags(p)
    p.add_argument("--print-passes", action="store_true", help="print the passes that ran, in order, with seconds and sizes")
