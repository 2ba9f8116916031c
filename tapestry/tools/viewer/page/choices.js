// Pictures 5 and 6b: what else an operation could be and what that costs; the search: incumbent, bound, and the Pareto front.
import { amount, axisText, bytes, cell, div, h, heading, hint, picture, quiet, remark, s, scrolled, seconds, signed, table } from "./elements.js";

export function choices(build, i, say) {
  const row = build.rows[i];
  const own = h("tr", { class: "selected" }, cell(row.split), amount("chosen"), cell(pins(build.ops[i].pins, say)));
  const rows = build.ops[i].others.map((o) => h("tr", { "data-more": o.seconds_more, onclick: () => copy(o.pins, say) }, cell(o.split), amount(signed(o.seconds_more)), cell(pins(o.pins, say))));
  const best = row.next_best;
  return div(h("p", {}, row.split_words ?? ""), table(["split", "whole plan", "a click copies"], [own, ...rows], { class: "choices" }), best ? because(best) : remark("No other split is possible."),
    heading("The search"), search(build), heading("Latency against memory"), front(build, say));
}

const option = (pin) => `--pin '${pin}'`;
const pins = (list, say) => h("code", { role: "button", tabindex: 0, onclick: (e) => (e.stopPropagation(), copy(list, say)) }, list.map(option).join(" "));

function copy(list, say) {
  if (!list.length) return;
  const words = list.map(option).join(" ");
  navigator.clipboard?.writeText(words).catch(() => {});
  say(words);
}

function because(best) {
  const part = (p) => `${signed(p.seconds_more)} for ${p.what}${p.tensor ? ` of '${p.tensor}'` : ""}${p.bytes_more ? ` (${p.bytes_more > 0 ? "+" : "−"}${bytes(Math.abs(p.bytes_more))})` : ""}`;
  return remark(`next best ${best.split}, ${signed(best.seconds_more)}: ${best.parts.map(part).join(", ")}`);
}

const PLOT = { width: 420, height: 150, left: 64, bottom: 26 };

// The ends of an axis that shows some values, and places of values on an axis with such ends.
const around = (values, margin) => [Math.min(...values) * (1 - margin), Math.max(...values) * (1 + margin)];
const along = (low, high) => (v) => PLOT.left + ((v - low) / (high - low || 1)) * (PLOT.width - PLOT.left - 12);
const up = (low, high) => (v) => 16 + ((high - v) / (high - low || 1)) * (PLOT.height - 16 - PLOT.bottom);

function axes(svg, x, y, xs, ys, label) {
  for (const v of ys) svg.append(s("line", { x1: PLOT.left, x2: PLOT.width - 8, y1: y(v), y2: y(v), class: "tick" }), axisText(PLOT.left - 5, y(v) + 4, seconds(v), "end"));
  xs.forEach(([v, words], k) => svg.append(axisText(x(v), PLOT.height - 8, words, k ? "end" : "start")));
  svg.append(axisText(PLOT.left, 10, label));
}

// Plans as they were found and the bound then, over the work of the search.
function search(build) {
  const report = build.report;
  const history = report.search?.history ?? [];
  const words = `${{ stalled: "stopped without closing the gap" }[report.search?.ended] ?? report.search?.ended ?? ""}: objective ${seconds(report.objective_s)}, lower bound ${seconds(report.lower_bound_s)}, gap ${(report.gap * 100).toFixed(2)}%`;
  if (!history.length) return h("p", { "data-search": "" }, words);
  const work = Math.max(report.search.work, history[history.length - 1][0], 1);
  const values = history.flatMap(([, t, b]) => [t, b]).concat(report.objective_s, report.lower_bound_s).filter((v) => v > 0);
  const [low, high] = around(values, 0.02);
  const [x, y] = [along(0, work), up(low, high)];
  const svg = picture("search", PLOT.width, PLOT.height);
  axes(svg, x, y, [[0, "0"], [work, `${(work / 1e9).toPrecision(3)} s of work`]], [low, (low + high) / 2, high], "incumbent and bound");
  const steps = (column, end) => {
    const points = history.filter((r) => r[column] > 0);
    if (!points.length) return "";
    return `M${x(points[0][0])},${y(points[0][column])}` + points.slice(1).map((r) => `H${x(r[0])}V${y(r[column])}`).join("") + `H${x(work)}${end > 0 ? `V${y(end)}` : ""}`;
  };
  svg.append(s("path", { d: steps(1, report.objective_s), class: "incumbent" }), s("path", { d: steps(2, report.lower_bound_s), class: "bound" }));
  for (const [w, t] of history) svg.append(s("circle", { cx: x(w), cy: y(t), r: 3, class: "incumbent-point" }, hint(seconds(t))));
  return div(h("p", { "data-search": "" }, words), scrolled(svg), remark(`bound of ${report.bound_of ?? "the plan's form"}`));
}

function front(build, say) {
  const points = build.report.pareto ?? [];
  if (!points.length) return remark("compile --pareto makes the front.", others(build));
  const all = [...points, { name: "this plan", objective_s: build.report.objective_s, peak_bytes: Math.max(...build.report.peak_bytes), moves: [] }];
  const [tLow, tHigh] = around(all.map((p) => p.objective_s), 0.05);
  const [mLow, mHigh] = around(all.map((p) => p.peak_bytes), 0.05);
  const [x, y] = [along(mLow, mHigh), up(tLow, tHigh)];
  const svg = picture("pareto", PLOT.width, PLOT.height);
  axes(svg, x, y, [[mLow, bytes(mLow)], [mHigh, bytes(mHigh)]], [tLow, tHigh], "seconds against peak bytes");
  all.forEach((p, k) => svg.append(s("circle", { cx: x(p.peak_bytes), cy: y(p.objective_s), r: 5, class: p.name ? "incumbent-point" : "pareto-point", "data-point": k, onclick: () => say(`${seconds(p.objective_s)}, ${bytes(p.peak_bytes)}: ${p.moves.map(String).join(", ") || "no further moves"}`) },
    hint(`${p.name ?? "a point of the front"}: ${seconds(p.objective_s)}, ${bytes(p.peak_bytes)}`))));
  return scrolled(svg);
}
