// The page: one header, the graph, the panels about the selected operation, the lanes; keys, links and export.
import { bold, button, bytes, clamp, count, div, h, preferred, quiet, remark, saveSvg, seconds, short } from "./elements.js";
import { cursor, move, onMove, restore } from "./cursor.js";
import { Build, unpack } from "./model.js";
import { graph, legend, movable, openGroups, setOpen } from "./graph.js";
import { pointAt, space, chosen } from "./space.js";
import { tensors } from "./tensors.js";
import { lanes, zoomBy } from "./lanes.js";
import { choices } from "./choices.js";
import { rewrites } from "./rewrites.js";
import { kernels } from "./kernels.js";
import { certificate, compare } from "./certificate.js";

const TABS = [["graph", "Graph"], ["space", "Index space"], ["tensors", "Tensors"], ["choices", "Alternatives"], ["kernel", "Kernel"], ["rewrites", "Rewrites"], ["certificate", "Certificate"], ["compare", "Compare"], ["lanes", "Time"]];
const HELP = [["j, k or ↓, ↑", "next and previous operation"], ["1 … 9", "panels"], ["[ and ]", "previous and next device"], ["← →, with Shift ↑ ↓", "move the point of the index space"], ["o", "open or close the layer of the operation"], ["f", "the whole graph"], ["+ and −", "zoom the time"], ["/", "search"], ["t", "light or dark"], ["b", "the other build"], ["s", "save the picture as SVG"], ["?", "this list"]];

const page = { builds: [], parts: {}, graphs: [] };
const now = () => page.builds[cursor.build] ?? page.builds[0];
const narrow = () => matchMedia("(max-width: 760px)").matches;

function say(words) {
  const note = page.parts.note;
  note.textContent = words;
  note.hidden = false;
  clearTimeout(page.saying);
  page.saying = setTimeout(() => (note.hidden = true), 8000);
}

function select(i, patch = {}) {
  move({ op: i, step: -1, at: "", row: "", col: "", depth: "", kernel: "", ...patch });
}

function header(build) {
  const r = build.report;
  const fact = (label, value, title) => h("span", { class: "fact", title }, quiet(`${label} `), bold(value));
  const mesh = build.mesh.map(([n, size]) => `${n}=${size}`).join(" ");
  const moved = r.transfers.reduce((n, t) => n + t.bytes, 0);
  const find = h("input", { type: "search", placeholder: "find an operation  /", "aria-label": "find an operation", list: "found", onkeydown: (e) => e.key === "Enter" && search(e.target.value), oninput: (e) => suggest(e.target.value) });
  page.parts.find = find;
  const builds = page.builds.length > 1 && h("span", { class: "builds" }, page.builds.map((b, k) => h("button", { "aria-pressed": String(k === cursor.build), onclick: () => other(k) }, b.name)));
  return h("header", {}, h("h1", { title: build.model }, short(build.model.split("/").pop(), 40)), builds, h("div", { class: "facts" }, fact("devices", `${build.devices} (${mesh || "one"})`), fact("nodes", count(r.nodes)), fact("operations", count(r.ops)), fact("objective", seconds(r.objective_s), `${r.objective_s} s`),
    fact("gap", `${(r.gap * 100).toFixed(2)}%`), fact("peak", bytes(Math.max(...r.peak_bytes)), `${count(Math.max(...r.peak_bytes))} bytes`), fact("moved", bytes(moved), `${count(moved)} bytes, all senders`)),
  h("div", { class: "tools" }, find, page.parts.found, button("◐", theme, "light or dark (t)"), button("?", help, "keys (?)")));
}

function suggest(words) {
  const hits = words.length > 1 ? now().find(words).slice(0, 30) : [];
  page.parts.found.replaceChildren(...hits.map((i) => h("option", { value: now().called(i) })));
}

function search(words) {
  const exact = now().named.get(words);
  const hit = exact ?? now().find(words)[0];
  if (hit === undefined) return say(`nothing is called ${words}`);
  select(hit);
  reveal(hit);
}

