"""Some of a model's nodes as a local function, with attributes that its call gives: another way to write the same model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onnx import AttributeProto, FunctionProto, NodeProto, helper

from tests.fuzz.generate.evaluate import reads

DOMAIN = "fuzz"
PASSED = (AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.INTS, AttributeProto.STRING)


def called(
    nodes: Sequence[NodeProto], first: int, last: int, outputs: Collection[str], opset: int
) -> tuple[list[NodeProto], FunctionProto] | None:
    """The nodes with those from ``first`` to before ``last`` in a function that is called; None where there are none.

    Every second attribute of them is one of the function's, which the call gives.
    """
    inside = [NodeProto.FromString(n.SerializeToString()) for n in nodes[first:last]]
    made = [o for n in inside for o in n.output if o]
    needed = {i for n in nodes[last:] for i in reads(n)} | set(outputs)
    outs = [o for o in made if o in needed]
    if not outs:
        return None
    ins = [i for i in dict.fromkeys(i for n in inside for i in reads(n)) if i not in made]
    call = helper.make_node("Part", ins, outs, name="part", domain=DOMAIN)
    for k, a in enumerate([a for n in inside for a in n.attribute if a.type in PASSED]):
        if k % 2 == 0:
            given = call.attribute.add()
            given.CopyFrom(a)
            given.name = f"a{k}"
            a.CopyFrom(AttributeProto(name=a.name, type=a.type, ref_attr_name=given.name))
    opsets = [helper.make_opsetid("", opset)]
    part = helper.make_function(DOMAIN, "Part", ins, outs, inside, opsets, [a.name for a in call.attribute])
    return [*nodes[:first], call, *nodes[last:]], part
