// Picture 2: the index space of an operation: its box, the cut, each device's tile, and the cells that a point or a tile reads.
import { HALO, axisText, boxText, bytes, clamp, count, deviceColour, div, h, hint, onTile, picture, quiet, rectangle, remark, s, scrolled, short } from "./elements.js";
import { cursor, move } from "./cursor.js";
import { cells, clip, footprint, holds, size, whole, within } from "./affine.js";
import { ranges } from "./model.js";
import { tree } from "./tree.js";

const FACE = { left: 64, top: 14, most: 300, least: 26 };
const lengthOf = (n, most) => clamp(26 + 38 * Math.log2(Math.max(1, n)) * 0.72, FACE.least, most);

// The dimensions that the picture shows: rows, columns, and the depth; those that are cut come first, then the longest.
export function chosen(build, i) {
  const shape = build.shapeOf(i);
  const cut = new Set(build.ops[i].cut.filter((d) => d !== null));
  const rank = ([name, n, role]) => (cut.has(name) ? 1e15 : 0) + (role === "inner" ? n / 1e6 : n);
  const byName = (name) => shape.dims.findIndex(([d]) => d === name);
  const pick = (name, found) => (byName(name) >= 0 ? byName(name) : name === "-" ? undefined : found);
  const maps = shape.dims.map((d, k) => ({ d, k })).filter(({ d }) => d[2] === "map");
  const others = shape.dims.map((d, k) => ({ d, k })).filter(({ d }) => d[2] !== "map");
  const order = [...maps].sort((a, b) => rank(b.d) - rank(a.d)).slice(0, others.length ? 2 : 3).map(({ k }) => k);
  const masked = shape.dims.map((_, k) => k).filter((k) => shape.skips.some((g) => within(g[0], k)));
  const shown = masked.length === 2;
  const [row, col] = shown ? masked : order.slice(0, 2).sort((a, b) => a - b);
  const deep = shown ? order.find((k) => !masked.includes(k)) : [...others].sort((a, b) => rank(b.d) - rank(a.d))[0]?.k ?? order[2];
  return { row: pick(cursor.row, row), col: pick(cursor.col, col), depth: pick(cursor.depth, deep) };
}

// The point under the pointer, or that the keys have moved; -1 where a dimension is not set.
export function pointAt(shape) {
  const given = cursor.at.split(".").map(Number);
  return shape.dims.map(([, n], k) => clamp(Number.isInteger(given[k]) ? given[k] : 0, 0, n - 1));
}

export function space(build, i) {
  const shape = build.shapeOf(i);
  if (!shape.dims.length) return remark("One point: nothing can be cut.", operands(build, i, shape, [], null, null));
  const axes = chosen(build, i);
  const point = pointAt(shape);
  const all = byBox(build.blocks(i)); // devices that compute the same share a tile
  const tile = all.find((t) => t.devices.includes(cursor.device)) ?? null;
  const scene = face(build, i, shape, axes, all, tile, point);
  const svg = picture("index-space", scene.width, scene.height, scene.parts);
  const lit = cursor.at !== "" ? { point } : null;
  return div(controls(shape, axes), scrolled(svg), reading(build, i, shape, all, tile, lit),
    operands(build, i, shape, all, tile, lit), tree(build, i));
}

function controls(shape, axes) {
  const menu = (which, label, none) => h("label", {}, `${label} `, h("select", { "data-axis": which, onchange: (e) => move({ [which]: e.target.value }) },
    none && h("option", { value: "-", selected: axes[which] === undefined }, "–"),
    shape.dims.map(([d, n], k) => h("option", { value: d, selected: axes[which] === k }, `${d}: ${n}`))));
  return h("div", { class: "controls" }, menu("row", "rows", true), menu("col", "columns", true), menu("depth", "depth", true));
}

