"""One process of bench/speed/gpu.py: the rows of a section, each written as soon as it is known.

python -m bench gpu_section SECTION MODEL ROWS.jsonl SECONDS MODE TUNE
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch

from bench.speed import gpu_cases
from bench.speed.gpu import Rows
from bench.speed.gpu_cases import Case
from bench.speed.gpu_models import Whole, wholes
from tapestry import api
from tapestry.codegen.kernel_sources import distinct_kernels
from tapestry.codegen.torch_cpu.kernels import from_numpy, to_numpy
from tapestry.codegen.triton.run.device_target import TritonTarget
from tapestry.codegen.triton.run.local_gpu import find_device
from tapestry.codegen.triton.run.tuned import Choice, Tuned
from tapestry.runtime.one_process.gpu_devices import GpuExecutor
from tapestry.runtime.session import Session

HERE = find_device()
TINY = HERE.type == "cpu"
Row = dict[str, Any]
Tensor = torch.Tensor
FLOATS_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
COPY = 1 << 30  # bytes of the copy whose bandwidth the rows are held against


def timer() -> Callable[[Callable[[], object]], float]:
    """Medians with a cold L2 cache; in the interpreter there is no time."""
    from tapestry.codegen.triton.run.tune import cuda_timer

    return cuda_timer(HERE, budget=0.1)


class Ours:
    """A model compiled by us for one device, its inputs and result on the GPU."""

    def __init__(self, model: onnx.ModelProto, tuned: Tuned | None = None) -> None:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "model.onnx"
        onnx.save(model, path)
        self.compiled = api.compile(path, target="triton", time_limit=5)
        build, constants = self.compiled.build, b"".join(self.compiled.constants.values())
        session = Session(build, constants, TritonTarget(HERE, tuned), partial(GpuExecutor, keep_inputs=True))
        self.executor: Any = session.executor
        self.graph, self.program = build.plan.graph, build.program

    def run(self, inputs: list[Tensor]) -> Tensor:
        """The result on the device; twice, so that what can be captured is."""
        bits = [x.view(torch.uint8) if x.dtype in FLOATS_OF_8_BITS else x for x in inputs]  # as buffers hold them
        given = dict(zip(self.graph.inputs, bits, strict=True))
        for _ in range(2):
            self.executor.run(lambda t, box: given[t])
        (out,) = self.program.outputs.values()
        return self.executor.array(0, out)


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value; infinite where one is NaN and the other not, or the shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    a, b = found.double(), wanted.double()
    if bool((a.isnan() != b.isnan()).any()):
        return float("inf")
    return float((a - b).abs().nan_to_num(0.0).max() / b.abs().nan_to_num(0.0).max().clamp_min(1e-30))


def rates(seconds: float, flops: float, moved: float) -> Row:
    """A time with what follows from it."""
    out: Row = {"ms": round(seconds * 1e3, 5)}
    return (
        out
        | ({"tflops": round(flops / seconds / 1e12, 1)} if flops else {})
        | ({"gbs": round(moved / seconds / 1e9, 1)} if moved else {})
    )


def peer_of(name: str, f: Callable[..., Tensor], mode: str = "max-autotune-no-cudagraphs") -> Callable[..., Tensor]:
    """The peer, compiled if its name says so; at tiny sizes torch.compile traces, and runs eagerly."""
    if not name.startswith("compile"):
        return f
    return torch.compile(f, backend="eager", dynamic=False) if TINY else torch.compile(f, mode=mode, dynamic=False)


def measured(case: Case, rows: Rows, tune: float, reference: Callable[..., Tensor] | None = None) -> Row:
    """A row: right first, then times."""
    generator = torch.Generator(device=HERE).manual_seed(time.time_ns() % (1 << 31))
    inputs = case.inputs(generator)
    ours = Ours(case.model)
    wanted = (reference or case.reference)(*inputs)
    off = error(ours.run(inputs), wanted)
    row: Row = {"passed": off <= case.tolerance, "error": off, "ops": len(ours.graph.ops)}
    row["not_captured"] = ours.executor.reasons
    if TINY:
        tried = {
            n: error(peer_of(n, f)(*inputs), wanted)
            for n, f in case.peers.items()
            if not (n in ("flash", "cudnn") and HERE.type == "cpu")
        }
        return row | {"peer_errors": tried if reference is None else {}}
    if not row["passed"]:
        return row
    clock, seconds = timer(), {}
    row["ours"] = row["default"] = rates(seconds.setdefault("ours", clock(ours.executor.replay)), case.flops, case.bytes)
    rows.add(case.name, row)
    row["peers"] = {}
    for name, f in case.peers.items():
        try:
            run = peer_of(name, f)
            got = run(*inputs)
            seconds[name] = clock(lambda run=run: run(*inputs))
            row["peers"][name] = {
                **rates(seconds[name], case.flops, case.bytes),
                "error": error(got, wanted) if reference is None else None,
            }
        except Exception as e:
            row["peers"][name] = {"failed": (str(e).splitlines() or [""])[0][:200]}
        rows.add(case.name, row)
    if tune > 0 and time.monotonic() + tune < rows.until and len(ours.graph.ops) == 1:
        row |= tuned(case, ours, inputs, wanted, tune, clock, seconds)
    best = min((s for n, s in seconds.items() if n != "ours"), default=None)
    return row | {"ratio": None if best is None else round(best / seconds["ours"], 3)}


def tuned(
    case: Case, ours: Ours, inputs: list[Tensor], wanted: Tensor, limit: float, clock: Any, seconds: dict[str, float]
) -> Row:
    """The fastest right knobs found within some seconds, if they beat the model's choice; ``seconds`` is brought up to date."""
    from tapestry.codegen.triton.run.tune import How, choose, local_candidates, measure

    ((kernel, _),) = distinct_kernels(ours.graph, ours.program).values()
    how = How(device=HERE, timer=clock, candidates=local_candidates(HERE))
    choice, found = choose(measure(ours.graph, kernel, how, limit))
    if choice.config is None:
        return {"tried": found["tried"], "refused": found["refused"]}
    again = Ours(case.model, lambda graph, kernel: Choice(config=choice.config))
    off = error(again.run(inputs), wanted)
    now = clock(again.executor.replay) if off <= case.tolerance else float("inf")
    more: Row = {"tried": found["tried"], "refused": found["refused"], "knobs": str(choice.config), "tuned_error": off}
    if now < seconds["ours"]:
        seconds["ours"] = now
        more["ours"] = rates(now, case.flops, case.bytes)
    return more


