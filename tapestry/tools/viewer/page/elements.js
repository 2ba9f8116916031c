// Elements, figures and colours. Text of a build only ever becomes a text node or an attribute, never markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) if (child != null && child !== false) node.append(child);
  return node;
}

export const h = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

export const div = (...children) => h("div", {}, children);
export const bold = (...children) => h("b", {}, children);
export const quiet = (...children) => h("span", { class: "quiet" }, children);
export const remark = (...children) => h("p", { class: "quiet" }, children);
export const scrolled = (...children) => h("div", { class: "scroll" }, children);
export const controls = (...children) => h("div", { class: "controls" }, children);
export const heading = (words) => h("h3", {}, words);
export const cell = (...children) => h("td", {}, children);
export const amount = (figure) => h("td", { class: "n" }, figure);
export const hint = (words) => s("title", {}, words);
export const button = (label, onclick, title) => h("button", { onclick, title }, label);

// A picture; its name is what an exported file is called.
export function picture(name, width, height, ...children) {
  const marks = s("pattern", { id: `hatch-${name}`, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    s("rect", { width: 5, height: 5, class: "skip-ground" }), s("line", { x1: 0, y1: 0, x2: 0, y2: 5, class: "skip-line" }));
  return s("svg", { class: "picture", "data-name": name, viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": name },
    s("defs", {}, marks), children);
}

export const text = (x, y, content, attributes) => s("text", { x, y, ...attributes }, String(content));
export const rectangle = (x, y, width, height, attributes, ...children) => s("rect", { x, y, width, height, ...attributes }, children);
export const axisText = (x, y, content, anchor, attributes) => text(x, y, content, { class: "axis", "text-anchor": anchor, ...attributes });
export const onTile = (x, y, content) => text(x, y, content, { class: "on-tile", "text-anchor": "middle" });

export function table(heads, rows, attributes) {
  return scrolled(h("table", attributes, h("thead", {}, h("tr", {}, heads.map((c) => h("th", {}, c)))),
    h("tbody", {}, rows)));
}

// Figures, written as `tapestry explain` writes them.

export function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(n) < 1024 || unit === "GiB") {
      const digits = unit === "B" ? 0 : 2;
      return `${n.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
    }
    n /= 1024;
  }
}

export function seconds(t) {
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]) {
    if (Math.abs(t) >= scale * 0.9995) {
      const value = t / scale;
      return `${Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)))} ${unit}`;
    }
  }
  return "0 s";
}

export const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
export const signed = (t) => (t >= 0 ? "+" : "−") + seconds(Math.abs(t));
export const count = (n) => n.toLocaleString("en-US");
export const tally = (counts, between) => Object.entries(counts).map(([what, n]) => `${count(n)}${between}${what}`).join(", ");
export const shapeText = (shape) => (shape.length ? shape.join("×") : "()");
export const boxText = (box) => `[${box.map(([a, b]) => `${a}:${b}`).join(", ")}]`;
export const short = (name, most) => (name.length <= most ? name : `${name.slice(0, Math.ceil(most * 0.4))}…${name.slice(1 - Math.floor(most * 0.6))}`);

// The end of a name, which says more than its beginning: layers.3.self_attn.q_proj.
export const tail = (name, most) => (name.length <= most ? name : `…${name.slice(1 - most)}`);

// Colours of Okabe and Ito, which colour-blind people tell apart, and more of equal lightness behind them.
export const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8566c9", "#7d8a2e"];
export const NONE = "#8c959f";
export const preferred = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
export const HALO = "#f0e442"; // the one of them that is no device's
export const deviceColour = (d) => PALETTE[d % PALETTE.length];

// From blue (measured faster than estimated) over white to orange (slower), by the logarithm of the ratio; a factor of 4 is full.
export function errorColour(ratio) {
  const at = clamp(Math.log(ratio) / Math.log(4), -1, 1);
  const [r, g, b] = at < 0 ? [0, 114, 178] : [213, 94, 0];
  const mix = (c) => Math.round(235 + (c - 235) * Math.abs(at));
  return `rgb(${mix(r)}, ${mix(g)}, ${mix(b)})`;
}

// A picture as a file of its own, with the colours that it has on the page.
const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "fill-opacity", "font-size", "font-weight", "font-family", "text-anchor"];

function standalone(svg) {
  const copy = svg.cloneNode(true);
  const [from, to] = [svg, copy].map((root) => [root, ...root.querySelectorAll("*")]);
  from.forEach((node, k) => {
    const style = getComputedStyle(node);
    for (const name of KEPT) to[k].setAttribute(name, style.getPropertyValue(name));
    to[k].removeAttribute("class");
  });
  copy.setAttribute("xmlns", SVG);
  const { x, y, width, height } = svg.viewBox.baseVal;
  copy.insertBefore(rectangle(x, y, width, height, { fill: getComputedStyle(document.body).backgroundColor }), copy.children[1] ?? null);
  return new XMLSerializer().serializeToString(copy);
}

export function saveSvg(svg) {
  const url = URL.createObjectURL(new Blob([standalone(svg)], { type: "image/svg+xml" }));
  h("a", { href: url, download: `${svg.dataset.name}.svg` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