// Make the selected operation be seen in the graph: open its group at its repetition.
function reveal(i) {
  const build = now();
  if (build.groupOf[i] >= 0) setOpen(build.groupOf[i], build.repetition(i));
  page.graphs.forEach((g) => centre(g, true));
}

function centre(g, always) {
  const at = g.laid.nodes.get(`o${cursor.op}`) ?? ["g", "b", "a"].map((side) => g.laid.nodes.get(side + now().groupOf[cursor.op])).find(Boolean);
  if (at && (always || !g.hand.inView(at))) g.hand.show(at);
}

function other(k) {
  const name = now().called(cursor.op);
  const there = page.builds[k].named.get(name);
  move({ build: k, op: there ?? 0, step: -1, device: Math.min(cursor.device, page.builds[k].devices - 1) });
}

const panels = {
  graph: () => null,
  space: titled(space), tensors: titled(tensors), choices: titled(choices), kernel: titled(kernels), rewrites, certificate, lanes: () => null,
  compare: () => compare(page.builds, page.diff, (name) => select(now().makers.get(name) ?? cursor.op)),
};

// A panel about the selected operation, below what it is called.
function titled(panel) {
  return (build) => title(build, panel(build, cursor.op, say));
}

function title(build, body) {
  const row = build.rows[cursor.op];
  const words = [row.kind, `split ${row.split}`, `block ${row.block.join("×") || "()"}`, `kernels ${seconds(row.seconds)}`, row.transfer_seconds > 0 && `fetching ${seconds(row.transfer_seconds)}`].filter(Boolean).join(" · ");
  return div(h("h2", { "data-op": cursor.op }, build.called(cursor.op)), h("p", { class: "words" }, words), remark(`writes ${row.outs.join(", ")}`, row.nodes.length > 0 && `, from ${row.nodes.slice(0, 6).join(", ")}${row.nodes.length > 6 ? ` and ${row.nodes.length - 6} more` : ""}`), body);
}

const refit = () => page.graphs.forEach((g) => (g.hand.fit(), centre(g, false)));
const whole = () => page.graphs.forEach((g) => g.hand.whole());
const zoom = (factor) => () => page.graphs.forEach((g) => g.hand.zoom(factor, 200, 150));

function drawGraphs() {
  const holder = page.parts.graph;
  const shown = cursor.tab === "compare" ? page.builds.map((b, k) => [b, k]) : [[now(), cursor.build]];
  const differ = new Set(page.diff?.operations.map((r) => r.name));
  holder.replaceChildren(...shown.map(([b, k]) => {
    const mine = cursor.tab === "compare" ? b.named.get(now().called(cursor.op)) : cursor.op;
    const marked = new Set(page.diff ? [...differ].map((n) => b.makers.get(n)) : []);
    const drawn = graph(b, { select: (i) => (k === cursor.build ? select(i) : select(page.builds[cursor.build].named.get(b.called(i)) ?? cursor.op)), selected: mine, open: openGroups(), marked });
    const box = h("div", { class: "canvas", "data-build": k }, drawn.svg);
    return Object.assign(box, { drawn });
  }));
  page.graphs = [...holder.children].map((box) => ({ ...box.drawn, hand: movable(box.drawn.svg, box.drawn.laid, box) }));
  page.graphs.forEach((g) => g.hand.fit());
  page.parts.legend.replaceChildren(legend(now()), h("span", { class: "controls" }, button("⤢", whole, "the whole graph (f)"), button("+", zoom(1.3)), button("−", zoom(1 / 1.3)), saver(() => page.graphs[0]?.svg)));
}

function drawPanel() {
  const body = panels[cursor.tab]?.(now());
  const at = page.parts.panel.scrollTop;
  page.parts.panel.replaceChildren(...[body].filter(Boolean));
  page.parts.panel.scrollTop = at;
  for (const svg of page.parts.panel.querySelectorAll("svg.picture")) svg.after(saver(() => svg));
  for (const b of page.parts.tabs.children) b.setAttribute("aria-selected", String(b.dataset.tab === cursor.tab));
}

