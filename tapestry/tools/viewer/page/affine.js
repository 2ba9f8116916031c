// Reads evaluated: index expressions at points and over boxes, cells of footprints. Boxes are half-open, as in the plan.

export const size = (box) => box.reduce((n, [a, b]) => n * Math.max(0, b - a), 1);
const mod = (a, k) => ((a % k) + k) % k;

export function value([constant, terms], point) {
  let out = constant;
  for (const [coef, atom] of terms) {
    if (typeof atom === "number") out += coef * point[atom];
    else {
      const inner = value(atom[1], point);
      out += coef * (atom[0] === "floor" ? Math.floor(inner / atom[2]) : mod(inner, atom[2]));
    }
  }
  return out;
}

// Least and greatest value over a box of inclusive intervals: exact for sums and floors, a whole period for a modulo that wraps.
function bounds([constant, terms], box) {
  let [low, high] = [constant, constant];
  for (const [coef, atom] of terms) {
    const [a, b] = typeof atom === "number" ? box[atom] : divided(atom, box);
    low += coef * (coef > 0 ? a : b);
    high += coef * (coef > 0 ? b : a);
  }
  return [low, high];
}

function divided([kind, inner, by], box) {
  const [a, b] = bounds(inner, box);
  const [first, last] = [Math.floor(a / by), Math.floor(b / by)];
  return kind === "floor" ? [first, last] : first === last ? [mod(a, by), mod(b, by)] : [0, by - 1];
}

export const holds = ([aff, op], point) => (op === "ge" ? value(aff, point) >= 0 : value(aff, point) === 0);

// The box of cells that a box of the index space names, before what is outside of the tensor is left out; null where none is.
export function footprint(read, block) {
  if (size(block) === 0) return null;
  const box = tightened(read, block.map(([a, b]) => [a, b - 1]));
  if (box === null) return null;
  return read.index.map((e, axis) => {
    if (e === null) return [0, read.type[1][axis]];
    const [low, high] = bounds(e, box);
    return [low, high + 1];
  });
}

// The part of a box in which guards of one dimension can hold.
function tightened(read, box) {
  const out = box.map((b) => [...b]);
  for (const [[constant, terms], op] of read.when ?? []) {
    if (terms.length !== 1 || typeof terms[0][1] !== "number") continue;
    const [coef, dim] = terms[0];
    const edge = -constant / coef;
    if (op === "eq") [out[dim][0], out[dim][1]] = [Math.max(out[dim][0], Math.ceil(edge)), Math.min(out[dim][1], Math.floor(edge))];
    else if (coef > 0) out[dim][0] = Math.max(out[dim][0], Math.ceil(edge));
    else out[dim][1] = Math.min(out[dim][1], Math.floor(edge));
    if (out[dim][0] > out[dim][1]) return null;
  }
  return out;
}

export function clip(box, other) {
  if (!box || !other) return null;
  const out = box.map(([a, b], k) => [Math.max(a, other[k][0]), Math.min(b, other[k][1])]);
  return out.some(([a, b]) => a >= b) ? null : out;
}

export const whole = (shape) => shape.map((n) => [0, n]);

// The cells that one point of the map dimensions reads, exactly, and whether they count where guards of the body leave points out;
// null where they are too many to be listed.
const MOST = 6000;

export function cells(read, point, { dims, skips }, block) {
  const moving = dims.map(([, , role], k) => (role === "map" ? -1 : k)).filter((k) => k >= 0 && (names(read, k) || skips.some((g) => within(g[0], k))));
  const total = moving.reduce((n, k) => n * (block[k][1] - block[k][0]), 1);
  if (total > MOST) return null;
  const out = new Map();
  const at = [...point];
  const visit = (depth) => {
    if (depth < moving.length) {
      const k = moving[depth];
      for (let v = block[k][0]; v < block[k][1]; v++) {
        at[k] = v;
        visit(depth + 1);
      }
      return;
    }
    if ((read.when ?? []).every((g) => holds(g, at)) && read.index.every((e) => e !== null)) {
      const cell = read.index.map((e) => value(e, at));
      const counts = skips.every((g) => holds(g, at)) || out.get(cell.join())?.counts === true;
      out.set(cell.join(), { cell, counts });
    }
  };
  visit(0);
  return [...out.values()];
}

// Whether a read depends on a dimension.
function names(read, dim) {
  return [...read.index, ...(read.when ?? []).map(([e]) => e)].some((e) => e !== null && within(e, dim));
}

// Whether an index expression does.
export function within([, terms], dim) {
  return terms.some(([, atom]) => (typeof atom === "number" ? atom === dim : within(atom[1], dim)));
}
