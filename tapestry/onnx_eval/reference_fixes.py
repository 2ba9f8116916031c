# pyright: basic
# onnx comes without complete types
"""Operators that the ONNX reference evaluator has, but wrong: they take the places of its own, inside of bodies as well."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np


@cache
def corrected() -> list[type]:
    """Classes for ``ReferenceEvaluator(new_ops=…)``, under the operators' names."""
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops.op_loop import Loop as Theirs

    class SequenceInsert(OpRun):
        """Theirs takes places modulo the length, so that the end is the beginning, and divides by 0."""

        def _run(self, held: Any, tensor: Any, place: Any = None) -> tuple[Any, ...]:
            items, length = list(held), len(held)
            at = length if place is None else int(np.asarray(place).item())
            if not -length <= at <= length:
                raise ValueError(f"place {at} in a sequence of {length}")
            items.insert(at, tensor)  # a negative place counts from the end, as in Python
            return (items,)

    class Loop(Theirs):
        """Theirs takes no steps without a condition, and concatenates what it should stack."""

        def _run(self: Any, M: Any, cond: Any = None, *first: Any, context: Any = None, **more: Any) -> tuple[Any, ...]:
            names, body = self.body.input_names, {k: more.get(k) for k in ("attributes", "bindings")}
            values = {**(context or {}), **dict(zip(names[2:], first, strict=True))}
            going, step = cond is None or bool(np.asarray(cond).item()), 0
            seen: list[list[Any]] = [[] for _ in range(self.K)]
            while going and (M is None or step < int(np.asarray(M).item())):
                values |= {names[0]: np.array(step, np.int64), names[1]: np.array(True)}
                results = self._run_body(values, **body)
                going, step = bool(np.asarray(results[0]).item()), step + 1
                values |= dict(zip(names[2:], results[1 : 1 + self.N], strict=True))
                for rows, a in zip(seen, results[1 + self.N :], strict=True):
                    rows.append(a)
            return self._check_and_fix_outputs((*(values[n] for n in names[2:]), *map(np.stack, seen)))

    return [SequenceInsert, Loop]