const saver = (svg) => h("button", { class: "save", title: "save as SVG", onclick: () => svg() && saveSvg(svg()) }, "svg");

function drawLanes() {
  const box = page.parts.lanes;
  box.replaceChildren(lanes(now(), Math.max(680, box.clientWidth - 24)));
  for (const svg of box.querySelectorAll("svg.picture")) box.querySelector(".controls").append(saver(() => svg));
}

function theme() {
  move({ theme: document.documentElement.dataset.theme === "dark" ? "light" : "dark" });
}

function setTheme() {
  document.documentElement.dataset.theme = cursor.theme || preferred();
}

const help = () => page.parts.help.toggleAttribute("hidden");

function build() {
  const p = page.parts;
  p.found = h("datalist", { id: "found" });
  p.head = h("div", {});
  p.graph = h("div", { class: "graph-box", tabindex: -1 });
  p.legend = h("div", { class: "legend-box" });
  const tabs = TABS.filter(([k]) => k !== "compare" || page.builds.length > 1);
  p.tabs = h("nav", { role: "tablist" }, tabs.map(([k, label]) => h("button", { role: "tab", "data-tab": k, onclick: () => move({ tab: k }) }, label)));
  p.panel = h("div", { class: "panel", role: "tabpanel", tabindex: 0 });
  p.lanes = h("section", { class: "lanes", "aria-label": "time" });
  p.note = h("div", { class: "say", role: "status", hidden: true });
  p.help = h("div", { class: "help", hidden: true, onclick: help }, h("h2", {}, "Keys"), h("dl", {}, HELP.map(([k, w]) => [h("dt", {}, k), h("dd", {}, w)])));
  document.getElementById("page").append(p.head, h("main", {}, h("section", { class: "graph", "aria-label": "graph" }, p.legend, p.graph), h("section", { class: "detail" }, p.tabs, p.panel), p.lanes), p.note, p.help);
}

// An open layer follows the cursor to its own repetition.
function follow() {
  const k = now().groupOf[cursor.op];
  if (k >= 0 && openGroups().has(k)) setOpen(k, now().repetition(cursor.op));
}

function redraw(changed) {
  const has = (...keys) => keys.some((k) => changed.has(k));
  if (has("theme")) setTheme();
  document.body.dataset.tab = cursor.tab;
  if (has("build")) p_head();
  if (has("op")) follow();
  if (has("build", "open", "tab") && (has("build", "open") || page.builds.length > 1)) {
    drawGraphs();
    page.graphs.forEach((g) => centre(g, has("open")));
  } else if (has("op")) mark();
  else if (has("tab") && narrow()) refit();
  if (has("build", "op", "tab", "device", "step", "rewrite", "change", "row", "col", "depth", "at", "kernel", "theme")) drawPanel();
  if (has("build", "op", "step", "zoom", "tab", "theme")) drawLanes();
}

const p_head = () => page.parts.head.replaceChildren(header(now()));

// The mark of the selected operation moves, without another layout.
function mark() {
  for (const g of page.graphs) {
    for (const n of g.svg.querySelectorAll(".op")) n.classList.toggle("selected", Number(n.dataset.op) === cursor.op);
    for (const n of g.svg.querySelectorAll(".group")) n.classList.toggle("selected", Number(n.dataset.group) === now().groupOf[cursor.op]);
    centre(g, false);
  }
}

function movePoint(rows, cols) {
  const b = now();
  const shape = b.shapeOf(cursor.op);
  const { row, col } = chosen(b, cursor.op);
  const at = pointAt(shape);
  const step = (k, by) => {
    if (k !== undefined) at[k] = clamp(at[k] + by * Math.max(1, Math.floor(shape.dims[k][1] / 64)), 0, shape.dims[k][1] - 1);
  };
  step(row, rows);
  step(col, cols);
  move({ at: at.join(".") });
}

