"""The launcher on a GPU that is not there (``tests/support/gpu_stand_in``), and ceilings of what real kernels take."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tapestry.codegen.triton.run import machine_code
from tests.support.paths import ROOT, SHARED

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the stand-in is compiled with cc")


def check(*args: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.programs.stand_in_checks", *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), done.stdout[-1000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_stand_in_keeps_the_drivers_rules() -> None:
    check("rules")


@pytest.mark.slow
def test_a_candidate_that_does_not_run_ends_nothing() -> None:
    assert "does not run here (out of resource: shared memory" in check("fallback")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100"])
@pytest.mark.parametrize(("dtype", "name"), [
    ("f16", "bert_base"), ("bf16", "gpt2"), ("f16", "llama_7b 2048"), ("bf16", "llama_7b 8192"), ("f16", "llama_layer 2048"),
    ("f16", "llama_layer 8192"), ("bf16", "vit_base"), ("f16", "unet"), ("bf16", "resnet50"),
])  # fmt: skip
def test_real_models_are_bound_and_launched(target: str, dtype: str, name: str) -> None:
    """Every kernel at its real size by the GPU runtime; and none spills or is serialised."""
    if not (SHARED / "models").is_dir() and name.split(maxsplit=1)[0] != "llama_layer":
        pytest.skip("the exported models are not beside the checkout")
    assert re.findall(r"^faults: (\d+)", check("models", target, dtype, name), re.MULTILINE) == ["0"]


LISTING = """
.text.y:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, [R2.64] ;
        /*0020*/                   LDG.E.128 R8, [R2.64+0x10] ;
        /*0030*/               @P1 LDG.E.64 R12, [R2.64+0x20] ;
{filler}
        /*0040*/                   HMMA.16816.F32 R16, R4, R8, R16 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0070*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0080*/              @!P0 BRA `(.L_x_2) ;
        /*0090*/                   BRA `(.L_x_1) ;
"""


def test_loads_are_read_from_a_listing() -> None:
    filler = "\n".join("        /*0035*/                   IADD3 R20, R20, 0x1, RZ ;" for _ in range(14))
    lines = machine_code.read_disassembly(LISTING.replace("{filler}", filler))
    assert machine_code.thread_loads(lines) == 16 + 16 + 8, "all three are under way until the product takes two of them"
    copies = [machine_code.Line(*x) for x in (("LDGSTS.E.128", " [R1], [R2.64]"), ("LDGDEPBAR", ""))]
    wait = machine_code.Line("DEPBAR.LE", " SB0, 0x1")
    assert machine_code.thread_loads([*copies, *copies, wait, *copies]) == 32
    assert machine_code.thread_loads([*copies, *copies, *copies, wait]) == 48


def test_messages_of_the_assembler_are_kept() -> None:
    said = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in function 'y'\n"
    assert machine_code.messages(2 * said) == ("C7515 wgmma.mma_async instructions are serialized due to x",)
    assert machine_code.messages("ptxas info    : Used 42 registers, used 1 barriers") == ()
