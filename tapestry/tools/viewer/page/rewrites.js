// Picture 6: a slider over the rewrites: what a step replaced, and by what; the gain, and what shows that results stay the same.
import { bold, button, bytes, clamp, controls, count, div, h, hint, picture, quiet, rectangle, remark, s, scrolled, tally, text } from "./elements.js";
import { cursor, move } from "./cursor.js";

export function rewrites(build) {
  const steps = build.rewrites;
  if (!steps.length) return remark("The build has no log of rewrites.");
  const k = Math.min(cursor.rewrite, steps.length - 1);
  const step = steps[k];
  const change = step.changes[Math.min(cursor.change, step.changes.length - 1)];
  const to = (n) => move({ rewrite: clamp(n, 0, steps.length - 1), change: 0 });
  const slider = h("input", { type: "range", min: 0, max: steps.length - 1, value: k, "aria-label": "rewrite", oninput: (e) => to(Number(e.target.value)) });
  return div(controls(button("‹", () => to(k - 1), "the one before"), slider,
    button("›", () => to(k + 1), "the next one"), h("b", { "data-rewrite": k }, `${k + 1} of ${steps.length}: ${step.by}`)),
    facts(step), change && div(picker(step), h("div", { class: "pair" }, side("before", change.before, change.bytes_before), side("after", change.after, change.bytes_after))), moves(build));
}

function facts(step) {
  const gain = step.bytes[0] ? 1 - step.bytes[1] / step.bytes[0] : 0;
  const shown = tally(step.evidence, " by ");
  return h("p", { "data-facts": "" }, `${count(step.ops[0])} operations became ${count(step.ops[1])} in ${count(step.places)} place(s), ${count(step.distinct)} distinct; they read and write ${bytes(step.bytes[0])} before, ${bytes(step.bytes[1])} after `,
    bold(`(${gain >= 0 ? "−" : "+"}${Math.abs(gain * 100).toFixed(0)} %)`), h("br"), quiet(`same results: ${shown || "nothing to show"}${step.exact ? "; claims the same bits" : ""}`));
}

function picker(step) {
  if (step.changes.length < 2) return remark(`×${count(step.changes[0].times)}`);
  const name = (c, n) => `${n + 1}: ${c.before.length} → ${c.after.length} operations ×${count(c.times)}`;
  return h("select", { "aria-label": "change", onchange: (e) => move({ change: Number(e.target.value) }) }, step.changes.map((c, n) => h("option", { value: n, selected: n === cursor.change }, name(c, n))));
}

const BOX = { width: 244, line: 13, gap: 26 };

// One side of a change: its operations by depth, and what flows between them.
function side(name, ops, traffic) {
  const makers = new Map(ops.flatMap((op, k) => op.outs.map((t) => [t, k])));
  const sources = ops.map((op, k) => op.ins.map((t) => makers.get(t)).filter((maker) => maker < k));
  const depth = [];
  for (const read of sources) depth.push(Math.max(0, ...read.map((maker) => depth[maker] + 1)));
  const lines = ops.map((op) => op.text.split("\n").map((l) => (l.trim().length > 36 ? `${l.trim().slice(0, 35)}…` : l.trim())).slice(0, 6));
  const placed = [];
  const across = [];
  ops.forEach((op, k) => {
    const column = (across[depth[k]] = (across[depth[k]] ?? -1) + 1);
    placed.push({ x: 6 + column * (BOX.width + 10), column, h: 10 + lines[k].length * BOX.line });
  });
  const tops = [];
  let y = 6;
  for (let d = 0; d <= Math.max(-1, ...depth); d++) {
    tops.push(y);
    y += Math.max(...placed.filter((_, k) => depth[k] === d).map((p) => p.h)) + BOX.gap;
  }
  const width = 12 + Math.max(1, ...across.map((n) => n + 1)) * (BOX.width + 10);
  const svg = picture(`rewrite-${name}`, width, Math.max(30, y));
  sources.forEach((read, k) => read.forEach((from) => {
    svg.append(s("path", { class: "wire", d: `M${placed[from].x + BOX.width / 2},${tops[depth[from]] + placed[from].h}L${placed[k].x + BOX.width / 2},${tops[depth[k]]}` }));
  }));
  ops.forEach((op, k) => svg.append(s("g", { class: "step-op" }, hint(op.text), rectangle(placed[k].x, tops[depth[k]], BOX.width, placed[k].h, { rx: 5, class: "card" }),
    lines[k].map((l, n) => text(placed[k].x + 7, tops[depth[k]] + 14 + n * BOX.line, l, { class: n ? "code" : "code first" })))));
  return h("figure", {}, h("figcaption", {}, bold(name), quiet(`${ops.length} operation(s), ${bytes(traffic)} read and written`)), scrolled(svg));
}

function moves(build) {
  const list = build.report.moves ?? [];
  if (!list.length) return remark("The search took no structural move.");
  return h("details", {}, h("summary", {}, `${count(list.length)} moves of the search`), h("ol", { class: "moves" }, list.slice(0, 400).map((m) => h("li", {}, m))));
}
