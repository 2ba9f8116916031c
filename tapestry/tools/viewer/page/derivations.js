// The equivalent forms of a graph and the rewrites between them (`tapestry rules --derive`): how many, how deep, what each costs,
// what was not followed. A form that is selected shows its text and how it was made.
import { amount, bold, bytes, cell, count, div, h, hint, picture, preferred, quiet, rectangle, remark, s, saveSvg, seconds, table, tally, text } from "./elements.js";

const NODE = { width: 132, height: 40 };
const SHOWN = 160; // forms that are drawn: the cheapest, and those that they were made of

// The forms that are drawn: all, or the cheapest with all before them.
function drawn(forms) {
  const kept = new Set();
  const take = (f) => { for (let at = f; at && !kept.has(at.form); at = forms[at.of]) kept.add(at.form); };
  for (const f of cheapest(forms)) {
    if (kept.size < SHOWN) take(f);
  }
  take(extreme(forms, "peak_bytes"));
  return forms.filter((f) => kept.has(f.form));
}

const cheapest = (forms) => [...forms].sort((a, b) => a.seconds - b.seconds || a.form - b.form);
const extreme = (forms, key) => forms.reduce((best, f) => (f[key] < best[key] ? f : best));

// A move in a few letters: its rule, and what it cuts.
function short(by) {
  const rule = by.split("@")[0];
  const of = Object.fromEntries([...by.matchAll(/(\w+)=([^,}]+)/g)].map((m) => [m[1], m[2]]));
  return of.dim ? `${rule} ${of.dim}${of.parts ? `/${of.parts}` : ""}` : rule;
}

function graph(data, select) {
  const forms = drawn(data.forms);
  const there = new Set(forms.map((f) => f.form));
  const g = new dagre.graphlib.Graph({ multigraph: true });
  g.setGraph({ rankdir: "LR", nodesep: 10, ranksep: 130, marginx: 12, marginy: 14 });
  g.setDefaultEdgeLabel(() => ({}));
  for (const f of forms) g.setNode(f.form, { ...NODE });
  const edges = [...forms.filter((f) => f.of !== null).map((f) => ({ of: f.of, form: f.form, by: f.by })), ...data.again.map((e) => ({ ...e, again: true }))];
  const shown = edges.filter((e) => there.has(e.of) && there.has(e.form) && e.of !== e.form);
  shown.forEach((e, k) => g.setEdge(e.of, e.form, { width: 8, height: 8 }, `e${k}`));
  dagre.layout(g);
  const [fast, small] = [extreme(data.forms, "seconds").form, extreme(data.forms, "peak_bytes").form];
  const lines = shown.map((e, k) => {
    const points = g.edge(e.of, e.form, `e${k}`).points;
    const end = points.at(-1);
    return s("g", { class: "edge way", "data-of": e.of, "data-form": e.form }, hint(e.by), s("path", { d: `M${points.map((p) => `${p.x},${p.y}`).join("L")}`, "stroke-dasharray": e.again ? "4 3" : null }),
      !e.again && text(end.x - 8, end.y - 4, short(e.by), { class: "note", "text-anchor": "end" }));
  });
  const cards = forms.map((f) => {
    const { x, y } = g.node(f.form);
    const marks = [[fast, "#0072b2"], [small, "#e69f00"]].filter(([n]) => n === f.form);
    return s("g", { class: "op form", "data-form": f.form, tabindex: 0, role: "button", onclick: () => select(f.form), onkeydown: (e) => e.key === "Enter" && select(f.form) }, hint(f.by ?? "as written"),
      s("rect", { class: "card", x: x - NODE.width / 2, y: y - NODE.height / 2, ...NODE, rx: 7 }), marks.map(([, fill], k) => rectangle(x - 58 + 60 * k, y + 14, 56, 3, { fill })),
      text(x - 58, y - 4, `${f.form}: ${seconds(f.seconds)}`, { class: "name" }), text(x - 58, y + 10, bytes(f.peak_bytes), { class: "note" }));
  });
  const { width, height } = g.graph();
  return { svg: picture("forms", Math.max(40, width), Math.max(40, height), lines, cards), left: data.forms.length - forms.length };
}

function detail(data, number) {
  const f = data.forms[number];
  const from = data.forms[0];
  const made = f.by === null ? "as written" : `of form ${f.of} by ${f.by}`;
  const ways = data.again.filter((e) => e.form === number);
  const command = f.moves.length > 0 && h("pre", { class: "source block" }, `tapestry opt GRAPH.tap ${f.moves.map((m) => `-r '${m}'`).join(" ")}`);
  return div(h("h2", { "data-form": number }, `Form ${number}`), h("p", { class: "words" }, made), h("p", {}, `${seconds(f.seconds)} (${(f.seconds / from.seconds).toFixed(2)} of form 0), ${bytes(f.peak_bytes)}, ${count(f.depth)} moves`),
    ways.length > 0 && remark(`also ${ways.map((e) => `of ${e.of} by ${e.by}`).join("; ")}`), command, h("pre", { class: "source block" }, f.graph));
}

export function derivations(data, name) {
  const panel = h("div", { class: "panel", tabindex: 0 });
  const list = table(["form", "time", "memory", "moves", "by"], cheapest(data.forms).map((f) => h("tr", { role: "button", "data-form": f.form, onclick: () => select(f.form) }, amount(f.form), amount(seconds(f.seconds)), amount(bytes(f.peak_bytes)), amount(f.depth), cell(f.by ?? "as written"))), { class: "choices" });
  const { svg, left } = graph(data, select);
  function select(number) {
    panel.replaceChildren(detail(data, number), list);
    panel.scrollTop = 0;
    for (const g of document.querySelectorAll("[data-form]")) g.classList.toggle("selected", Number(g.dataset.form) === number);
  }
  const pruned = tally(data.pruned, " ") || "nothing";
  const mesh = Object.entries(data.mesh).map(([n, size]) => `${n}=${size}`).join(" ");
  const facts = [["forms", count(data.forms.length)], ["moves, at most", count(data.deepest)], ["other ways", count(data.again.length)], ["not followed", pruned], ["devices", mesh]];
  const key = `blue: fastest, orange: least memory; dashed: another way to a form${left ? `; ${count(left)} dearer forms are in the list alone` : ""}`;
  document.documentElement.dataset.theme = preferred();
  document.getElementById("page").append(
    h("header", {}, h("h1", {}, name), h("div", { class: "facts" }, facts.map(([label, value]) => h("span", { class: "fact", "data-fact": label }, quiet(`${label} `), bold(value))))),
    h("main", { class: "forms" }, h("section", { class: "graph", "aria-label": "graph of rewrites" }, h("p", { class: "legend-box quiet" }, key, h("button", { class: "save", title: "save as SVG", onclick: () => saveSvg(svg) }, "svg")), h("div", { class: "graph-box scroll" }, svg)), h("section", { class: "detail" }, panel)));
  document.body.dataset.tab = "graph";
  select(extreme(data.forms, "seconds").form);
  document.querySelector(".form.selected").scrollIntoView({ block: "center", inline: "nearest" });
  document.documentElement.setAttribute("data-drawn", performance.now().toFixed(0));
}
