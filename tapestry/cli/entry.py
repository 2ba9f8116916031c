"""The table of commands, and how one begins and ends.

Exit status: 0 done; 1 a check failed; 2 the user's input, with a message; 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from tapestry import arguments
from tapestry.cli import building, plugin_list, rewriting, topologies
from tapestry.cli.outcome import Command
from tapestry.errors import BuildError, ModelError, RunError, TapestryError, absent, similar, unusable
from tapestry.flags import version
from tapestry.plugins import tool
from tapestry.system import interrupts

FLAG = re.compile(r"--[a-z-]+")
Arguments = Callable[[argparse.ArgumentParser], None]
COMMANDS: dict[str, tuple[Command | None, Sequence[Arguments], str]] = {
    "compile": (building.compile_model, [arguments.compile], "find, verify and write a plan"),
    "run": (
        building.run, [arguments.run_arguments, arguments.processes, arguments.checked, arguments.scheduled],
        "run a plan (random inputs when none are given)",
    ),
    "explain": (building.explain, [arguments.explain], "show the plan: how it is cut, what it sends, what it costs"),
    "compare": (None, [arguments.compare_arguments], "show the plan beside one that somebody else would make"),
    "view": (None, [arguments.view], "write one HTML page: graph, index spaces, tensors, time, alternatives"),
    "verify": (building.verify, [arguments.build, arguments.verify], "check a build again, from its files alone"),
    "kernels": (
        building.kernels, [arguments.build, arguments.output_folder, arguments.kernels],
        "write the kernels: readable Triton source, compiled objects, a table of resources",
    ),
    "tune": (building.tune, [arguments.tune], "measure the kernels' knobs on this machine's GPU, for every later run"),
    "export": (
        None, [arguments.build, arguments.export_arguments], "write the plan in the format of another tool",
    ),
    "check-sharding": (
        building.check_sharding, [arguments.model, arguments.check_sharding],
        "check a model's multi-device annotations",
    ),
    "tiles": (
        None, [arguments.tiles_arguments],
        "start, stop and size of every tile of a tensor, and what another tiling moves",
    ),
    "prove": (
        None, [arguments.prove_arguments],
        "prove that a parallel program computes a model, or show a cell that differs",
    ),
    "calibrate": (building.calibrate, [arguments.calibrate], "measure this machine and write a topology file"),
    "topology": (
        topologies.topology, [arguments.topology_arguments], "show the figures of a topology, and where they come from",
    ),
    "doctor": (
        building.doctor, [arguments.doctor],
        "show what can be split, what is opaque, unbound or unsupported; -v lists every node",
    ),
    "opt": (rewriting.opt, [arguments.opt], "apply rules to IR text"),
    "rules": (rewriting.rules, [arguments.rules], "list the rewrite rules, or show one with before and after"),
    "auto-shard": (None, [arguments.auto_shard], "find pipeline stages for the nodes of an ONNX file"),
}  # fmt: skip
"""What a command runs (without it: what a program offers under its name), its arguments, and what it does."""


def main(argv: list[str] | None = None) -> int:
    """Run a command; never a traceback for what the user can mend."""
    return interrupts.ending(_own) if argv is None else _main(argv, last=False)


def _own() -> int:
    """The status of the process's own command, whose output nobody may read to its end."""
    try:
        try:
            return _main(sys.argv[1:], last=True)
        finally:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
    except BrokenPipeError:  # of either; nothing must be written to it at exit
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        return 141


def _main(words: Sequence[str], *, last: bool) -> int:
    for stream in (sys.stdout, sys.stderr):  # a terminal that has no such letter gets another one
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        args = parsed(words)
    except TapestryError as e:
        return _failed(e, e.text(), sys.stdout if "--json" in words else None)
    level = logging.ERROR if args.quiet else logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    with arguments.one_document(args.json, for_good=last) as out:
        return _run(args, out, last=last)


