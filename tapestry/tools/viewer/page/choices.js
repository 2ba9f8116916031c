// Pictures 5 and 6b: what else an operation could be and what that costs; the search: incumbent, bound, and the Pareto front.
import { bytes, h, picture, s, seconds, signed, table, text } from "./elements.js";

export function choices(build, i, say) {
  const row = build.rows[i];
  const own = h("tr", { class: "selected" }, h("td", {}, row.split), h("td", { class: "n" }, "chosen"), h("td", {}, pins(build.ops[i].pins, say)));
  const rows = build.ops[i].others.map((o) => h("tr", { "data-more": o.seconds_more, onclick: () => copy(o.pins, say) }, h("td", {}, o.split), h("td", { class: "n" }, signed(o.seconds_more)), h("td", {}, pins(o.pins, say))));
  const best = row.next_best;
  return h("div", {}, h("p", {}, row.split_words ?? ""), table(["split", "whole plan", "a click copies"], [own, ...rows], { class: "choices" }), best ? because(best) : h("p", { class: "quiet" }, "No other split is possible."),
    h("h3", {}, "The search"), search(build), h("h3", {}, "Latency against memory"), front(build, say));
}

const option = (pin) => `--pin '${pin}'`;
const pins = (list, say) => (list.length ? h("code", { role: "button", tabindex: 0, onclick: (e) => (e.stopPropagation(), copy(list, say)) }, list.map(option).join(" ")) : h("span", { class: "quiet" }, "cannot be pinned"));

function copy(list, say) {
  if (!list.length) return;
  const words = list.map(option).join(" ");
  navigator.clipboard?.writeText(words).catch(() => {});
  say(words);
}

function because(best) {
  const part = (p) => `${signed(p.seconds_more)} for ${p.what}${p.tensor ? ` of '${p.tensor}'` : ""}${p.bytes_more ? ` (${p.bytes_more > 0 ? "+" : "−"}${bytes(Math.abs(p.bytes_more))})` : ""}`;
  return h("p", { class: "quiet" }, `next best ${best.split}, ${signed(best.seconds_more)}: ${best.parts.map(part).join(", ")}`);
}

const PLOT = { width: 420, height: 150, left: 64, bottom: 26 };

function axes(svg, x, y, xs, ys, label) {
  for (const v of ys) svg.append(s("line", { x1: PLOT.left, x2: PLOT.width - 8, y1: y(v), y2: y(v), class: "tick" }), text(PLOT.left - 5, y(v) + 4, seconds(v), { class: "axis", "text-anchor": "end" }));
  xs.forEach(([v, words], k) => svg.append(text(x(v), PLOT.height - 8, words, { class: "axis", "text-anchor": k ? "end" : "start" })));
  svg.append(text(PLOT.left, 10, label, { class: "axis" }));
}

// Plans as they were found and the bound then, over the work of the search.
function search(build) {
  const report = build.report;
  const history = report.search?.history ?? [];
  const words = `${{ stalled: "stopped without closing the gap" }[report.search?.ended] ?? report.search?.ended ?? ""}: objective ${seconds(report.objective_s)}, lower bound ${seconds(report.lower_bound_s)}, gap ${(report.gap * 100).toFixed(2)}%`;
  if (history.length < 1) return h("p", { "data-search": "" }, words);
  const work = Math.max(report.search.work, history[history.length - 1][0], 1);
  const values = history.flatMap(([, t, b]) => [t, b]).concat(report.objective_s, report.lower_bound_s).filter((v) => v > 0);
  const [low, high] = [Math.min(...values) * 0.98, Math.max(...values) * 1.02];
  const x = (w) => PLOT.left + (w / work) * (PLOT.width - PLOT.left - 12);
  const y = (t) => 16 + ((high - t) / (high - low || 1)) * (PLOT.height - 16 - PLOT.bottom);
  const svg = picture("search", PLOT.width, PLOT.height);
  axes(svg, x, y, [[0, "0"], [work, `${(work / 1e9).toPrecision(3)} s of work`]], [low, (low + high) / 2, high], "incumbent and bound");
  const steps = (column, end) => {
    const points = history.filter((r) => r[column] > 0);
    if (!points.length) return "";
    return `M${x(points[0][0])},${y(points[0][column])}` + points.slice(1).map((r) => `H${x(r[0])}V${y(r[column])}`).join("") + `H${x(work)}${end > 0 ? `V${y(end)}` : ""}`;
  };
  svg.append(s("path", { d: steps(1, report.objective_s), class: "incumbent" }), s("path", { d: steps(2, report.lower_bound_s), class: "bound" }));
  for (const [w, t] of history) svg.append(s("circle", { cx: x(w), cy: y(t), r: 3, class: "incumbent-point" }, s("title", {}, seconds(t))));
  return h("div", {}, h("p", { "data-search": "" }, words), h("div", { class: "scroll" }, svg), h("p", { class: "quiet" }, `bound of ${report.bound_of ?? "the plan's form"}`));
}

function front(build, say) {
  const points = build.report.pareto ?? [];
  if (!points.length) return h("p", { class: "quiet" }, "compile --pareto makes the front.", others(build));
  const all = [...points, { name: "this plan", objective_s: build.report.objective_s, peak_bytes: Math.max(...build.report.peak_bytes), moves: [] }];
  const [tLow, tHigh] = [0.95, 1.05].map((f, k) => f * Math[k ? "max" : "min"](...all.map((p) => p.objective_s)));
  const [mLow, mHigh] = [0.95, 1.05].map((f, k) => f * Math[k ? "max" : "min"](...all.map((p) => p.peak_bytes)));
  const x = (m) => PLOT.left + ((m - mLow) / (mHigh - mLow || 1)) * (PLOT.width - PLOT.left - 12);
  const y = (t) => 16 + ((tHigh - t) / (tHigh - tLow || 1)) * (PLOT.height - 16 - PLOT.bottom);
  const svg = picture("pareto", PLOT.width, PLOT.height);
  axes(svg, x, y, [[mLow, bytes(mLow)], [mHigh, bytes(mHigh)]], [tLow, tHigh], "seconds against peak bytes");
  all.forEach((p, k) => svg.append(s("circle", { cx: x(p.peak_bytes), cy: y(p.objective_s), r: 5, class: p.name ? "incumbent-point" : "pareto-point", "data-point": k, onclick: () => say(`${seconds(p.objective_s)}, ${bytes(p.peak_bytes)}: ${p.moves.map(String).join(", ") || "no further moves"}`) },
    s("title", {}, `${p.name ?? "a point of the front"}: ${seconds(p.objective_s)}, ${bytes(p.peak_bytes)}`))));
  return h("div", {}, h("div", { class: "scroll" }, svg), others(build));
}

function others(build) {
  const rows = (build.report.alternatives ?? []).map((a) => h("tr", {}, h("td", {}, a.name), h("td", { class: "n" }, seconds(a.objective_s)), h("td", {}, a.fits === false ? "does not fit" : a.fits === null ? "not worked out" : "fits")));
  return rows.length > 0 && table(["whole-graph plan", "objective", "memory"], rows);
}
