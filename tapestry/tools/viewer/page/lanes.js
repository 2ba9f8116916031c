// Picture 4: what every device does when, simulated and, beside it, measured; memory over time. Devices that do the same share a lane.
import { HALO, axisText, button, bytes, clamp, controls, count, div, errorColour, h, hint, picture, rectangle, remark, s, scrolled, seconds, short, text } from "./elements.js";
import { cursor, move } from "./cursor.js";
import { kindColour } from "./tensors.js";
import { ranges } from "./model.js";

const LANE = { left: 172, row: 15, gap: 3, memory: 44, top: 20 };
const STREAMS = ["kernels", "transfers"];

// The part of the time that is shown, in seconds.
function span(total) {
  const [a, b] = cursor.zoom.split(":").map(Number);
  return cursor.zoom && b > a ? [a * total, b * total] : [0, total];
}

export function zoomBy(factor, at = 0.5) {
  const [a, b] = cursor.zoom ? cursor.zoom.split(":").map(Number) : [0, 1];
  const middle = a + (b - a) * at;
  const half = Math.min(1, (b - a) * factor);
  const low = clamp(middle - half * at, 0, 1 - half);
  move({ zoom: half >= 1 ? "" : `${low.toFixed(5)}:${(low + half).toFixed(5)}` });
}

export function lanes(build, width) {
  const total = build.explain.simulated.seconds;
  const [from, to] = span(total);
  const x = (t) => LANE.left + ((t - from) / (to - from || 1)) * (width - LANE.left - 10);
  const classes = build.lanes.classes.slice(0, 8);
  const each = 2 * LANE.row + LANE.gap + (build.measured ? LANE.row : 0) + LANE.memory + 12;
  const svg = picture("lanes", width, LANE.top + classes.length * each + 4);
  ticks(svg, from, to, x, LANE.top + classes.length * each);
  const rows = build.lanes.steps;
  classes.forEach((devices, k) => {
    const top = LANE.top + k * each;
    svg.append(text(4, top + 11, `device ${short(ranges(devices), 9)}`, { class: "name" }));
    if (devices.length > 1) svg.append(text(4, top + 25, `${devices.length} alike`, { class: "note" }));
    STREAMS.forEach((name, n) => svg.append(axisText(LANE.left - 6, top + 11 + n * (LANE.row + 1), name, "end")));
    bars(svg, build, rows, k, { top, x, from, to });
    if (build.measured) measured(svg, build, rows, k, { top: top + 2 * (LANE.row + 1), x, from, to });
    memory(svg, build, devices[0], { top: top + each - LANE.memory - 10, x, from, to });
  });
  svg.addEventListener("wheel", (e) => {
    if (!e.ctrlKey && !e.shiftKey) return;
    e.preventDefault();
    const box = svg.getBoundingClientRect();
    zoomBy(Math.exp((e.deltaY || e.deltaX) / 300), clamp((e.clientX - box.left - LANE.left) / (box.width - LANE.left - 10), 0, 1));
  }, { passive: false });
  const hidden = build.lanes.classes.length - classes.length;
  return div(head(build, total), scrolled(svg), hidden > 0 && remark(`${hidden} more kinds of devices are not drawn`));
}

function head(build, total) {
  const sim = build.explain.simulated;
  const busiest = sim.compute_s.indexOf(Math.max(...sim.compute_s));
  const words = [`simulated ${seconds(total)}`, `the busiest device computes for ${seconds(sim.compute_s[busiest])}`, `sends for ${seconds(sim.transfer_s[busiest])}`, `waits for ${seconds(sim.exposed_s[busiest])}`];
  const real = build.measured;
  if (real) words.push(`measured ${seconds(real.measured_s)} (${real.error >= 0 ? "+" : "−"}${Math.abs(real.error * 100).toFixed(0)} %)`);
  return controls(h("span", { "data-lanes": "" }, words.join(" · ")), button("+", () => zoomBy(0.5), "zoom in"), button("−", () => zoomBy(2), "zoom out"),
    button("all", () => move({ zoom: "" })), build.lane.has(stepOf(build)) && button("to the cursor", () => toStep(build, total)));
}

const stepOf = (build) => (cursor.step >= 0 ? cursor.step : build.launches[cursor.op]?.[0]);

function toStep(build, total) {
  const row = build.lane.get(stepOf(build));
  const k = row.begin.findIndex((t) => t !== null);
  const wide = Math.max((row.end[k] - row.begin[k]) * 12, total / 2000);
  const middle = (row.begin[k] + row.end[k]) / 2;
  move({ zoom: `${Math.max(0, (middle - wide / 2) / total).toFixed(5)}:${Math.min(1, (middle + wide / 2) / total).toFixed(5)}` });
}

