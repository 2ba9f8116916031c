// The one cursor: which build, operation, device, step and panel; kept in the address, so that a link restores the view.

const START = { build: 0, op: 0, device: -1, tab: "space", open: "", step: -1, rewrite: 0, change: 0, row: "", col: "", depth: "", at: "", theme: "", kernel: "", zoom: "" };
const listeners = [];
let writing; // the address is written when the cursor rests: browsers refuse many changes of it in a row

const write = () => location.protocol !== "about:" && history.replaceState(null, "", `#${written()}`);

export const cursor = { ...START };

// Change the cursor; every panel that listens draws itself again, with what has changed.
export function move(patch) {
  const changed = new Set(Object.keys(patch).filter((k) => cursor[k] !== patch[k]));
  if (!changed.size) return;
  Object.assign(cursor, patch);
  clearTimeout(writing);
  writing = setTimeout(write, 150);
  for (const f of listeners) f(changed);
}

export const onMove = (f) => listeners.push(f);

function written() {
  const kept = Object.entries(cursor).filter(([k, v]) => v !== START[k]);
  return kept.map(([k, v]) => `${k}=${encodeURIComponent(v)}`).join("&");
}

// Take the cursor from the address; what is no part of a cursor is ignored.
export function restore(hash) {
  for (const part of hash.replace(/^#/, "").split("&")) {
    const [name, value] = part.split("=");
    if (!(name in START) || value === undefined) continue;
    let given;
    try {
      given = decodeURIComponent(value);
    } catch {
      continue;
    }
    if (typeof START[name] === "string") cursor[name] = given;
    else if (Number.isInteger(Number(given))) cursor[name] = Number(given);
  }
}
