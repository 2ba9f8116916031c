"""What JAX's partitioner puts on the wire for a graph of ONNX nodes and the shardings of its ends.

Run as a script by an interpreter that has jax (`measure` does so), it needs nothing else: it reads cases as JSON from standard
input, builds each graph with jax's own operators, compiles it for 8 forced host devices and counts the collectives of the
compiled HLO. Wire bytes are those of ring algorithms: in a group of n, 2(n−1)·B for an all-reduce of B bytes per device,
(n−1)·B for an all-gather or all-to-all whose result has B bytes per device over all n devices together, n(n−1)·B for a
reduce-scatter with a result of B, and B per pair of different devices for a collective-permute.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

DEVICES = 8
Row = dict[str, Any]
Layout = Mapping[str, Mapping[str, list[str]]]
"""Tensor → dimension → mesh axes; no dimension at all is replicated, no tensor at all is free."""

BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8,
         "u64": 8}  # fmt: skip
KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
OTHERS = ("ragged-all-to-all", "collective-broadcast", "send", "recv")


# this side: another interpreter


def measure(cases: list[Row], python: str) -> Row:
    """Compile the cases with another interpreter's jax: ``{"versions": …, "cases": {name: {bytes, collectives}}}``."""
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [python, str(Path(__file__).resolve())], input=json.dumps(cases), capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{python} bench/planning/xla.py failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def available(python: str) -> bool:
    """Whether an interpreter has jax."""
    return subprocess.run([python, "-c", "import jax"], capture_output=True).returncode == 0


# counting


def collectives(hlo: str) -> list[Row]:
    """The collectives of compiled HLO text, with the bytes that all senders together put on the wire."""
    found = []
    computation = ""
    loops = set(re.findall(r"(?:body|condition)=%?([\w.-]+)", hlo))
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
            computation = head[1]
        m = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z-]+?)(-start)?\(", line)
        if not m or m[2] not in KINDS + OTHERS:
            continue
        if m[2] in OTHERS or m[3] or computation in loops:
            raise SystemExit(f"a collective that cannot be counted: {line.strip()[:300]}")
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", m[1])
        payload = sum(BYTES[t] * prod(int(d) for d in dims.split(",") if d) for t, dims in shapes)
        found.append({"kind": m[2], "payload_bytes": payload, "bytes": _wire(m[2], payload, line)})
    return found


def _wire(kind: str, payload: int, line: str) -> int:
    """Bytes on the wire, all senders together."""
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", re.search(r"source_target_pairs=\{(.*?\})\}", line)[1])  # type: ignore[index]
        return payload * sum(a != b for a, b in pairs)
    groups = _groups(line)
    per_group = {
        "all-reduce": lambda n: 2 * (n - 1) * payload,
        "all-gather": lambda n: (n - 1) * payload,
        "all-to-all": lambda n: (n - 1) * payload,
        "reduce-scatter": lambda n: n * (n - 1) * payload,
    }[kind]
    return sum(per_group(n) for n in groups)


