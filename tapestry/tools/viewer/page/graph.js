// Picture 1: the graph, folded by repeated structure, coloured by what is cut; the width of an edge is what travels on it.
import { NONE, PALETTE, bold, bytes, clamp, count, h, hint, picture, rectangle, s, short, tail, text } from "./elements.js";
import { cursor, move } from "./cursor.js";
import { NODE, place, seen } from "./layout.js";

export const openGroups = () => new Map(cursor.open.split(",").filter(Boolean).map((p) => p.split(".").map(Number)));

export function setOpen(group, repetition) {
  const open = openGroups();
  if (repetition === null) open.delete(group);
  else open.set(group, repetition);
  move({ open: [...open].map(([k, r]) => `${k}.${r}`).join(",") });
}

// The drawing of a build's graph; `only` are operations to be marked (what differs between two builds).
export function graph(build, { select, selected, open, marked = new Set() }) {
  const shown = seen(build, open);
  const laid = place(shown);
  const svg = picture("graph", laid.width, laid.height + 8);
  for (const f of laid.frames) svg.append(frame(build, f, open));
  const most = Math.max(1, ...laid.edges.map((e) => e.moved));
  for (const e of laid.edges) svg.append(edge(e, most));
  for (const n of shown.nodes) {
    const at = laid.nodes.get(n.id);
    svg.append(n.input ? input(n, at) : n.ops ? operation(build, n.ops[0], at, { select, selected, marked }) : group(build, n, at, { open, selected, marked }));
  }
  return { svg, laid };
}

function frame(build, f, open) {
  const g = build.groups[f.group];
  const [x, y] = [f.x - f.width / 2 - 6, f.y - f.height / 2 - 14];
  const label = g.times > 1 ? `${g.label} ${open.get(f.group) + 1} of ${g.times}` : "part";
  const close = () => setOpen(f.group, null);
  return s("g", { class: "frame" }, rectangle(x, y, f.width + 12, f.height + 26, { rx: 10 }),
    text(x + 10, y + 14, `▾ ${label}`, { class: "frame-name", role: "button", tabindex: 0, onclick: close, "data-close": f.group }));
}

