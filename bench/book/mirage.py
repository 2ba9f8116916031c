"""The six programs of Mirage's evaluation: kernels and bytes of our plans beside those of the graphs that Mirage found.

    .venv/bin/python -m bench mirage

The programs, at batch size 1 and in half precision, are those of `benchmark/*.py` in github.com/mirage-project/mirage. What
Mirage found is published there, too, as `benchmark/saved_mugraphs/*.json`; ``PUBLISHED`` was counted from those files at
commit de8745d: of all graphs in a file that with the fewest kernels, then the fewest bytes that its kernels read and write in
device memory. Mirage's softmax has no maximum, ours has. Writes bench/results/mirage.json; exits 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

import onnx
from onnx import TensorProto
from rich.console import Console
from rich.table import Table

from bench.book.rule_graphs import Net
from bench.book.rules import counted
from bench.support import record
from bench.support.record import Row
from tapestry import api

FOLDER = record.WORK / "mirage"
TOPOLOGY = "a100-pcie"
PUBLISHED: Mapping[str, tuple[str, int, int]] = {  # file, kernels, bytes
    "gqa": ("gqa_bs1", 2, 3_293_184),
    "qk_norm": ("qknorm_gqa_bs1", 3, 23_199_744),
    "rms_norm": ("rmsnorm_bs1", 1, 50_372_608),
    "lora": ("lora", 1, 2_375_680),
    "gated_mlp": ("gated_mlp", 1, 67_239_936),
    "norm_transformer": ("ntrans_bs1", 1, 262_144),
}


class Half(Net):
    """A graph whose inputs are in half precision."""

    def half(self, name: str, *shape: int) -> str:
        return self.input(name, *shape, dtype=TensorProto.FLOAT16)

    def rms(self, x: str, size: int) -> str:
        """RMSNorm over the last dimension, without a gain, computed in single precision as Mirage's reference does."""
        wide = self.op("Cast", x, to=TensorProto.FLOAT)
        mean = self.op("ReduceMean", self.op("Mul", wide, wide), self.ints(-1), keepdims=1)
        scale = self.op("Reciprocal", self.op("Sqrt", self.op("Add", mean, self.scalar(1e-6))))
        return self.op("Cast", self.op("Mul", wide, scale), to=TensorProto.FLOAT16)

    def attend(self, q: str, k: str, v: str) -> str:
        return self.mm(self.op("Softmax", self.mm(q, k), axis=-1), v)

    def finished(self, out: str) -> onnx.ModelProto:
        return self.model(out, dtype=TensorProto.FLOAT16)


def gqa() -> onnx.ModelProto:
    n = Half("gqa")
    return n.finished(n.attend(n.half("q", 2, 256, 64), n.half("k", 2, 64, 4096), n.half("v", 2, 4096, 64)))


def qk_norm() -> onnx.ModelProto:
    n = Half("qk_norm")
    q, k, v = n.half("q", 2, 256, 64), n.half("k", 2, 64, 4096), n.half("v", 2, 4096, 64)
    return n.finished(n.attend(n.rms(q, 64), k, n.rms(v, 64)))


def rms_norm() -> onnx.ModelProto:
    n = Half("rms_norm")
    return n.finished(n.mm(n.rms(n.half("x", 2, 4096), 4096), n.half("w", 4096, 6144)))


def lora() -> onnx.ModelProto:
    n = Half("lora")
    x, w, a, b = n.half("x", 16, 256), n.half("w", 256, 4096), n.half("a", 256, 16), n.half("b", 16, 4096)
    return n.finished(n.op("Add", n.mm(x, w), n.mm(n.mm(x, a), b)))


def gated_mlp() -> onnx.ModelProto:
    n = Half("gated_mlp")
    x, gate, up = n.half("x", 8, 4096), n.half("gate", 4096, 4096), n.half("up", 4096, 4096)
    g = n.mm(x, gate)
    return n.finished(n.op("Mul", n.op("Mul", g, n.op("Sigmoid", g)), n.mm(x, up)))


def norm_transformer() -> onnx.ModelProto:
    n = Half("norm_transformer")
    h, x, alpha = (n.half(c, 8, 4096) for c in ("h", "x", "alpha"))
    step = n.op("Mul", alpha, n.op("Add", n.rms(h, 4096), x))
    return n.finished(n.rms(n.op("Add", x, step), 4096))


GRAPHS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    f.__name__: f for f in (gqa, qk_norm, rms_norm, lora, gated_mlp, norm_transformer)
}


def measure(name: str) -> Row:
    """One program."""
    path = FOLDER / f"{name}.onnx"
    onnx.save(GRAPHS[name](), path)
    file, kernels, nbytes = PUBLISHED[name]
    sides = {key: api.compile(path, devices=1, topology=TOPOLOGY, rules=r) for key, r in (("without", ()), ("with", "algebra"))}
    checked = api.run_checked(sides["with"], sides["with"].random_feeds(0), check=True)[1]
    ours = {key: {k: v for k, v in counted(b).items() if k != "objective_s"} for key, b in sides.items()}
    return {"program": name, "ours": ours["with"], "without_book": ours["without"], "moves": list(sides["with"].build.moves),
            "mirage": {"file": file, "kernels": kernels, "bytes": nbytes}, "passed": checked["passed"]}  # fmt: skip


def main() -> int:
    """Measure, print and record."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [measure(name) for name in GRAPHS]
    table = Table(title="Programs of Mirage's evaluation: ours, and what Mirage found", title_justify="left")
    for c in ("program", "kernels", "Mirage's", "MB", "Mirage's ", "moves"):
        table.add_column(c, justify="left" if c in ("program", "moves") else "right")
    for r in rows:
        ours, theirs = r["ours"], r["mirage"]
        moves = " ".join(dict.fromkeys(m.partition("@")[0] for m in r["moves"]))
        sizes = (f"{side['bytes'] / 1e6:.3f}" for side in (ours, theirs))
        table.add_row(r["program"], str(ours["kernels"]), str(theirs["kernels"]), *sizes, moves)
    Console(width=140).print(table)
    record.write("mirage", rows)
    return 0 if all(r["passed"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