def _groups(line: str) -> list[int]:
    """Sizes of replica groups: written out, as ``[groups,size]<=[…]``, or as axes of a mesh: ``mesh['a'=2,'b'=4] {'a'}``."""
    if named := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", line):
        sizes = {a: int(n) for a, n in re.findall(r"'([^']+)'=(\d+)", named[1])}
        n = prod(sizes[a] for a in re.findall(r"'([^']+)'", named[2]))
        return [n] * (prod(sizes.values()) // n)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
        return [int(iota[2])] * int(iota[1])
    if written := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return [len(g.split(",")) for g in re.findall(r"\{([\d,]+)\}", written[1])]
    return [DEVICES]  # "{}": all devices


# that side: jax


def _attributes(a: Row) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Strides, pads and dilations of two spatial dimensions."""
    pads = a.get("pads", [0, 0, 0, 0])
    return a.get("strides", [1, 1]), [(pads[0], pads[2]), (pads[1], pads[3])], a.get("dilations", [1, 1])


def _convolution(a: Row, x: Any, w: Any) -> Any:
    from jax import lax

    strides, pads, dilations = _attributes(a)
    return lax.conv_general_dilated(x, w, strides, pads, rhs_dilation=dilations)


def _transposed(a: Row, x: Any, w: Any) -> Any:
    from jax import lax

    strides, pads, _ = _attributes(a)
    more = a.get("output_padding", [0, 0])
    around = [(k - 1 - lo, k - 1 - hi + m) for k, (lo, hi), m in zip(w.shape[2:], pads, more)]
    return lax.conv_general_dilated(x, w[:, :, ::-1, ::-1].transpose(1, 0, 2, 3), [1, 1], around, lhs_dilation=strides)


def _max_pool(a: Row, x: Any) -> Any:
    from jax import lax

    strides, pads, _ = _attributes(a)
    return lax.reduce_window(x, -float("inf"), lax.max, (1, 1, *a["kernel_shape"]), (1, 1, *strides), [(0, 0), (0, 0), *pads])


def _layer_norm(a: Row, x: Any, scale: Any, shift: Any) -> Any:
    import jax.numpy as jnp
    from jax import lax

    mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * scale + shift


def _layer_norm_squares(a: Row, x: Any, scale: Any, shift: Any) -> Any:
    import jax.numpy as jnp
    from jax import lax

    mean, squares = jnp.mean(x, -1, keepdims=True), jnp.mean(x * x, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(squares - mean * mean + 1e-5) * scale + shift


def operators() -> dict[str, Callable[..., Any]]:
    """ONNX operators, as far as the cases use them, in jax."""
    import jax
    import jax.numpy as jnp

    return {
        "Add": lambda a, x, y: x + y,
        "Concat": lambda a, *xs: jnp.concatenate(xs, a["axis"]),
        "Conv": _convolution,
        "ConvTranspose": _transposed,
        "CumSum": lambda a, x, axis: jnp.cumsum(x, axis),
        "Div": lambda a, x, y: x / y,
        "Erf": lambda a, x: jax.scipy.special.erf(x),
        "Gather": lambda a, w, i: jnp.take(w, i, a["axis"]),
        "LayerNormalization": _layer_norm,
        "LayerNormalization by squares": _layer_norm_squares,
        "MatMul": lambda a, x, y: x @ y,
        "MaxPool": _max_pool,
        "Mul": lambda a, x, y: x * y,
        "Relu": lambda a, x: jax.nn.relu(x),
        "Reshape": lambda a, x, shape: x.reshape(shape),
        "Softmax": lambda a, x: jax.nn.softmax(x, a["axis"]),
        "Transpose": lambda a, x: x.transpose(a["perm"]),
    }


def _sharding(mesh: Any, rank: int, layout: Mapping[str, list[str]]) -> Any:
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec(*(tuple(layout.get(str(d), ())) for d in range(rank))))


def _constrained(mesh: Any, x: Any, layout: Mapping[str, list[str]] | None) -> Any:
    import jax

    return x if layout is None else jax.lax.with_sharding_constraint(x, _sharding(mesh, x.ndim, layout))


def _padded(mesh: Any, shape: list[int], layout: Mapping[str, list[str]]) -> list[int]:
    """The shape whose dimensions divide: jit takes no other at its ends. A device's share is as long as XLA's own of the uneven
    shape, so that padding and cutting move nothing."""
    parts = [prod(mesh.shape[a] for a in layout.get(str(d), ())) for d in range(len(shape))]
    return [-(-n // p) * p for n, p in zip(shape, parts)]


def compiled(case: Row) -> str:
    """The HLO of a case's graph, partitioned.

    ``inner`` has layouts of the nodes' results, and ``reads`` of what they read, which are constraints.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    mesh = Mesh(np.array(jax.devices()).reshape(case["mesh"]), [f"d{i}" for i in range(len(case["mesh"]))])
    layouts: Layout = case["layouts"]
    ops = operators()

    def ends(tensors: Mapping[str, list[int]]) -> Iterator[tuple[str, list[int], list[int], Any]]:
        for name, shape in tensors.items():
            layout = layouts.get(name)
            sharding = None if layout is None else _sharding(mesh, len(shape), layout)
            yield name, shape, shape if layout is None else _padded(mesh, shape, layout), sharding

    def graph(*given: Any) -> list[Any]:
        values: Row = {}
        for x, (name, shape, full, sharding) in zip(given, ends(case["inputs"])):
            cut = x if shape == full else x[tuple(slice(n) for n in shape)]
            values[name] = cut if shape == full else jax.lax.with_sharding_constraint(cut, sharding)
        values |= case["constants"]
        for n in case["nodes"]:
            ins = [_constrained(mesh, values[i], case.get("reads", {}).get(n["output"], {}).get(i)) for i in n["inputs"]]
            made = ops[n["op"]](n["attributes"], *ins)
            values[n["output"]] = _constrained(mesh, made, case.get("inner", {}).get(n["output"]))
        results = []
        for name, shape, full, sharding in ends(case["outputs"]):
            y = values[name] if shape == full else jax.lax.with_sharding_constraint(values[name], sharding)
            results.append(y if shape == full else jnp.pad(y, [(0, f - n) for n, f in zip(shape, full)]))
        return results

    arguments = [
        jax.ShapeDtypeStruct(full, jnp.int32 if name in case["integers"] else jnp.float32, sharding=sharding)
        for name, _, full, sharding in ends(case["inputs"])
    ]
    out = [sharding for *_, sharding in ends(case["outputs"])]
    jitted = jax.jit(graph) if None in out else jax.jit(graph, out_shardings=out)
    return jitted.lower(*arguments).compile().as_text()


def main() -> int:
    """Cases in, counts out."""
    import jax
    import jaxlib

    found: dict[str, Row] = {}
    for case in json.load(sys.stdin):
        rows = collectives(compiled(case))
        found[case["name"]] = {"bytes": sum(r["bytes"] for r in rows), "collectives": rows}
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "shardy": bool(jax.config.jax_use_shardy_partitioner)}
    json.dump({"versions": versions, "cases": found}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