function edge(e, most) {
  const moved = e.moved > 0 || e.kinds.size > 0;
  const width = moved ? 1.5 + 6 * Math.sqrt(e.moved / most) : 1;
  const d = e.points.map(({ x, y }, k) => `${k ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
  const middle = e.points[Math.floor(e.points.length / 2)];
  const kinds = [...e.kinds.keys()].join(", ");
  const label = moved ? `${kinds} ${bytes(e.moved)}` : bytes(e.held);
  const names = [...e.tensors.keys()];
  const what = `${names.slice(0, 4).join(", ")}${names.length > 4 ? ` and ${names.length - 4} more` : ""}\n` +
    (moved ? `${kinds}: ${count(e.moved)} bytes on the wire` : `stays where it is: ${count(e.held)} bytes, none move`);
  return s("g", { class: moved ? "edge moved" : "edge", "data-from": e.from, "data-to": e.to }, hint(what),
    s("path", { d, "stroke-width": width.toFixed(2) }), s("path", { d, class: "wide", "stroke-width": 10 }),
    text(middle.x + 6, middle.y + 4, label, { class: "edge-name" }));
}

function input(n, at) {
  return s("g", { class: "input" }, hint(n.input), rectangle(at.x - 60, at.y - 12, 120, 24, { rx: 12 }),
    text(at.x, at.y + 4, short(n.input, 17), { "text-anchor": "middle" }));
}

const card = (x, y, kind = "card") => rectangle(x, y, NODE.width, NODE.height, { rx: 7, class: kind });

function operation(build, i, at, { select, selected, marked }) {
  const row = build.rows[i];
  const merged = build.reduces[i].map((k) => build.program.steps[k][1]);
  const second = `${row.kind} · ${row.split === "none" ? "not cut" : row.split.replace(/ \(.*?\)/g, "")}`;
  const title = [build.called(i), `writes ${row.outs.join(", ")}`, `from ${row.nodes.join(", ")}`, `split ${row.split}`].join("\n");
  const [x, y] = [at.x - NODE.width / 2, at.y - NODE.height / 2];
  const classes = ["op", i === selected && "selected", marked.has(i) && "marked"].filter(Boolean).join(" ");
  return s("g", { class: classes, "data-op": i, role: "button", onclick: () => select(i) }, hint(title),
    card(x, y),
    s("path", { d: `M${x + 7},${y}h3v${NODE.height}h-3a7,7 0 0 1 -7,-7v-${NODE.height - 14}a7,7 0 0 1 7,-7z`, fill: build.colourOf(i) }),
    text(x + 18, y + 18, tail(build.called(i), 20), { class: "name" }), text(x + 18, y + 33, short(second, 25), { class: "note" }),
    merged.length > 0 && text(x + NODE.width - 8, y + 18, "⊕", { class: "merge", "text-anchor": "end" }, hint(merged.join(", "))));
}

function group(build, n, at, { open, selected, marked }) {
  const g = build.groups[n.group];
  const rest = n.rest ?? [0, g.times - 1];
  const inside = selected >= g.first + rest[0] * g.length && selected < g.first + (rest[1] + 1) * g.length && build.groupOf[selected] === n.group;
  const reps = rest[1] - rest[0] + 1;
  const name = g.times > 1 ? `${g.label} ×${reps}` : `${g.length} operations`;
  const note = g.times > 1 ? `${g.length} operations each${n.rest ? `, ${rest[0] + 1} to ${rest[1] + 1}` : ""}` : short(`${build.called(g.first)} …`, 28);
  const first = Array.from({ length: g.length }, (_, k) => g.first + k);
  const [x, y] = [at.x - NODE.width / 2, at.y - NODE.height / 2];
  const colours = first.map((i) => build.colourOf(i));
  const bar = colours.map((c, k) => rectangle(x + 10 + (k * (NODE.width - 20)) / colours.length, y + NODE.height - 7, (NODE.width - 20) / colours.length, 3, { fill: c }));
  const toggle = () => setOpen(n.group, n.rest ? (rest[0] > (open.get(n.group) ?? 0) ? rest[0] : rest[1]) : 0);
  const differs = [...marked].some((i) => build.groupOf[i] === n.group);
  return s("g", { class: ["group", inside && "selected", differs && "marked"].filter(Boolean).join(" "), "data-group": n.group, role: "button", tabindex: 0, onclick: toggle, onkeydown: (e) => e.key === "Enter" && toggle() },
    hint(`${name}: click to open`), card(x + 4, y + 4, "card under"),
    card(x, y), text(x + 12, y + 17, `▸ ${name}`, { class: "name" }),
    text(x + 12, y + 31, note, { class: "note" }), bar);
}

// What the colours stand for.
export function legend(build) {
  const shown = build.cuts.slice(0, PALETTE.length);
  const item = (colour, label, n) => h("span", { class: "key" }, s("svg", { width: 10, height: 10 }, s("rect", { width: 10, height: 10, rx: 2, fill: colour })), `${label} `, bold(count(n)));
  const rest = build.cuts.slice(PALETTE.length).reduce((n, c) => n + c.n, 0);
  return h("div", { class: "legend" }, shown.map((c) => item(c.colour, c.split, c.n)), item(NONE, rest ? "not cut, and other cuts" : "not cut", build.uncut + rest));
}

// Pan with the pointer, zoom with the wheel or + and −; the view is a part of the drawing.
export function movable(svg, laid, holder) {
  const view = { x: 0, y: 0, scale: 1 };
  const apply = () => {
    const { clientWidth: w, clientHeight: t } = holder;
    if (!w || !t) return;
    svg.setAttribute("viewBox", `${view.x} ${view.y} ${w / view.scale} ${t / view.scale}`);
    svg.setAttribute("width", w);
    svg.setAttribute("height", t);
  };
  const fit = () => {
    const { clientWidth: w, clientHeight: t } = holder;
    view.scale = clamp(Math.min(w / laid.width, t / laid.height), 0.7, 1.1);
    view.x = laid.width / 2 - w / 2 / view.scale;
    view.y = Math.min(0, (laid.height - t / view.scale) / 2);
    apply();
  };
  const zoom = (factor, px, py) => {
    const scale = clamp(view.scale * factor, 0.04, 4);
    view.x += px / view.scale - px / scale;
    view.y += py / view.scale - py / scale;
    view.scale = scale;
    apply();
  };
  const whole = () => {
    view.scale = Math.min(1.1, holder.clientWidth / laid.width, holder.clientHeight / laid.height);
    show({ x: laid.width / 2, y: laid.height / 2 });
  };
  const show = (at) => {
    const { clientWidth: w, clientHeight: t } = holder;
    view.x = at.x - w / 2 / view.scale;
    view.y = at.y - t / 2 / view.scale;
    apply();
  };
  const inView = (at) => at.x > view.x && at.y > view.y && at.x < view.x + holder.clientWidth / view.scale && at.y < view.y + holder.clientHeight / view.scale;
  svg.addEventListener("wheel", (e) => {
    e.preventDefault();
    const { left, top } = svg.getBoundingClientRect();
    zoom(Math.exp(-e.deltaY / 400), e.clientX - left, e.clientY - top);
  }, { passive: false });
  svg.addEventListener("pointerdown", (e) => {
    const start = { x: e.clientX, y: e.clientY, vx: view.x, vy: view.y };
    const drag = (m) => {
      view.x = start.vx - (m.clientX - start.x) / view.scale;
      view.y = start.vy - (m.clientY - start.y) / view.scale;
      apply();
    };
    const stop = () => {
      removeEventListener("pointermove", drag);
      removeEventListener("pointerup", stop);
    };
    addEventListener("pointermove", drag);
    addEventListener("pointerup", stop);
  });
  return { fit, whole, zoom, show, inView };
}