// The box in oblique projection: a front of rows and columns, and a depth.
function face(build, i, shape, { row, col, depth }, all, tile, point) {
  const n = (k) => (k === undefined ? 1 : shape.dims[k][1]);
  const width = col === undefined ? FACE.least : lengthOf(n(col), FACE.most);
  const height = row === undefined ? FACE.least : lengthOf(n(row), 220);
  const deep = depth === undefined ? 0 : lengthOf(n(depth), 150) * 0.6;
  const [ox, oy] = [FACE.left, FACE.top + deep * 0.62];
  const x = (v) => ox + (col === undefined ? v : v / n(col)) * width;
  const y = (v) => oy + (row === undefined ? v : v / n(row)) * height;
  const z = (v) => (depth === undefined ? 0 : (v / n(depth)) * deep);
  const span = (box, k) => (k === undefined ? [0, 1] : box[k]);
  const parts = [];
  const quad = (points, attributes) => s("polygon", { points: points.map((p) => p.map((v) => v.toFixed(1)).join()).join(" "), ...attributes });
  const order = [...all].sort((a, b) => span(b.box, depth)[0] - span(a.box, depth)[0]);
  for (const t of order) {
    const [[r0, r1], [c0, c1], [d0, d1]] = [span(t.box, row), span(t.box, col), span(t.box, depth)];
    const attributes = { class: t === tile ? "tile selected" : "tile", fill: deviceColour(t.devices[0]), "data-device": t.devices[0] };
    const at = (v, w, d) => [x(v) + z(d), y(w) - z(d) * 0.62];
    const g = s("g", { role: "button", onclick: () => move({ device: t === tile ? -1 : t.devices[0], at: "" }) }, hint(`device ${ranges(t.devices)}: ${boxText(t.box)}`));
    const top = [at(c0, r0, d0), at(c1, r0, d0), at(c1, r0, d1), at(c0, r0, d1)];
    const right = [at(c1, r0, d0), at(c1, r1, d0), at(c1, r1, d1), at(c1, r0, d1)];
    if (depth !== undefined && r0 === 0) g.append(quad(top, attributes), quad(top, { class: "shade", fill: "#ffffff", "fill-opacity": 0.3 }));
    if (depth !== undefined && c1 === n(col)) g.append(quad(right, attributes), quad(right, { class: "shade", fill: "#000000", "fill-opacity": 0.25 }));
    g.append(quad([at(c0, r0, d0), at(c1, r0, d0), at(c1, r1, d0), at(c0, r1, d0)], attributes));
    parts.push(g);
    const [lx, ly] = [(right[0][0] + right[2][0]) / 2, (right[0][1] + right[2][1]) / 2];
    if (d0 > 0 && z(d1) - z(d0) > 12) parts.push(onTile(lx, ly + 4, label(t)));
    if (d0 === 0 && !shape.skips.length && x(c1) - x(c0) > 22 && y(r1) - y(r0) > 13) parts.push(onTile((x(c0) + x(c1)) / 2, (y(r0) + y(r1)) / 2 + 4, label(t)));
  }
  parts.push(...skipped(shape, { row, col, depth }, point, { x, y, z, n }));
  parts.push(...names_(shape, { row, col, depth }, { ox, oy, width, height, deep }));
  if (cursor.at !== "") {
    const [px, py] = [x(col === undefined ? 0.5 : point[col] + 0.5), y(row === undefined ? 0.5 : point[row] + 0.5)];
    parts.push(s("circle", { cx: px, cy: py, r: 4, class: "point" }));
  }
  const over = rectangle(ox, oy, width, height, { class: "hover", "data-face": "" });
  over.addEventListener("pointermove", (e) => move({ at: place(e, over, shape, { row, col }, point).join(".") }));
  over.addEventListener("click", (e) => pick(e, over, shape, { row, col }, all));
  parts.push(over);
  return { parts, width: ox + width + deep + 130, height: oy + height + 42 };
}

const label = (t) => (t.devices.length > 1 ? `${t.devices[0]}…×${t.devices.length}` : `${t.devices[0]}`);

