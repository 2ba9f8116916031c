"""StableHLO texts with Shardy's words, compiled by XLA for host devices and run: ``python sdy_runs.py FOLDER``, with jax.

For each NAME.mlir of the folder NAME.npz has its arguments (``0``, ``1``, …); NAME.out.npz gets its results.
"""

from __future__ import annotations

import os
import re
import sys
from math import prod
from pathlib import Path

import numpy as np


def places(text: str, mesh):
    """The shardings that a piece of text says, one after another."""
    from jax.sharding import NamedSharding, PartitionSpec

    for m in re.finditer(r"#sdy\.sharding<@mesh, \[(.*?)\]>", text):
        yield NamedSharding(mesh, PartitionSpec(*(tuple(re.findall('"(.*?)"', c)) for c in re.findall(r"\{(.*?)\}", m[1]))))


def run(text: str, arguments):
    """The results."""
    import jax
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax.sharding import Mesh
    from jaxlib.mlir import ir

    axes = {a: int(n) for a, n in re.findall(r'"(.*?)"=(\d+)', re.search(r"sdy\.mesh @mesh = <\[(.*?)\]>", text)[1])}
    devices = jax.devices()[: prod(axes.values())]
    mesh = Mesh(np.array(devices).reshape(list(axes.values())), list(axes))
    context, client = mlir.make_ir_context(), devices[0].client
    with context, ir.Location.unknown(context):
        options = compiler.get_compile_options(1, len(devices), np.arange(len(devices))[None], backend=client)
        some = xla_client.DeviceList(tuple(devices))
        program = compiler.backend_compile_and_load(client, ir.Module.parse(text), some, options, [])
    before, _, after = text.partition(") -> (")
    given = [jax.device_put(a, s) for a, s in zip(arguments, places(before, mesh), strict=True)]
    found = program.execute_sharded(given).disassemble_into_single_device_arrays()
    types = re.findall(r"tensor<((?:\d+x)*)\w+> \{sdy", after.split("{\n", 1)[0])
    shapes = [tuple(int(n) for n in t.split("x") if n) for t in types]
    ends = places(after.split("{\n", 1)[0], mesh)
    return [
        np.asarray(jax.make_array_from_single_device_arrays(shape, s, parts))
        for shape, s, parts in zip(shapes, ends, found, strict=True)
    ]


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    for path in sorted(Path(sys.argv[1]).glob("*.mlir")):
        data = np.load(path.with_suffix(".npz"))
        done = run(path.read_text(), [data[str(k)] for k in range(len(data.files))])
        np.savez(path.with_suffix(".out.npz"), *done)