function ticks(svg, from, to, x, bottom) {
  const raw = (to - from) / 6 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((v) => v >= raw);
  for (let t = Math.ceil(from / step) * step; t <= to + step / 1e6; t += step) {
    svg.append(s("line", { x1: x(t), x2: x(t), y1: 14, y2: bottom, class: "tick" }), axisText(x(t), 10, seconds(t), "middle"));
  }
}

// Bars of one class of devices; those too narrow to be seen are drawn together.
function bars(svg, build, rows, k, { top, x, from, to }) {
  const last = [null, null];
  for (const row of rows) {
    const [begin, end] = [row.begin[k], row.end[k]];
    if (begin === null || end < from || begin > to) continue;
    const [a, b] = [Math.max(x(begin), LANE.left), Math.max(x(end), LANE.left)];
    const chosen = row.op === cursor.op || row.step === cursor.step;
    const before = last[row.stream];
    if (!chosen && before && b - before.x < 1.2 && !before.chosen) continue;
    const kind = build.program.steps[row.step];
    const fill = row.stream === 0 ? build.colourOf(row.op ?? kind[1]) : kindColour(kind[1]);
    const what = row.stream === 0 ? build.called(row.op ?? kind[1]) : `${kind[1]} for ${row.op === null ? "an output" : build.called(row.op)}`;
    svg.append(rectangle(a, top + row.stream * (LANE.row + 1), Math.max(0.8, b - a), LANE.row, { fill, class: chosen ? "bar selected" : "bar", "data-step": row.step, onclick: () => move({ op: row.op ?? cursor.op, step: row.step }) },
      hint(`step ${row.step}: ${what}\n${seconds(end - begin)} from ${seconds(begin)}${row.by ? `, ${row.by}` : ""}`)));
    if (b - a > 46) svg.append(text(a + 4, top + 11 + row.stream * (LANE.row + 1), (b - a) / 6.6 >= what.length ? what : what.split(" for ")[0].slice(0, Math.floor((b - a) / 6.6)), { class: "on-bar" }));
    last[row.stream] = { x: b, chosen };
  }
}

// Beside the simulated bars of a trace's steps: their measured length, coloured by how far the estimate is off.
function measured(svg, build, rows, k, { top, x, from, to }) {
  const real = new Map(build.measured.steps.map((r) => [r.step, r]));
  svg.append(axisText(LANE.left - 6, top + 11, "measured", "end"));
  for (const row of rows) {
    const r = real.get(row.step);
    const begin = row.begin[k];
    if (!r || begin === null || begin > to || row.end[k] < from) continue;
    const ratio = r.estimated_s > 0 ? r.measured_s / r.estimated_s : 1;
    const a = Math.max(x(begin), LANE.left);
    svg.append(rectangle(a, top, Math.max(0.8, x(row.end[k]) - a), LANE.row, { fill: errorColour(ratio), class: "bar error", "data-ratio": ratio.toFixed(2), onclick: () => move({ op: row.op ?? cursor.op, step: row.step }) },
      hint(`step ${row.step}: ${r.what}\n${seconds(r.measured_s)} measured, ${seconds(r.estimated_s)} estimated (×${ratio.toFixed(2)}), ${seconds(r.waited_s)} waited`)));
  }
}

// Bytes alive after every step, on the time of the steps.
function memory(svg, build, device, { top, x, from, to }) {
  const k = build.memory.classes.findIndex((c) => c.includes(device));
  const alive = build.memory.alive[k];
  const lane = build.lanes.classes.findIndex((c) => c.includes(device));
  const most = Math.max(...alive, 1);
  const y = (n) => top + LANE.memory - (n / most) * (LANE.memory - 4);
  const points = [];
  let now = 0;
  alive.forEach((n, step) => {
    const row = build.lane.get(step);
    if (row && row.begin[lane] !== null) now = Math.max(now, row.begin[lane]);
    if (now >= from && now <= to) points.push([x(now), y(n)]);
  });
  if (!points.length) return;
  points.push([x(Math.min(to, build.explain.simulated.seconds)), points[points.length - 1][1]]);
  const path = points.map(([a, b], n) => `${n ? `H${a.toFixed(1)}V` : `M${a.toFixed(1)},`}${b.toFixed(1)}`).join("");
  const peak = build.explain.memory.peak_bytes[device];
  svg.append(s("path", { d: `${path}V${top + LANE.memory}H${points[0][0].toFixed(1)}Z`, class: "memory" }, hint(`at most ${count(peak)} bytes`)));
  svg.append(axisText(LANE.left - 6, top + 12, "memory", "end"), text(LANE.left - 6, top + 26, bytes(peak), { class: "note", "text-anchor": "end" }));
  const allowed = build.explain.memory.allowed_bytes;
  if (allowed < most * 1.02) svg.append(s("line", { x1: LANE.left, x2: x(to), y1: y(allowed), y2: y(allowed), stroke: HALO }));
}
