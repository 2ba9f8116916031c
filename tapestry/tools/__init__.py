"""Programs that use the compiler, and the table of what they offer, by kind; a module is imported when it is asked for.

None of the compiler's modules imports a program, and none of them another one: who needs something asks for an object of a
kind, with `plugins.tool`. Where a module's object is a dictionary, the names are its keys.
"""

from __future__ import annotations

from collections.abc import Mapping

OFFERED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Command": {
        "compare": ("tapestry.tools.compare.side_by_side", "side_by_side"),
        "view": ("tapestry.tools.viewer", "view"),
        "export": ("tapestry.tools.exports", "export"),
        "tiles": ("tapestry.tools.tiling", "tiles"),
        "prove": ("tapestry.tools.prove", "prove"),
        "auto-shard": ("tapestry.tools.auto_shard.command", "auto_shard"),
        "rule laboratory": ("tapestry.tools.rulebook", "laboratory"),
    },
    "ExportFormat": dict.fromkeys(
        ("onnx", "onnx-ranks", "onnx-fused", "tp-plan", "dtensor", "jax", "json", "kernels", "ir", "history"),
        ("tapestry.tools.exports.formats", "FORMATS"),
    ),
    "KernelEvidence": {"": ("tapestry.tools.kernel_proofs.build_kernels", "prove_kernels")},
    "OtherOrder": {"": ("tapestry.tools.schedules", "run_in_any_order")},
    "Pages": {"": ("tapestry.tools.viewer.shown", "")},
    "Pictures": {"": ("tapestry.tools.viewer.pictures", "")},
    "Sessions": {"": ("tapestry.tools.sessions.held_session", "Session")},
}
"""Module and object by kind and name; an object without a name is the module itself."""