def dropout_reference(case: Case) -> Callable[..., Tensor]:
    """Our CPU target's result: the same random bits."""

    def run(*inputs: Tensor) -> Tensor:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            onnx.save(case.model, path)
            compiled = api.compile(path, time_limit=5)
            names = compiled.build.plan.graph.inputs
            found = compiled.run({n: to_numpy(x.cpu()) for n, x in zip(names, inputs, strict=True)})
        return from_numpy(found["y"]).to(HERE)

    return run


def cases(section: str) -> Iterator[tuple[Case, bool]]:
    """The cases of a section, and whether the reference is our CPU target."""
    if section == "rows":
        yield from ((c, False) for c in gpu_cases.rows(TINY))
        yield from ((c, True) for c, _ in gpu_cases.dropouts(TINY))
        return
    found = {"gemm": gpu_cases.gemms, "attention": gpu_cases.attentions, "conv": gpu_cases.convolutions}[section]
    yield from ((c, False) for c in found(TINY))


def bandwidth() -> Row:
    """Bytes per second of a copy on the device, read and written."""
    a = torch.randn(COPY // 4, device=HERE)
    b = torch.empty_like(a)
    return {"passed": True, "ours": rates(timer()(lambda: b.copy_(a)), 0.0, 2.0 * COPY)}


class Module(torch.nn.Module):
    """A whole model's torch side; weights are parameters, which CUDA graphs need not copy."""

    def __init__(self, whole: Whole) -> None:
        super().__init__()
        self.whole, self.names = whole, list(whole.weights)
        made = {n: torch.from_numpy(a).to(HERE) for n, a in whole.weights.items()}
        last = {n: a.contiguous(memory_format=torch.channels_last) if a.dim() == 4 else a for n, a in made.items()}
        self.held = torch.nn.ParameterDict({_plain(n): torch.nn.Parameter(a, requires_grad=False) for n, a in last.items()})

    def forward(self, x: Tensor) -> Tensor:
        return self.whole.run({n: self.held[_plain(n)] for n in self.names}, x)


def _plain(name: str) -> str:
    return name.replace(".", "__")


def whole_model(name: str, rows: Rows, mode: str) -> None:
    """One model: ours beside torch.compile."""
    label = name if TINY else f"{name} ({mode})"
    rows.known.discard(label)

    def work() -> Row:
        whole = wholes(TINY)[name]()
        x = whole.make(torch.Generator(device=HERE).manual_seed(time.time_ns() % (1 << 31)))
        module = Module(whole)
        with torch.no_grad():
            wide = {n: module.held[_plain(n)] for n in whole.weights}
            wanted = whole.run(
                {n: w.float() if w.is_floating_point() else w for n, w in wide.items()},
                x.float() if x.is_floating_point() else x,
            )
            ours = Ours(whole.model)
            off = error(ours.run([x]), wanted)
            row: Row = {
                "passed": off <= 2e-2,
                "error": off,
                "ops": len(ours.graph.ops),
                **ours.executor.described(),
                "mode": mode,
            }
            if TINY:
                return row | {"peer_error": error(peer_of("compile", module)(x), wanted)}
            if not row["passed"]:
                return row
            clock = timer()
            seconds = clock(ours.executor.replay)
            row["ours"] = rates(seconds, whole.flops, 0.0)
            rows.add(label, row)
            torch._dynamo.mark_static_address(x)
            peer = peer_of("compile", module, mode)
            got = peer(x).clone()
            theirs = clock(lambda: peer(x))
            row["peers"] = {f"torch.compile {mode}": {**rates(theirs, whole.flops, 0.0), "error": error(got, wanted)}}
            return row | {"ratio": round(theirs / seconds, 3)}

    rows.each(label, work)


def main() -> int:
    section, name, path, seconds, mode, tune = sys.argv[1:]
    rows = Rows(section, Path(path), float(seconds))
    torch.backends.cudnn.benchmark = True
    if section == "models":
        whole_model(name, rows, mode)
        return 0
    if section == "rows" and not TINY:
        rows.each("copy of 1 GiB", bandwidth)
    limit = float(tune) if section in ("gemm", "attention") else 0.0
    for case, by_us in cases(section):
        rows.each(
            case.name, lambda case=case, by_us=by_us: measured(case, rows, limit, dropout_reference(case) if by_us else None)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