function place(e, over, shape, { row, col }, point) {
  const box = over.getBoundingClientRect();
  const share = (v, low, length) => clamp((v - low) / length, 0, 0.999999);
  const out = [...point];
  if (col !== undefined) out[col] = Math.floor(share(e.clientX, box.left, box.width) * shape.dims[col][1]);
  if (row !== undefined) out[row] = Math.floor(share(e.clientY, box.top, box.height) * shape.dims[row][1]);
  return out;
}

function pick(e, over, shape, axes, all) {
  const at = place(e, over, shape, axes, pointAt(shape));
  const hit = all.find((t) => [axes.row, axes.col].every((k) => k === undefined || (t.box[k][0] <= at[k] && at[k] < t.box[k][1])));
  if (hit) move({ device: hit.devices.includes(cursor.device) ? -1 : hit.devices[0], at: at.join(".") });
}

function names_(shape, { row, col, depth }, { ox, oy, width, height, deep }) {
  const words = (k) => `${shape.dims[k][0]}: ${count(shape.dims[k][1])}${shape.dims[k][2] === "map" ? "" : ` (${shape.kind === "map" ? "inner" : shape.dims[k][2] === "inner" ? "inner" : shape.kind})`}`;
  const out = [];
  if (col !== undefined) out.push(axisText(ox + width / 2, oy + height + 18, words(col), "middle"));
  if (row !== undefined) out.push(axisText(ox - 8, oy + height / 2, words(row), "middle", { transform: `rotate(-90 ${ox - 14} ${oy + height / 2})` }));
  if (depth !== undefined) out.push(axisText(ox + width + deep + 8, oy + height - deep * 0.31 - height / 2, words(depth)));
  return out;
}

// Points that compute nothing: where no guard of the body holds, such as keys after a query. Drawn on the plane that names both.
const GRID = 64;

function skipped(shape, { row, col, depth }, point, { x, y, z, n }) {
  const plane = [[row, col, "front"], [row, depth, "side"]].find(([a, b]) => a !== undefined && b !== undefined && shape.skips.some((g) => [a, b].every((k) => within(g[0], k))));
  if (!plane) return [];
  const [a, b, which] = plane;
  const [rows, cols] = [Math.min(GRID, n(a)), Math.min(GRID, n(b))];
  const out = [];
  for (let r = 0; r < rows; r++) {
    let run = null;
    for (let c = 0; c <= cols; c++) {
      const at = [...point];
      at[a] = Math.floor(((r + 0.5) * n(a)) / rows);
      at[b] = Math.floor(((c + 0.5) * n(b)) / cols);
      const off = c < cols && !shape.skips.every((g) => holds(g, at));
      if (off) run ??= c;
      else if (run !== null) {
        const [v0, v1] = [(run * n(b)) / cols, (c * n(b)) / cols];
        const [w0, w1] = [(r * n(a)) / rows, ((r + 1) * n(a)) / rows];
        if (which === "front") out.push(rectangle(x(v0), y(w0), x(v1) - x(v0), y(w1) - y(w0), { class: "skip", fill: "url(#hatch-index-space)" }));
        else {
          const corner = (v, w) => `${(x(n(col)) + z(v)).toFixed(1)},${(y(w) - z(v) * 0.62).toFixed(1)}`;
          out.push(s("polygon", { points: [corner(v0, w0), corner(v1, w0), corner(v1, w1), corner(v0, w1)].join(" "), class: "skip", fill: "url(#hatch-index-space)" }));
        }
        run = null;
      }
    }
  }
  return out;
}

