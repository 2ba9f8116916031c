// The data of a build, and what is looked up in it again and again.
import { NONE, PALETTE } from "./elements.js";

const PART = 40; // operations of a part, where so many are in no repeated structure that a graph of all would not be read
const MOST = 160; // operations that are drawn one by one at first

export async function unpack(text) {
  const packed = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

export class Build {
  constructor(data) {
    Object.assign(this, data);
    this.rows = this.explain.operations;
    this.makers = new Map();
    this.rows.forEach((row, i) => row.outs.forEach((t) => this.makers.set(t, i)));
    this.named = new Map(this.ops.map((op, i) => [op.name, i]));
    this.launches = this.ops.map(() => []);
    this.reduces = this.ops.map(() => []);
    this.program.steps.forEach((step, k) => {
      if (step[0] === "launch") this.launches[step[1]].push(k);
      if (step[0] === "reduce") this.reduces[step[7]].push(k);
    });
    this.transfers = new Map(this.explain.steps.map((row) => [row.step, row]));
    this.lane = new Map(this.lanes.steps.map((row) => [row.step, row]));
    this.fetches = this.ops.map(() => []);
    for (const row of this.explain.steps) if (row.op !== null && this.program.steps[row.step][0] === "transfer") this.fetches[row.op].push(row);
    this.holders = new Map();
    for (const [name, [tensor]] of Object.entries(this.program.buffers)) {
      if (!this.holders.has(tensor)) this.holders.set(tensor, []);
      this.holders.get(tensor).push(name);
    }
    this.made = new Map();
    this.program.steps.forEach((step, k) => {
      const names = { launch: step[5], transfer: [step[3]], reduce: step[3], load: [step[1]], free: [] }[step[0]];
      for (const b of names) this.made.set(b, k);
    });
    this.colour();
    this.parts();
  }

  // What an operation is called, and everything that a search finds it by.
  called(i) {
    return this.ops[i].name;
  }

  shapeOf(i) {
    return this.shapes[this.ops[i].shape];
  }

  find(words) {
    const wanted = words.toLowerCase();
    const hit = (i) => [this.called(i), ...this.rows[i].outs, ...this.rows[i].nodes, ...this.ops[i].ins].some((n) => n.toLowerCase().includes(wanted));
    return this.rows.map((_, i) => i).filter(hit);
  }

  // Which repetition of its group an operation is in.
  repetition(i) {
    const g = this.groups[this.groupOf[i]];
    return Math.floor((i - g.first) / g.length);
  }

  // Operations are coloured by which dimensions which axes of the mesh cut; the most frequent cuts have a colour of their own.
  colour(others = []) {
    const counts = new Map();
    for (const row of [this, ...others].flatMap((b) => b.rows)) counts.set(row.split, (counts.get(row.split) ?? 0) + 1);
    counts.delete("none");
    const order = [...counts].sort((a, b) => b[1] - a[1]);
    this.cuts = order.map(([split, n], k) => ({ split, n, colour: PALETTE[k] ?? NONE }));
    this.colours = new Map(this.cuts.map((c) => [c.split, c.colour]));
    this.uncut = this.rows.filter((r) => r.split === "none").length;
  }

  colourOf(i) {
    return this.colours.get(this.rows[i].split) ?? NONE;
  }

  // Folds of repeated structure and, where what is left is too much, parts of consecutive operations.
  parts() {
    this.groups = this.folds.map(([first, length, times, label]) => ({ first, length, times, label }));
    const inside = new Set(this.groups.flatMap((g) => Array.from({ length: g.length * g.times }, (_, k) => g.first + k)));
    if (this.ops.length - inside.size > MOST) {
      let run = [];
      const close = () => {
        if (run.length > 1) this.groups.push({ first: run[0], length: run.length, times: 1, label: "part" });
        run = [];
      };
      for (let i = 0; i < this.ops.length; i++) {
        if (inside.has(i) || run.length >= PART) close();
        if (!inside.has(i)) run.push(i);
      }
      close();
    }
    this.groups.sort((a, b) => a.first - b.first);
    this.groupOf = new Int32Array(this.ops.length).fill(-1);
    this.groups.forEach((g, k) => this.groupOf.fill(k, g.first, g.first + g.length * g.times));
  }

  // The boxes of a list, one for every device or null.
  list(number) {
    return this.program.lists[number].map((k) => (k === null ? null : this.program.boxes[k]));
  }

  // What every device computes of an operation: its block over all dimensions.
  blocks(i) {
    const first = this.launches[i].find((k) => this.program.steps[k][2] !== "finish");
    return first === undefined ? [] : this.list(this.program.steps[first][3]);
  }

  // For every read of an operation the buffer that its kernel is given.
  buffersRead(i) {
    const out = [];
    for (const k of this.launches[i]) this.program.steps[k][4].forEach((b, pos) => (out[pos] ??= b || undefined));
    return out;
  }

  buffer(name) {
    const [, list, , field, width] = this.program.buffers[name];
    return { name, field, width, boxes: this.list(list) };
  }

  // The buffer that a transferred one was filled from, back to one that was computed or loaded.
  origin(name) {
    const step = this.program.steps[this.made.get(name)];
    return step?.[0] === "transfer" ? this.origin(step[2]) : name;
  }

  links(step) {
    const row = this.program.steps[step];
    return row && row[5] >= 0 && (row[0] === "transfer" || row[0] === "reduce") ? this.program.links[row[5]] : [];
  }

  // Bytes from device to device, of some steps together.
  traffic(steps) {
    const counts = new Map();
    for (const k of steps) {
      const row = this.program.steps[k];
      if (row[5] >= 0) counts.set(row[5], (counts.get(row[5]) ?? 0) + 1);
    }
    const out = Array.from({ length: this.devices }, () => new Float64Array(this.devices));
    for (const [link, times] of counts) for (const [a, b, n] of this.program.links[link]) out[a][b] += n * times;
    return out;
  }

  where(device) {
    const place = [];
    let rest = device;
    for (const [name, size, , order] of [...this.mesh].reverse()) {
      const digit = rest % size;
      place.unshift(`${name}=${order?.length ? order.indexOf(digit) : digit}`);
      rest = Math.floor(rest / size);
    }
    return place.join(", ");
  }
}

// Devices as short ranges: 0–3, 8.
export function ranges(devices) {
  const out = [];
  for (const d of devices) {
    const last = out[out.length - 1];
    if (last && last[1] === d - 1) last[1] = d;
    else out.push([d, d]);
  }
  return out.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
}
