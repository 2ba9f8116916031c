// How partial states become one: a tree with a leaf for every device of a group, in the order in which they are merged.
import { axisText, bold, boxText, bytes, count, deviceColour, div, h, hint, onTile, picture, rectangle, s, scrolled, text } from "./elements.js";
import { cursor } from "./cursor.js";

const LEAF = { width: 46, height: 24, gap: 8, level: 38 };

export function tree(build, i) {
  return div(build.reduces[i].map((k) => one(build, i, k)));
}

function one(build, i, k) {
  const [, kind, , , moved, , groups] = build.program.steps[k];
  const all = build.program.groups[groups];
  const group = all.find((g) => g.includes(cursor.device)) ?? all.find((g) => g.length > 1) ?? all[0];
  const row = build.transfers.get(k);
  const shape = build.shapeOf(i);
  const blocks = build.blocks(i);
  const reduced = shape.dims.map((d, n) => [d, n]).filter(([d]) => d[2] === "reduce");
  const own = (d) => (blocks[d] ? boxText(reduced.map(([, n]) => blocks[d][n])) : "");
  const caption = `${kind} in ${all.length} group(s) of ${group.length}: ${count(moved)} bytes on the wire, ${bytes(row?.payload_bytes ?? 0)} each` +
    `${row?.algorithm ? `, priced as ${row.algorithm}` : ""}; states of '${shape.kind}' merge in this order`;
  return h("figure", { class: "tree", "data-step": k }, h("figcaption", {}, bold(`⊕ ${caption}`)), scrolled(drawing(group, own, kind, reduced.map(([d]) => d[0]).join(", "))));
}

// Merged from left to right, as every executor does: the first with the second, then each next one.
function drawing(group, own, kind, dims) {
  const n = Math.min(group.length, 16);
  const width = n * (LEAF.width + LEAF.gap) + 60;
  const height = LEAF.height + (Math.min(n, 8) + 1) * (LEAF.level / 2) + 64;
  const x = (j) => 20 + j * (LEAF.width + LEAF.gap) + LEAF.width / 2;
  const svg = picture("reduction-tree", width, height);
  const step = (height - LEAF.height - 70) / Math.max(1, n - 1);
  let [px, py] = [x(0), 20 + LEAF.height];
  for (let j = 1; j < n; j++) {
    const [mx, my] = [(px + x(j)) / 2, 28 + LEAF.height + j * step];
    svg.append(s("path", { d: `M${px},${py}L${mx},${my}M${x(j)},${20 + LEAF.height}L${mx},${my}`, class: "branch" }), s("circle", { cx: mx, cy: my, r: 3.5, class: "joint" }));
    [px, py] = [mx, my];
  }
  for (let j = 0; j < n; j++) {
    svg.append(s("g", {}, hint(`device ${group[j]}: ${dims} ${own(group[j])}`), rectangle(x(j) - LEAF.width / 2, 20, LEAF.width, LEAF.height, { rx: 5, fill: deviceColour(group[j]), class: "leaf" }),
      onTile(x(j), 37, group[j])));
  }
  if (group.length > n) svg.append(text(x(n - 1) + 32, 37, `… ${group.length}`));
  svg.append(s("path", { d: `M${px},${py}V${height - 26}`, class: "branch" }), axisText(Math.max(px, 60), height - 10, kind === "all_reduce" ? "to every device" : "a part to each", "middle"));
  return svg;
}