def _run(args: argparse.Namespace, out: TextIO, *, last: bool) -> int:
    """The exit status of a command, ``last`` of all that the process does."""

    def failed(e: TapestryError) -> int:
        return _failed(e, f"tapestry {args.name}: {e.text()}", out if args.json else None)

    try:
        _look(args)
        if getattr(args, "ops", ()):
            from tapestry.lift.own_operators import load_operators

            load_operators(*args.ops)
        with _reading(args):
            command = COMMANDS[args.name][0] or tool(Command, args.name)
            return command(args).end(args, out)
    except TapestryError as e:
        status = failed(e)
        return _leave(status) if isinstance(e, RunError) and last else status
    except ModuleNotFoundError as e:
        return failed(absent(e))
    except MemoryError:
        return failed(TapestryError("out of memory", hint="a smaller --shape, or more memory"))
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # nothing must be written to the pipe at exit
        return 141
    except OSError as e:
        return failed(TapestryError(e.strerror or str(e), where=str(e.filename or "")))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line.

    Raises:
        TapestryError: there is no such command or flag; with the name of a similar one.
    """
    parser = command_parser(words)
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        tip = similar(words[0], COMMANDS) or "tapestry --help lists the commands"
        parser.error(f"there is no command '{words[0]}'", tip)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        of_command = argparse.ArgumentParser()
        for add in COMMANDS[args.name][1]:
            add(of_command)
        flags = FLAG.findall(of_command.format_help())
        tip = similar(unknown[0].partition("=")[0], flags, 0) or f"tapestry {args.name} --help"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}", tip)
    return args


def command_parser(words: Sequence[str] = ()) -> arguments.Parser:
    """The parser of all commands, for some words."""
    common = arguments.Parser(add_help=False)
    common.add_argument(
        "--json", action="store_true", help="one JSON document on standard output, everything else on standard error"
    )
    common.add_argument("-q", "--quiet", action="store_true", help="print errors, and what was asked for, alone")
    common.add_argument("-v", "--verbose", action="store_true", help="print more: notes, and rows that are folded else")
    parser = arguments.Parser(prog="tapestry", description="ONNX models to verified, sharded plans and Triton kernels")
    text = "show the version and exit; with -v also the plug-ins, and whether they load"
    parser.add_argument("--version", action=_Version, nargs=0, const={"-v", "--verbose"} & {*words}, help=text)
    if "--print-completion" in words:
        import shtab

        shtab.add_argument_to(parser, "--print-completion")
    else:
        parser.add_argument("--print-completion", metavar="SHELL", help="print completions for bash, zsh or tcsh, and exit")
    sub = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for name, (_, groups, text) in COMMANDS.items():
        p = sub.add_parser(name, parents=[common], help=text, description=text, allow_abbrev=False)
        for add in groups:
            add(p)
    return parser


class _Version(argparse.Action):
    """``--version``; the version is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"tapestry {version()}")
        if self.const:
            print(*plugin_list.lines(), sep="\n")
        parser.exit()


def _reading(args: argparse.Namespace) -> AbstractContextManager[None]:
    """The net under commands that read a build: its plan may be one that nobody verified."""
    return unusable(str(args.build)) if hasattr(args, "build") else nullcontext()


def _failed(e: TapestryError, text: str, out: TextIO | None) -> int:
    """Say an error, to ``out`` as a document."""
    print(text, file=sys.stderr)
    if out is not None:
        kind, parts = type(e).__name__, {k: getattr(e, k) for k in ("what", "where", "pointer", "why", "hint")}
        arguments.print_json({"error": e.text(), "kind": kind, **parts}, out)
    return e.status


def _look(args: argparse.Namespace) -> None:
    """Say that a file is not there before anything heavy is imported.

    Raises:
        TapestryError: as who reads it would.
    """
    build, model = getattr(args, "build", None), getattr(args, "model", None)
    if isinstance(build, Path) and not os.path.lexists(build):
        hint = "tapestry compile MODEL -o BUILD"
        raise BuildError("not a build directory: there is no such folder", where=str(build), hint=hint)
    if isinstance(model, Path) and not os.path.lexists(model):
        raise ModelError("cannot read the model", where=str(model), why="No such file or directory", hint="check the path")


def _leave(status: int) -> int:
    """End at once: a failed run is over within two seconds, of which tearing down torch would take one or more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
