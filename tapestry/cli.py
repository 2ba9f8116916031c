"""The ``tapestry`` command. Exit status: 0 done; 1 a check failed; 2 the user's input, with a message."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tapestry import arguments
from tapestry.errors import BuildError, LawError, RunError, TapestryError, refusing

Command = Callable[[argparse.Namespace], int]


def main(argv: list[str] | None = None) -> int:
    """Run a command; never a traceback for what the user can mend."""
    args = _parser().parse_args(argv)
    level = logging.ERROR if args.quiet else logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    try:
        with _reading(args):
            return int(args.command(args))
    except RunError as e:
        return _failed(args, e, 1) if argv is not None else _leave(_failed(args, e, 1))
    except LawError as e:
        return _failed(args, e, 1)
    except TapestryError as e:
        return _failed(args, e, 2)
    except MemoryError:
        return _failed(args, TapestryError("out of memory", hint="a smaller --shape, or more memory"), 2)
    except BrokenPipeError:  # the reader of our output went away
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (nothing must be written to the pipe at exit)
        return 141
    except OSError as e:
        return _failed(args, TapestryError(e.strerror or str(e), where=str(e.filename or "")), 2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _reading(args: argparse.Namespace) -> AbstractContextManager[None]:
    """The net under commands that read a build: its plan may be one that nobody verified."""
    if not hasattr(args, "build"):
        return nullcontext()
    what, hint = "the build cannot be used", "tapestry verify, and compile the model again; if that does not help, it is a bug"
    return refusing(BuildError, what, str(args.build), hint)


def _failed(args: argparse.Namespace, e: TapestryError, status: int) -> int:
    print(f"tapestry {args.name}: {e}", file=sys.stderr)
    if args.json:
        _json({"error": str(e), "kind": type(e).__name__, "what": e.what, "where": e.where, "why": e.why, "hint": e.hint})
    return status


def _leave(status: int) -> int:
    """End at once: a failed run is over within two seconds, of which tearing down torch would take one or more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _json(document: Any) -> None:
    import json
    import math

    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return [plain(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    print(json.dumps(plain(document), indent=1))


# commands


def _compile(args: argparse.Namespace) -> int:
    from tapestry import api
    from tapestry.interrupt import Interrupts
    from tapestry.viz import progress, tables

    interrupts = Interrupts()
    with interrupts.listening(), progress.stages(quiet=args.quiet or args.json) as show:

        def report(stage: str, seconds: float) -> None:
            interrupts.stage(stage)
            show(stage, seconds)

        build = api.compile(
            args.model, mesh=_mesh(args), topology=args.topology, shapes=_shapes(args.shape), memory=args.memory,
            target=args.target, precision=args.precision, pins=args.pin, layouts=args.layout, rules=args.rules,
            weights=not args.no_weights,
            time_limit=args.time_limit, seed=args.seed, pareto=args.pareto, progress=report,
            exact=args.exact, sharding=not args.ignore_sharding, resume=args.resume, interrupt=interrupts.asked,
            stages=args.stages, micro_batches=args.micro_batches,
        )  # fmt: skip
        report("write", 0.0)
        build.save(args.output)
    if build.report["search"]["interrupted"]:
        gap = build.report["gap"]
        print(f"interrupted: the plan is the best so far, gap {gap:.2%}; go on with --resume {args.output}", file=sys.stderr)
    if args.json:
        _json(build.report)
    elif not args.quiet:
        tables.show(tables.compiled(build.report))
        print(f"build {args.output}, kernels in {args.output / 'kernels'}")
    return 0


def _mesh(args: argparse.Namespace) -> Any:
    from tapestry.pipeline import mesh_of

    return mesh_of(args.devices, args.mesh)


def _shapes(items: list[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    for item in items:
        name, eq, value = item.rpartition("=")
        if not eq or not name:
            raise TapestryError(f"'{item}' is not symbol=size", where="--shape", hint="batch=8, or input=8x3x224x224")
        out[name] = value
    return out


def _run(args: argparse.Namespace) -> int:
    import numpy as np

    from tapestry import api
    from tapestry.viz import progress, tables

    if arguments.by_ranks(args):
        if args.library:
            raise TapestryError("a run by ranks uses no vendor library", where="--library", hint="leave it out")
        return _run_processes(args)
    compiled = api.load(args.build)
    compiled.libraries = args.library
    feeds = compiled.random_feeds(args.seed)
    for item in args.input:
        name, eq, file = item.rpartition("=")
        if not eq:
            raise TapestryError(f"'{item}' is not name=file.npy", where="--input")
        try:
            feeds[name] = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as e:
            raise TapestryError(f"not an array: {e}", where=file, hint="a .npy file written by numpy.save") from None
    with progress.bar("run", quiet=args.quiet or args.json) as report:
        result, document = api.run_checked(compiled, feeds, check=args.check, progress=report)
    if args.output:
        from tapestry.runtime.outputs import write

        write(args.output, result.outputs)
    if args.json:
        _json(document)
    elif not args.quiet:
        tables.show(tables.ran(document))
    return 0 if document["passed"] else 1


def _run_processes(args: argparse.Namespace) -> int:
    from tapestry import launch
    from tapestry.viz import progress, tables

    request = launch.request(args)
    with progress.bar("run", quiet=args.quiet or args.json) as report:
        how = launch.Launch(
            processes=1 if args.processes is None else args.processes, restarts=args.max_restarts, port=args.port,
            check=args.check, progress=report, tell=lambda text: print(f"tapestry run: {text}", file=sys.stderr),
        )  # fmt: skip
        document = launch.run(request, how)
    if args.json:
        _json(document)
    elif not args.quiet:
        tables.show(tables.ran_on_processes(document))
    return 0 if document["passed"] else 1


def _shard_weights(args: argparse.Namespace) -> int:
    from tapestry import launch

    done = launch.shard_weights(args.build, args.output)
    if args.json:
        _json(done)
    elif not args.quiet:
        print(f"{args.output}: {done['slices']} slices in {done['files']} files, {sum(done['bytes']):,} bytes")
    return 0


def _explain(args: argparse.Namespace) -> int:
    from tapestry.build import store
    from tapestry.viz import build_diff, explain, trace

    if args.analyze:
        return _analyze(args)
    if args.processes:
        raise TapestryError("nothing is run", where="--processes", hint="--analyze runs the build")
    build, _ = store.read(args.build)
    other = store.read(args.diff)[0] if args.diff else None
    timed = explain.schedule(build)
    found = explain.document(build, why=args.why, timed=timed)
    text = explain.text(build, found, critical=args.critical_path)
    if other is not None:
        found["diff"] = build_diff.compare(build, other, found)
        text = build_diff.text(found["diff"])
    if args.trace:
        found["trace"] = {"file": str(args.trace), **trace.write(args.trace, build.plan, timed)}
        text += explain.trace_text(found["trace"])
    if args.json:
        _json({**build.report, **found, "text": text})
    else:
        print(text, end="")
    return 0


def _analyze(args: argparse.Namespace) -> int:
    from tapestry import launch
    from tapestry.viz import measured

    build, found = launch.analyze(args.build, args.processes, args.trace)
    if args.json:
        _json({**build.report, "analysis": found})
    else:
        print(measured.text(found), end="")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from tapestry.pipeline import verify_build

    build, laws = verify_build(args.build)
    if args.json:
        _json({"model": build.model, "passed": True, "laws": laws})
    elif not args.quiet:
        print(f"{args.build}: {sum(laws.values()):,} checks of {len(laws)} laws, all hold")
        for name, count in laws.items():
            print(f"  {name:18} {count:>10,}")
    return 0


def _kernels(args: argparse.Namespace) -> int:
    from tapestry.pipeline import emit_kernels
    from tapestry.viz import progress

    with progress.bar("kernels", quiet=args.quiet or args.json) as report:
        document = emit_kernels(args.build, args.output, args.target, report)
    if args.json:
        _json(document)
    elif not args.quiet:
        from tapestry.viz import kernel_table

        kernel_table.show(document)
    return 0


def _tune(args: argparse.Namespace) -> int:
    from tapestry import api
    from tapestry.viz import progress, tables

    with progress.bar("tune", quiet=args.quiet or args.json) as report:
        done = api.tune(
            args.build, libraries=args.library, again=args.again, time_limit=args.time_limit, seed=args.seed, progress=report
        )
    if args.json:
        _json(done)
    elif not args.quiet:
        tables.show(tables.tuned(done))
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    from tapestry import flags

    flags.before_torch()
    from tapestry.runtime import calibrate

    document = calibrate.from_trace(args.from_trace) if args.from_trace else calibrate.calibrate(args.threads)
    calibrate.write(args.output, document)
    if args.json:
        _json(document)
    elif not args.quiet:
        print(f"{args.output}: use it as --topology {args.output}")
    return 0


def _opt(args: argparse.Namespace) -> int:
    import tapestry.rewrites  # noqa: F401
    from tapestry.ir import laws as constraints
    from tapestry.ir.syntax.parser import parse
    from tapestry.ir.syntax.printer import to_text
    from tapestry.rewrites.core.rule import apply_moves, parse_move
    from tapestry.rewrites.equations.registry import load_rules

    for path in args.rules:
        load_rules(path)
    try:
        graph = parse(sys.stdin.read(), "-") if str(args.graph) == "-" else parse(args.graph.read_text(), str(args.graph))
    except UnicodeDecodeError as e:
        raise TapestryError(f"not text: {e}", where=str(args.graph)) from None
    laws = constraints.check(graph)
    between = []
    for text in args.rule:
        graph = apply_moves(graph, [parse_move(text)])
        laws = constraints.check(graph)
        between.append({"move": text, "graph": to_text(graph)})
        if args.print_between and not args.json:
            print(f"# after {text}\n{to_text(graph)}")
    if args.json:
        _json({"graph": to_text(graph), "laws": laws, **({"between": between} if args.print_between else {})})
    elif not (args.print_between and args.rule):
        print(to_text(graph), end="")
    return 0


def _rules(args: argparse.Namespace) -> int:
    import inspect

    import tapestry.rewrites  # noqa: F401
    from tapestry.rewrites.core.rule import RULES, Refusal
    from tapestry.rewrites.equations.registry import load_rules

    for path in args.rules:
        load_rules(path)
    if args.rule is not None and args.rule not in RULES:
        raise TapestryError(f"there is no rule '{args.rule}'", hint=f"one of {', '.join(sorted(RULES))}")
    chosen = [RULES[args.rule]] if args.rule else list(RULES.values())
    if args.refused:
        from tapestry.lift import lift
        from tapestry.rewrites.core.fixpoint import simplify

        graph = simplify(lift(args.refused, _shapes(args.shape), weights=False).graph)
        found = [str(m) for r in chosen for m in r.find(graph) if isinstance(m, Refusal)]
        if args.json:
            _json({"refused": found})
        else:
            print("\n".join(found) if found else "no rule was refused")
        return 0
    rows = [{"name": r.name, "kind": r.kind, "doc": inspect.getdoc(type(r)) or ""} for r in chosen]
    if args.json:
        _json({"rules": rows})
    for r in [] if args.json else rows:
        print(f"{r['name']} ({r['kind']})\n    {r['doc'] if args.rule else r['doc'].splitlines()[0]}\n")
    return 0


def _export(args: argparse.Namespace) -> int:
    from tapestry.build import store
    from tapestry.sharding.export_sharding import export

    build, _ = store.read(args.build)
    done = export(build, args.output, copy=args.copy_data)
    if args.json:
        _json(done)
    elif not args.quiet:
        print(f"{args.output}: {done['specs']} sharding specs over {done['devices']} devices, IR version {done['ir_version']}")
        print(f"  results of the plan that have an ONNX name: {done['outputs']} of {done['tensors']}")
        print(f"  cut reductions, completed as the nodes' 'tapestry.partial' says: {done['partial']}")
    return 0


def _check_sharding(args: argparse.Namespace) -> int:
    from tapestry.sharding.check_sharding import check_file

    found = check_file(args.model, _shapes(args.shape))
    errors = [f for f in found if f.level == "error" or (args.strict and f.code != "no-annotations")]
    if args.json:
        rows = {k: [asdict(f) for f in found if (f in errors) == (k == "errors")] for k in ("errors", "warnings")}
        _json({"model": str(args.model), "passed": not errors, **rows})
        return 1 if errors else 0
    for f in found:
        if f in errors or not args.quiet:
            print(f)
    if not args.quiet:
        print(f"{args.model}: {len(errors)} errors, {len(found) - len(errors)} warnings")
    return 1 if errors else 0


def _doctor(args: argparse.Namespace) -> int:
    from tapestry.lift.examine import examine
    from tapestry.viz import doctor

    found = examine(args.model, _shapes(args.shape))
    document = doctor.document(args.model, found)
    if args.json:
        _json(document)
    else:
        print(doctor.text(document, all_nodes=args.verbose), end="")
    return 1 if document["unsupported"] else 0


def _auto_shard(args: argparse.Namespace) -> int:
    from tapestry.sharding.auto_shard import auto_shard
    from tapestry.viz import progress, stage_table, tables

    options = auto_shard.Options(
        model=args.input_model, devices=args.num_devices, output=args.output_model, optimal=args.optimal_perf,
        processes=args.num_processes, proportions=args.memory_proportion or auto_shard.PROPORTIONS, shapes=_shapes(args.shape),
        topology=args.topology, memory=args.memory,
    )  # fmt: skip
    with progress.bar("auto-shard", quiet=args.quiet or args.json) as advance:
        document = auto_shard.auto_shard(options, lambda stage, seconds: advance(None, None, stage))
    if args.json:
        _json(document)
    elif not args.quiet:
        tables.show(stage_table.sharded(document))
    return 0


def _fuzz(args: argparse.Namespace) -> int:
    from tapestry import flags

    flags.before_torch()
    from tapestry.fuzz import campaign
    from tapestry.viz import progress

    if args.jobs is not None or args.log:
        from tapestry.fuzz import series

        what = series.Series(
            seed=args.seed, first=args.first, count=args.count, jobs=args.jobs or 1, log=args.log, limit=args.time,
            output=args.output,
        )  # fmt: skip
        with progress.bar("fuzz", quiet=args.quiet or args.json) as report:
            document = series.run(what, report)
        _json(document) if args.json else print(series.summary(document))
        return 0 if document["passed"] else 1
    with progress.bar("fuzz", quiet=args.quiet or args.json) as report:
        tally = campaign.fuzz(
            args.seed, args.count, first=args.first, limit=args.time, output=args.output, progress=report, stop=args.stop
        )
    if args.json:
        _json(tally.document())
    elif not args.quiet:
        print(campaign.text(tally), end="")
    return 1 if tally.failures else 0


# arguments


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--json", action="store_true", help="one JSON document on standard output, everything else on standard error"
    )
    common.add_argument("-q", "--quiet", action="store_true")
    common.add_argument("-v", "--verbose", action="store_true")
    parser = argparse.ArgumentParser(prog="tapestry", description="ONNX models to verified, sharded plans and Triton kernels")
    sub = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        p = sub.add_parser(name, parents=[common], help=text, description=text)
        p.set_defaults(command=command)
        return p

    arguments.compile(add("compile", _compile, "find, verify and write a plan"))
    p = add("run", _run, "run a plan (random inputs when none are given)")
    arguments.run(p)
    arguments.processes(p)
    arguments.checked(p)
    p = add("shard-weights", _shard_weights, "weights cut as the plan cuts them, a safetensors file per device")
    p.add_argument("build", type=Path)
    p.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    arguments.explain(add("explain", _explain, "the plan as a person reads it"))
    add("verify", _verify, "re-check every law from the files alone").add_argument("build", type=Path)
    p = add("kernels", _kernels, "readable Triton source, compiled objects, a resource table")
    p.add_argument("build", type=Path)
    p.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    p.add_argument("--target", default="triton:sm90", help="triton:sm80, triton:sm90, triton:sm100 or triton:gfx942")
    arguments.tune(add("tune", _tune, "measure the kernels' knobs on this machine's GPU, for every later run"))
    p = add("export", _export, "the plan as multi-device annotations of the ONNX model")
    p.add_argument("build", type=Path)
    p.add_argument("-o", "--output", type=Path, required=True, metavar="SHARDED.onnx")
    p.add_argument("--copy-data", action="store_true", help="copy external data that would be out of reach")
    p = add("check-sharding", _check_sharding, "whether a model's multi-device annotations are right")
    p.add_argument("model", type=Path)
    p.add_argument("--shape", action="extend", nargs="+", default=[], metavar="SYMBOL=SIZE")
    p.add_argument("--strict", action="store_true", help="warnings (implied communication, uneven parts) fail as well")
    arguments.calibrate(add("calibrate", _calibrate, "measure this machine and write a topology file"))
    arguments.doctor(add("doctor", _doctor, "what splits, what is opaque, unbound or unsupported; -v lists every node"))
    p = add("opt", _opt, "apply rules to IR text")
    p.add_argument("graph", type=Path, help="a file of IR text, or -")
    p.add_argument("-r", "--rule", action="append", default=[], metavar="MOVE", help="split@y{dim=n,parts=8,to=mesh.d0}")
    p.add_argument("--print-between", action="store_true")
    p.add_argument("--rules", action="append", type=Path, default=[], metavar="FILE", help="rules of your own")
    arguments.rules(add("rules", _rules, "the rules, with before and after"))
    arguments.fuzz(add("fuzz", _fuzz, "random models under random plans against onnxruntime and the ONNX reference evaluator"))
    arguments.auto_shard(add("auto-shard", _auto_shard, "pipeline stages for the nodes of an ONNX file"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