// What the cursor stands on, in words.
function reading(build, i, shape, all, tile, lit) {
  const parts = all.length > 1 ? `${all.length} tiles on ${build.devices} devices` : `one tile, on every one of ${build.devices} device(s)`;
  const lines = [`split ${build.rows[i].split}: ${parts}`];
  if (tile) lines.push(`device ${ranges(tile.devices)} computes ${boxText(tile.box)}, ${count(size(tile.box))} points`);
  if (lit) lines.push(`point [${shape.dims.map(([d], k) => `${d} ${shape.dims[k][2] === "map" ? lit.point[k] : ":"}`).join(", ")}]`);
  if (!tile && !lit) lines.push("Hover over the front, or click a tile: the cells that it reads light up below.");
  if (shape.skips.length) lines.push("Grey: points that a guard of the body leaves out.");
  return h("p", { class: "reading", "aria-live": "polite" }, lines.flatMap((l, k) => (k ? [h("br"), l] : [l])));
}

// The tensors read and written, with what every device holds, what the cursor reads of them, and what of that comes from others.
function operands(build, i, shape, all, tile, lit) {
  const given = build.buffersRead(i);
  const block = tile?.box ?? shape.dims.map(([, n]) => [0, n]);
  const reads = shape.reads.map((read, pos) => operand(build, i, shape, { read, pos, buffer: given[pos], block, tile, lit }));
  const rows = build.rows[i].outs.map((name, k) => written(build, shape, { name, type: shape.outs[k], block, tile, lit }));
  return h("div", { class: "operands" }, reads, rows);
}

const MINI = { most: 150, least: 8, margin: 12 };

// Two axes of a tensor that are drawn: the longest ones, in their order.
function drawnAxes(dims) {
  const order = dims.map((n, k) => [n, k]).sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, 2).map(([, k]) => k).sort((a, b) => a - b);
  return [undefined, undefined, ...order].slice(-2);
}

// Where a box lies along an axis of a tensor that is drawn so long; on all of it, where no axis is.
export const spanOf = (dims, box, k, length) => (k === undefined ? [0, length] : box[k].map((v) => (v / dims[k]) * length));

function sheet(name, dims) {
  const [row, col] = drawnAxes(dims);
  const length = (k) => (k === undefined ? MINI.least * 2 : clamp(lengthOf(dims[k], MINI.most) * 0.75, MINI.least * 2, MINI.most));
  const [width, height] = [length(col), length(row)];
  const rect = (box, attributes) => {
    const [[x0, x1], [y0, y1]] = [spanOf(dims, box, col, width), spanOf(dims, box, row, height)];
    return rectangle(MINI.margin + x0, MINI.margin + y0, Math.max(1, x1 - x0), Math.max(1, y1 - y0), attributes);
  };
  const svg = picture(`tensor-${name}`, width + 2 * MINI.margin, height + 2 * MINI.margin);
  return { svg, rect };
}

// The outlines of what devices hold.
function hold(buffer, { svg, rect }) {
  for (const { box, devices } of byBox(buffer.boxes)) svg.append(rect(box, { class: "held", stroke: deviceColour(devices[0]) }));
}

function operand(build, i, shape, { read, pos, buffer, block, tile, lit }) {
  const tensor = build.ops[i].ins[pos];
  const dims = read.type[1];
  const own = whole(dims);
  const { svg, rect } = sheet(`${pos}`, dims);
  const origin = buffer ? build.buffer(build.origin(buffer)) : null;
  svg.append(rect(own, { class: "ground" }));
  if (origin) hold(origin, { svg, rect });
  const notes = [];
  if (lit) {
    const found = cells(read, lit.point, shape, block);
    if (found) {
      const seen = found.filter((c) => c.counts && inside(c.cell, dims));
      const pad = found.filter((c) => !inside(c.cell, dims));
      for (const c of found) svg.append(rect(c.cell.map((v) => [v, v + 1]), { class: c.counts && inside(c.cell, dims) ? "cell" : "cell pad" }));
      const left = found.length - seen.length - pad.length;
      notes.push(`${count(seen.length)} cell(s)${pad.length ? `, ${pad.length} outside: ${read.other}` : ""}${left ? `, ${left} left out by a guard` : ""}`);
    } else {
      const box = footprint(read, block.map((b, k) => (shape.dims[k][2] === "map" ? [lit.point[k], lit.point[k] + 1] : b)));
      const clipped = clip(box, own);
      if (clipped) svg.append(rect(clipped, { class: "cell" }));
      notes.push(clipped ? `${count(size(clipped))} cell(s) in ${boxText(clipped)}` : "nothing");
    }
  } else if (tile) {
    notes.push(...footprints(read, tile, origin, own, { svg, rect }));
  }
  const fetched = build.edges[i]?.find(([t]) => t === tensor);
  if (fetched && fetched[2]) notes.push(`${fetched[2]}${fetched[4] ? ", brought before" : ` ${bytes(fetched[1])}`}`);
  const title = `${tensor}[${read.text.join(", ")}]${read.other !== undefined ? ` else ${read.other}` : ""}`;
  return card("read", tensor, title, `${read.type[0]} ${dims.join("×") || "scalar"}`, notes, svg);
}

