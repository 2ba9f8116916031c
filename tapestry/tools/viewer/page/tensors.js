// Picture 3: who holds what of a tensor, what moved and from whom; and who sends how much to whom.
import { NONE, PALETTE, amount, axisText, bold, boxText, bytes, cell, clamp, count, deviceColour, div, h, heading, hint, picture, quiet, rectangle, remark, s, scrolled, seconds, shapeText, table } from "./elements.js";
import { cursor, move } from "./cursor.js";
import { byBox, spanOf } from "./space.js";
import { size } from "./affine.js";
import { ranges } from "./model.js";

export function tensors(build, i) {
  const mine = [...new Set([...build.ops[i].ins, ...build.rows[i].outs])];
  const steps = [...build.fetches[i].map((r) => r.step), ...build.reduces[i]];
  const all = build.explain.steps.map((r) => r.step);
  return div(heading("Who sends to whom"),
    h("div", { class: "pair" }, matrix(build, "matrix-all", all, "the whole plan"), matrix(build, "matrix-op", steps, `for ${build.called(i)}`)),
    heading("What moves for this operation"), moves(build, steps), heading("Who holds what"), mine.map((t) => tensor(build, t)));
}

function matrix(build, name, steps, caption) {
  const cells = build.traffic(steps);
  const n = build.devices;
  const side = clamp(260 / n, 3, 28);
  const inner = side > 6 ? side - 1 : side;
  const [left, top] = [34, 26];
  const svg = picture(name, left + n * side + 8, top + n * side + 8);
  const most = Math.max(1, ...cells.map((r) => Math.max(...r)));
  let total = 0;
  svg.append(rectangle(left, top, n * side, n * side, { class: "ground" }));
  for (let a = 0; a < n; a++) {
    for (let b = 0; b < n; b++) {
      total += cells[a][b];
      if (!cells[a][b]) continue;
      const marked = a === cursor.device || b === cursor.device;
      svg.append(rectangle(left + b * side, top + a * side, inner, inner, { class: marked ? "flow marked" : "flow", "fill-opacity": (0.15 + 0.85 * (cells[a][b] / most)).toFixed(3), onclick: () => move({ device: a }) },
        hint(`device ${a} to ${b}: ${count(Math.round(cells[a][b]))} bytes`)));
    }
  }
  const every = n > 16 ? 8 : n > 8 ? 2 : 1;
  for (let d = 0; d < n; d += every) {
    svg.append(axisText(left - 5, top + (d + 0.5) * side + 4, d, "end"), axisText(left + (d + 0.5) * side, top - 6, d, "middle"));
  }
  return h("figure", {}, h("figcaption", {}, bold(caption), h("span", { class: "quiet", "data-total": Math.round(total) }, `${count(Math.round(total))} bytes, rows send, columns receive`)), scrolled(svg));
}

function moves(build, steps) {
  const rows = steps.map((k) => build.transfers.get(k)).filter(Boolean).map((r) => h("tr", { "data-step": r.step, class: r.step === cursor.step ? "selected" : "", onclick: () => move({ step: r.step }) },
    cell(r.kind), cell(r.tensor), amount(count(r.bytes)), amount(count(r.payload_bytes)), amount(seconds(r.seconds)), cell(r.algorithm ?? "")));
  if (!rows.length) return remark("Nothing: every device holds what it reads, or loads it from the host.");
  return table(["kind", "tensor", "bytes, all senders", "largest", "takes", "priced as"], rows);
}

function tensor(build, name) {
  const [dtype, shape, what, about, total] = build.tensors[name];
  const buffers = (build.holders.get(name) ?? []).map((b) => build.buffer(b));
  const rows = buffers.map((b) => holder(build, b, shape));
  const type = about || `${dtype} ${shapeText(shape)}, ${bytes(total)}`;
  return h("section", { class: "tensor", "data-tensor": name }, h("h4", {}, name, " ", quiet(`${what ? `${what}, ` : ""}${type}`)), rows.slice(0, 6),
    rows.length > 6 && remark(`and ${rows.length - 6} more buffers`));
}

const BAR = 150;

// A buffer: how it was made, and its parts by device along the axis that is cut.
function holder(build, b, shape) {
  const groups = byBox(b.boxes);
  const at = build.made.get(b.name);
  const step = build.program.steps[at];
  const row = build.transfers.get(at);
  const how = { launch: "computed here", load: "loaded from the host", transfer: step && `${step[1]} of ${step[2]}`, reduce: step && `${step[1]}` }[step?.[0]] ?? "given";
  const from = at === undefined ? [] : build.links(at).filter(([, to]) => to === cursor.device);
  const svg = picture(`holders-${b.name}`, BAR, 52);
  const cut = shape.map((_, k) => k).filter((k) => new Set(groups.map((g) => g.box[k].join())).size > 1);
  const [col, line] = [cut[0], cut[1]];
  for (const g of groups) {
    const [[x0, x1], [y0, y1]] = [spanOf(shape, g.box, col, BAR - 2), spanOf(shape, g.box, line, 50)];
    svg.append(rectangle(1 + x0, 1 + y0, Math.max(0.8, x1 - x0), Math.max(0.8, y1 - y0), { fill: groups.length > 1 ? deviceColour(g.devices[0]) : NONE, class: g.devices.includes(cursor.device) ? "held selected" : "held" },
      hint(`device ${ranges(g.devices)}: ${boxText(g.box)}`)));
  }
  const each = groups.length ? Math.max(...groups.map((g) => size(g.box))) * b.width : 0;
  const held = groups.length === 1 ? `whole on ${groups[0].devices.length} device(s)` : `${groups.length} parts${groups[0].devices.length > 1 ? `, each on ${groups[0].devices.length} devices` : ""}`;
  return h("div", { class: "holder", "data-buffer": b.name }, svg, div(bold(b.name), ` ${how}${b.field === null ? "" : `, field ${b.field} of a state`}`, h("div", { class: "quiet" }, `${held}, at most ${bytes(each)}${row ? `; ${count(row.bytes)} bytes moved` : ""}`),
    from.length > 0 && h("div", { class: "quiet" }, `device ${cursor.device} has ${from.slice(0, 8).map(([a, , n]) => `${bytes(n)} from ${a}`).join(", ")}`)));
}

export const kindColour = (kind) => PALETTE[{ all_gather: 1, reduce_scatter: 2, all_reduce: 3, all_to_all: 4, halo: 5, broadcast: 6, permute: 7 }[kind] ?? 0];
