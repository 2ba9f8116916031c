"""What a user installs, tried as a user would: ``python -m tests.installed dist/tapestry-….whl [dist/tapestry-….tar.gz]``.

For each file a fresh environment is made outside the checkout, README's own lines install it there, without the development
set-up's constraints, and the commands are run from an empty folder. It ends with status 1 where one of them fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
MODULE = """
import tapestry, torch
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).eval()
plan = tapestry.compile(net, example_inputs=(torch.randn(32, 64),), devices=4, topology="cpu")
assert plan.check()["passed"]
plan.save("module.plan")
class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
    def forward(self, x):
        return self.down_proj(torch.nn.functional.gelu(self.up_proj(x)))
pins = ["*.up_proj:out=tp", "*.down_proj:in=tp"]
layers = torch.nn.Sequential(Mlp(), Mlp()).eval()
tapestry.compile(layers, (torch.randn(32, 64),), mesh="tp=2", topology="cpu", pins=pins).export("tp.json", "tp-plan", nearest=True)
"""
BACKEND = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).eval()
x = torch.randn(8, 64)
with torch.no_grad():
    assert torch.allclose(torch.compile(net, backend="tapestry")(x), net(x), atol=1e-4)
"""
WHERE = "import pathlib, sys, tapestry; sys.exit(pathlib.Path(tapestry.__file__).is_relative_to(sys.argv[1]))"
FORMATS = ("onnx", "onnx-ranks", "onnx-fused", "dtensor", "jax", "json", "ir", "history")
COMMANDS = [
    ["python", "-c", WHERE, str(TOP)],  # it is the installed one that runs
    ["tapestry", "--version"],
    ["python", "-m", "tapestry", "--version"],
    ["tapestry", "--print-completion", "bash"],
    ["python", str(TOP / "examples/layer.py"), "layer.onnx"],
    ["tapestry", "doctor", "layer.onnx"],
    ["tapestry", "compile", "layer.onnx", "-o", "layer.plan", "--mesh", "dp=2,tp=2", "--topology", "cpu"],
    ["tapestry", "run", "layer.plan", "--check"],
    ["tapestry", "run", "layer.plan", "--processes", "2", "--check"],
    ["torchrun", "--nproc-per-node", "2", "-m", "tapestry.runtime", "layer.plan", "--check"],
    ["tapestry", "verify", "layer.plan"],
    ["tapestry", "verify", "layer.plan", "--kernels"],
    ["tapestry", "explain", "layer.plan"],
    ["tapestry", "explain", "layer.plan", "--kernels"],
    ["tapestry", "view", "layer.plan", "-o", "layer.html"],
    ["tapestry", "kernels", "layer.plan", "-o", "kernels"],
    ["tapestry", "rules"],
    ["tapestry", "rules", "split"],
    ["tapestry", "rules", "--refused", "layer.onnx"],
    ["tapestry", "tiles", "--shape", "7x4", "--pattern", "5,1"],
    *(["tapestry", "export", "layer.plan", "--format", f, "-o", f"export-{f}"] for f in FORMATS),
    ["tapestry", "compile", "layer.onnx", "-o", "gpu.plan", "--devices", "2", "--target", "triton:sm90"],
    ["tapestry", "export", "gpu.plan", "--format", "kernels", "-o", "kernel_package"],
    ["python", "-c", MODULE],  # the tp-plan format, too
    ["tapestry", "verify", "module.plan"],
    ["python", "-c", BACKEND],
]


def install_lines(file: Path) -> list[str]:
    """README's lines under "Install", for a file of ours in the place of the one that they name."""
    text = (TOP / "README.md").read_text()
    block = re.search(r"tests/installed.py does.*?```sh\n(.*?)```", text, re.S)
    assert block is not None, "README has no block of install lines"
    lines = [line.partition(" #")[0].strip() for line in block[1].splitlines() if line.startswith("pip ")]
    assert any("dist/tapestry" in line for line in lines), lines
    return [re.sub(r"dist/tapestry-[^'\[]*", lambda _: str(file), line) for line in lines]


def tried(file: Path) -> int:
    """The number of commands that fail with one file installed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="tapestry-installed-") as scratch:
        place, empty = Path(scratch) / "venv", Path(scratch) / "empty"
        empty.mkdir()
        venv.create(place, with_pip=True)
        hidden = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PIP_CONSTRAINT", "VIRTUAL_ENV"}
        env = {k: v for k, v in os.environ.items() if k not in hidden} | {"PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
        for line in install_lines(file):
            print(f"$ {line}", flush=True)
            subprocess.run(["sh", "-c", line], cwd=empty, env=env, check=True, stdout=subprocess.DEVNULL)
        for command in COMMANDS:
            before = time.monotonic()
            done = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True)
            shown = " ".join(w if "\n" not in w else "…" for w in command).replace(str(TOP), "CHECKOUT")
            print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {time.monotonic() - before:5.1f} s  {shown}", flush=True)
            if done.returncode:
                failed += 1
                print(done.stdout[-2000:], done.stderr[-4000:], sep="\n")
    print(f"{file.name}: {len(COMMANDS) - failed} of {len(COMMANDS)} commands", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(1, sum(tried(Path(f).resolve()) for f in sys.argv[1:])))
