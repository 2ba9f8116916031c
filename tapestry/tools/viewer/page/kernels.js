// Picture 7: the source of a kernel beside the block that made it; what one speaks of lights up in the other.
import { bold, boxText, controls, div, h, quiet, remark } from "./elements.js";
import { cursor, move } from "./cursor.js";

export function kernels(build, i) {
  const names = build.ops[i].kernels;
  if (!names.length) return remark("No generated kernel computes this operation: ", build.rows[i].opaque_because ?? "an opaque node, or nothing that Triton can express", ".");
  const name = names.includes(cursor.kernel) ? cursor.kernel : names[0];
  const kernel = build.kernels[name];
  const shape = build.shapeOf(i);
  const source = h("pre", { class: "source", "data-kernel": name }, kernel.source.split("\n").map((line, n) => h("div", { "data-line": n + 1 }, line || " ")));
  const block = h("pre", { class: "source block" }, marked(build.ops[i].text));
  for (const [from, to] of [[source, block], [block, source]]) {
    from.addEventListener("pointerover", (e) => light(e, from, to, spoken(build, i, shape)));
    from.addEventListener("pointerleave", () => [from, to].forEach(dark));
  }
  const tabs = names.map((k) => h("button", { "aria-pressed": String(k === name), onclick: () => move({ kernel: k }) }, k));
  return div(controls(tabs, quiet(`${kernel.mode} of block ${boxText(kernel.block)}; ${sharers(build, name)} operation(s) use it`)), h("div", { class: "kernel" }, div(bold("the block"), block), div(bold(name), source)));
}

const sharers = (build, name) => build.ops.filter((op) => op.kernels.includes(name)).length;
const WORD = /[A-Za-z_][\w.]*/g;

// The block's text with a span around every word, so that each can be pointed at.
function marked(content) {
  const out = [];
  let at = 0;
  for (const m of content.matchAll(WORD)) {
    out.push(content.slice(at, m.index), h("span", { "data-word": m[0] }, m[0]));
    at = m.index + m[0].length;
  }
  return [...out, content.slice(at)];
}

// Names of the block, longest first, as the kernel's identifiers spell them: the tensor's name with what cannot stand in one as _.
function spoken(build, i, shape) {
  const tensors = [...build.ops[i].ins, ...build.rows[i].outs].map((t) => ({ word: t, code: t.replace(/^[^A-Za-z_]+/, "").replace(/\W/g, "_") }));
  const aliases = shape.reads.map((r, k) => ({ word: r.alias, code: (build.ops[i].ins[k] ?? "").replace(/\W/g, "_") }));
  const dims = shape.dims.map(([d]) => ({ word: d, code: d }));
  return [...tensors, ...aliases, ...dims, { word: shape.kind, code: "acc" }].filter((n) => n.code).sort((a, b) => b.code.length - a.code.length);
}

// Whether an identifier of the kernel is of a name: the name, or that with an ending such as _ptr, _desc or _0; or without its first parts.
function speaks(identifier, code) {
  const stem = identifier.replace(/(_ptr|_desc|_in|_first|_\d+)+$/, "");
  return stem === code || identifier === code || (stem.length > 3 && code.endsWith(`_${stem}`)) || (code.length <= 2 && stem.split("_").includes(code));
}

function light(e, from, to, names) {
  [from, to].forEach(dark);
  const unit = e.target.closest("[data-line], [data-word]");
  if (!unit) return;
  if (unit.dataset.line) {
    const words = new Set((unit.textContent.match(WORD) ?? []).map((w) => w.split(".")[0]));
    const hit = new Set(names.filter((n) => [...words].some((w) => speaks(w, n.code))).map((n) => n.word));
    unit.classList.add("lit");
    for (const span of to.querySelectorAll("[data-word]")) if (hit.has(span.dataset.word)) span.classList.add("lit");
    return;
  }
  const codes = names.filter((n) => n.word === unit.dataset.word).map((n) => n.code);
  unit.classList.add("lit");
  for (const line of to.querySelectorAll("[data-line]")) {
    const words = line.textContent.match(WORD) ?? [];
    if (words.some((w) => codes.some((c) => speaks(w, c) || w === c))) line.classList.add("lit");
  }
}

const dark = (root) => root.querySelectorAll(".lit").forEach((n) => n.classList.remove("lit"));
