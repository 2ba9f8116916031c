"""A rewrite rule of one's own: (x @ a) @ b = x @ (a @ b), wherever the second takes fewer multiplications.

This is what makes linear attention linear: (q @ kᵀ) @ v costs T²·d for T tokens, q @ (kᵀ @ v) only T·d². Use it with
`tapestry compile MODEL.onnx --rules examples/reassociate.py -o BUILD`: nothing else has to know about it.
"""

from tapestry.errors import TapestryError
from tapestry.ir.graph import Read, replace_op
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import chain, contract, fresh, op_at, plain_index, read_dims, work
from tapestry.rewrites.core.rule import Move, Rule, register


@register
class Reassociate(Rule):
    """Multiply a chain of two products from the right.

    before:
        graph attention
        input q: f32[8, 2]
        input k: f32[8, 2]
        input v: f32[8, 3]
        s: f32[8, 8] = op [i: 8, n: 8 | m: 2 sum]
          reads q[i, m], k[n, m]
          body q * k
        y: f32[8, 3] = op [i: 8, n: 3 | m: 8 sum]
          reads s[i, m], v[m, n]
          body s * v
        output y

    move: reassociate@y

    after:
        graph attention
        input q: f32[8, 2]
        input k: f32[8, 2]
        input v: f32[8, 3]
        y.ab: f32[2, 3] = op [m_: 2, n: 3 | m: 8 sum]
          reads k[m, m_], v[m, n]
          body k * v
        y: f32[8, 3] = op [i: 8, n: 3 | m_: 2 sum]
          reads q[i, m_], a1 = y.ab[m_, n]
          body q * a1
        output y

    legal when:
        both operations are sums of products and nothing else, the inner result has no other reader, and x does not
        vary along the dimension that the outer one sums.
    """

    name, phase = "reassociate", "search"

    def find(self, graph):
        for op in graph.ops:
            after = regrouped(graph, op)
            if after and work(after) < work(graph):
                yield Move(self.name, op.outs[0])

    def apply(self, graph, move):
        after = regrouped(graph, op_at(graph, move)[1])
        if after is None:
            raise TapestryError("this is not a chain of two products", where=str(move))
        return after


def regrouped(graph, op):
    found = chain(graph, op)
    if found is None or read_dims(found.factors[0]) & {d.name for d in found.outer}:
        return None
    x, a, b = found.factors
    dims = tuple(d for d in (*op.dims[:-1], *found.inner, *op.dims[-1:]) if d.name in read_dims(a) | read_dims(b))
    ab = Tensor(name=fresh(graph, f"{op.outs[0]}.ab"), dtype=graph.tensors[a.tensor].dtype, shape=tuple(d.size for d in dims))
    inner = contract(graph, ab.name, dims, (a, b), found.outer, op.source)
    outer = contract(graph, op.outs[0], op.dims, (x, Read(tensor=ab.name, index=plain_index(dims))), found.inner, op.source)
    return replace_op(replace_op(graph, graph.find(op.outs[0]), (inner, outer), (ab,)), found.at, ())
