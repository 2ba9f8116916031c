// The layered drawing of a folded graph: which nodes are seen, what flows between them, and where they are put (by dagre).

export const NODE = { width: 176, height: 42 };

// Nodes and edges as they are seen with some groups open: `open` maps a group to the repetition that is shown.
export function seen(build, open) {
  const nodes = new Map();
  const at = (i) => {
    const k = build.groupOf[i];
    if (k < 0) return { id: `o${i}`, ops: [i] };
    const g = build.groups[k];
    if (!open.has(k)) return { id: `g${k}`, group: k };
    const [here, shown] = [build.repetition(i), open.get(k)];
    if (here === shown) return { id: `o${i}`, ops: [i], parent: k };
    return { id: here < shown ? `b${k}` : `a${k}`, group: k, rest: here < shown ? [0, shown - 1] : [shown + 1, g.times - 1] };
  };
  const edges = new Map();
  build.ops.forEach((_, i) => {
    const to = at(i);
    nodes.set(to.id, to);
    for (const [tensor, n, kind, step] of build.edges[i] ?? []) {
      if (!build.makers.has(tensor) && build.tensors[tensor][2] !== "input") continue;
      const from = build.makers.has(tensor) ? at(build.makers.get(tensor)) : { id: `i${tensor}`, input: tensor };
      if (!nodes.has(from.id)) nodes.set(from.id, from);
      if (from.id === to.id) continue;
      const key = `${from.id}>${to.id}`;
      if (!edges.has(key)) edges.set(key, { from: from.id, to: to.id, moved: 0, held: 0, kinds: new Map(), tensors: new Map(), steps: [] });
      const e = edges.get(key);
      e.moved += n;
      if (!e.tensors.has(tensor)) e.held += build.tensors[tensor][4];
      e.tensors.set(tensor, (e.tensors.get(tensor) ?? 0) + n);
      if (kind) e.kinds.set(kind, (e.kinds.get(kind) ?? 0) + n);
      if (step >= 0) e.steps.push(step);
    }
  });
  return { nodes: [...nodes.values()], edges: [...edges.values()] };
}

// Places of nodes (their middle), boxes of open groups, and points of edges.
export function place({ nodes, edges }) {
  const g = new dagre.graphlib.Graph({ compound: nodes.some((n) => n.parent !== undefined) });
  g.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 40, edgesep: 10, marginx: 12, marginy: 12, ranker: "tight-tree" });
  g.setDefaultEdgeLabel(() => ({}));
  for (const n of nodes) {
    g.setNode(n.id, n.input ? { width: 120, height: 24 } : { ...NODE });
    if (n.parent !== undefined) {
      if (!g.hasNode(`p${n.parent}`)) g.setNode(`p${n.parent}`, {});
      g.setParent(n.id, `p${n.parent}`);
    }
  }
  for (const e of edges) g.setEdge(e.from, e.to, { width: 10, height: 10 });
  dagre.layout(g);
  const { width, height } = g.graph();
  return {
    width, height, nodes: new Map(nodes.map((n) => [n.id, g.node(n.id)])),
    frames: g.nodes().filter((id) => id.startsWith("p")).map((id) => ({ group: Number(id.slice(1)), ...g.node(id) })),
    edges: edges.map((e) => ({ ...e, points: g.edge(e.from, e.to).points })),
  };
}