function keys(e) {
  if (e.target.matches("input, select, textarea")) return e.key === "Escape" && e.target.blur();
  if (e.ctrlKey || e.metaKey || e.altKey) return undefined;
  const b = now();
  const next = (by) => select(clamp(cursor.op + by, 0, b.ops.length - 1));
  const device = (by) => move({ device: clamp(cursor.device + by, -1, b.devices - 1) });
  const k = b.groupOf[cursor.op];
  const acts = {
    j: () => next(1), k: () => next(-1), ArrowDown: () => (e.shiftKey ? movePoint(1, 0) : next(1)), ArrowUp: () => (e.shiftKey ? movePoint(-1, 0) : next(-1)), ArrowRight: () => movePoint(0, 1), ArrowLeft: () => movePoint(0, -1),
    "]": () => device(1), "[": () => device(-1),
    o: () => (openGroups().has(k) ? setOpen(k, null) : reveal(cursor.op)),
    f: whole, "/": () => page.parts.find.focus(), t: theme, "?": help, "+": () => zoomBy(0.5), "-": () => zoomBy(2),
    b: () => page.builds.length > 1 && other(1 - cursor.build), s: () => saveSvg(page.parts.panel.querySelector("svg.picture") ?? page.graphs[0].svg), Escape: () => ((page.parts.help.hidden = true), move({ at: "", device: -1 })),
  };
  const tab = Number(e.key) > 0 && [...page.parts.tabs.children].filter((t) => t.offsetParent)[Number(e.key) - 1];
  const act = tab ? () => tab.click() : acts[e.key];
  if (!act) return undefined;
  e.preventDefault();
  return act();
}

async function start() {
  const data = await unpack(document.getElementById("data").textContent);
  page.builds = data.builds.map((b) => new Build(b));
  page.diff = data.diff;
  if (page.builds.length > 1) page.builds.forEach((b, k) => (k ? Object.assign(b, { cuts: page.builds[0].cuts, colours: page.builds[0].colours }) : b.colour(page.builds.slice(1))));
  const refused = page.builds.findIndex((b) => b.certificate.refused);
  if (page.diff) cursor.tab = "compare";
  if (refused >= 0) openRefused(refused);
  restore(location.hash);
  cursor.build = clamp(cursor.build, 0, page.builds.length - 1);
  cursor.op = clamp(cursor.op, 0, now().ops.length - 1);
  cursor.device = clamp(cursor.device, -1, now().devices - 1);
  if (!panels[cursor.tab] || (cursor.tab === "compare" && page.builds.length < 2)) cursor.tab = "space";
  if (narrow() && !location.hash && !page.diff && refused < 0) cursor.tab = "graph";
  if (!location.hash && refused < 0) cursor.op = heaviest(now());
  setTheme();
  build();
  follow();
  document.body.dataset.tab = cursor.tab;
  p_head();
  drawGraphs();
  drawPanel();
  drawLanes();
  page.graphs.forEach((g) => centre(g, false));
  onMove(redraw);
  addEventListener("keydown", keys);
  addEventListener("resize", () => (refit(), drawLanes()));
  addEventListener("hashchange", () => (restore(location.hash), redraw(new Set(Object.keys(cursor)))));
  requestAnimationFrame(() => setTimeout(() => document.documentElement.setAttribute("data-drawn", performance.now().toFixed(0))));
}

// A refused plan opens at its witness.
function openRefused(k) {
  const { op, device, step } = page.builds[k].certificate.refused;
  Object.assign(cursor, { build: k, tab: "certificate", op: op ?? 0, device: device ?? -1, step: step ?? -1 });
}

// The page opens on the operation that takes the most time with all that is fetched for it.
function heaviest(b) {
  const cost = (r) => r.seconds + r.transfer_seconds;
  return b.rows.reduce((best, r, i) => (cost(r) > cost(b.rows[best]) ? i : best), 0);
}

start();