// A tile's footprint, with the halo in another colour, and what of it lies outside of the tensor.
function footprints(read, tile, origin, own, { svg, rect }) {
  const named = footprint(read, tile.box);
  const inTensor = clip(named, own);
  if (!named || !inTensor) return ["nothing is read"];
  if (read.other !== undefined && size(named) > size(inTensor)) svg.append(rect(named, { class: "skip", fill: `url(#${svg.querySelector("pattern").id})` }));
  const held = origin?.boxes[tile.devices[0]] ?? null;
  const mine = held ? clip(inTensor, held) : null;
  svg.append(rect(inTensor, { class: "halo", fill: HALO }));
  if (mine) svg.append(rect(mine, { class: "mine", fill: deviceColour(tile.devices[0]) }));
  const halo = size(inTensor) - (mine ? size(mine) : 0);
  const out = [`reads ${boxText(inTensor)}, ${bytes(size(inTensor) * read.type[2])}`];
  if (halo) out.push(`${count(halo)} cells from others (halo), ${bytes(halo * read.type[2])}`);
  if (read.other !== undefined && size(named) > size(inTensor)) out.push(`grey: padding, ${read.other}`);
  return out;
}

function written(build, shape, { name, type, block, tile, lit }) {
  const { svg, rect } = sheet(`out-${name}`, type[1]);
  const dims = type[1];
  svg.append(rect(whole(dims), { class: "ground" }));
  const buffers = (build.holders.get(name) ?? []).map((b) => build.buffer(b)).filter((b) => b.field === null);
  if (buffers.length) hold(buffers[0], { svg, rect });
  const notes = [];
  if (dims.length === shape.dims.filter(([, , r]) => r === "map").length && (tile || lit)) {
    const box = dims.map((_, k) => (lit ? [lit.point[k], lit.point[k] + 1] : block[k]));
    svg.append(rect(box, lit ? { class: "cell" } : { class: "mine", fill: deviceColour(tile.devices[0]) }));
    notes.push(`writes ${boxText(box)}`);
  }
  return card("write", name, name, `${type[0]} ${dims.join("×") || "scalar"}`, notes, svg);
}

const inside = (cell, dims) => cell.every((v, k) => v >= 0 && v < dims[k]);

// The boxes of a list of one for every device or null, each once, with its devices.
export function byBox(boxes) {
  const out = new Map();
  boxes.forEach((box, d) => {
    if (box === null) return;
    const key = JSON.stringify(box);
    if (!out.has(key)) out.set(key, { box, devices: [] });
    out.get(key).devices.push(d);
  });
  return [...out.values()];
}

function card(kind, tensor, title, type, notes, svg) {
  return h("figure", { class: `operand ${kind}`, "data-tensor": tensor }, h("figcaption", {}, h("b", { title }, `${kind === "read" ? "reads" : "writes"} ${short(title, 44)}`), quiet(type)), svg,
    notes.map((n) => h("div", { class: "note" }, n)));
}
