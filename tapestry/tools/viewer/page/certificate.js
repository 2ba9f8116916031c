// Pictures 8 and 9: the laws that a plan was held to, or the one that refuses it and where; two builds beside each other.
import { amount, bold, boxText, button, bytes, cell, count, div, h, heading, quiet, remark, seconds, signed, table, tally } from "./elements.js";
import { move } from "./cursor.js";

export function certificate(build) {
  const { laws, evidence, refused } = build.certificate;
  const total = Object.values(laws).reduce((a, b) => a + b, 0);
  const rows = Object.entries(laws).map(([law, n]) => h("tr", { "data-law": law, class: refused?.law === law ? "broken" : "" }, cell(law), amount(count(n)), cell(refused?.law === law ? "✗" : "✓")));
  const head = refused ? h("div", { class: "refused" }, bold(refused.what), h("p", {}, `at ${refused.where}`), refused.why && h("p", {}, `because ${refused.why}`), witness(build, refused))
    : h("p", { "data-checks": total }, `${count(total)} checks of ${Object.keys(laws).length} laws; the program was checked again when this page was made`);
  return div(head, table(["law", "checks", ""], rows), heading("Evidence"), evidence.length ? evidence.map(compared) : remark("The certificate says nothing of the model."), rewritten(build));
}

function witness(build, refused) {
  const words = [refused.op !== null && `operation ${build.called(refused.op)}`, refused.device !== null && `device ${refused.device}`, refused.tensor && `tensor ${refused.tensor}`, refused.cell && `cell ${boxText(refused.cell.map((v) => [v, v + 1]))}`].filter(Boolean);
  return words.length > 0 && button(`show ${words.join(", ")}`, () => move({ op: refused.op ?? 0, device: refused.device ?? -1, tab: "space", step: refused.step ?? -1 }));
}

function compared(row) {
  const counts = Object.entries(row.counts ?? {}).filter(([, n]) => n).map(([what, n]) => `${count(n)} ${what}`).join(", ");
  return h("p", {}, bold(`${row.what} against ${row.against}: ${row.kind}`), h("br"), quiet([counts, row.why, row.power, row.weights].filter(Boolean).join("; ")));
}

function rewritten(build) {
  const r = build.report.rewrites;
  return r && h("p", {}, bold(`${count(r.steps)} rewrites`), ` of the lifted graph: ${tally(r.shown, " results by ")}`);
}

// Two builds: what differs, the greatest change of time first.
export function compare(builds, diff, select) {
  const pair = (label, [a, b], unit) => h("tr", { "data-fact": label }, cell(label), amount(unit(a)), amount(unit(b)), amount(typeof a === "number" && a && a !== b ? `${b >= a ? "+" : "−"}${Math.abs((b / a - 1) * 100).toFixed(2)} %` : ""));
  const facts = [pair("objective", diff.objective_s, seconds), pair("simulated", diff.simulated_s, seconds), pair("peak memory", diff.peak_bytes, bytes), pair("host loads", diff.host_load_bytes, bytes), pair("mesh", diff.mesh, String),
    ...diff.transfers.map((t) => pair(t.kind, t.bytes, bytes))];
  const total = (r, k) => r.seconds[k] + r.transfer_seconds[k];
  const rows = diff.operations.slice(0, 200).map((r) => h("tr", { "data-op-name": r.name, role: "button", onclick: () => select(r.name) }, cell(r.name), cell(r.split[0]), cell(r.split[1]), amount(signed(total(r, 1) - total(r, 0)))));
  const alone = ["first", "second"].map((w) => diff[`only_in_${w}`].length > 0 && remark(`only in the ${w}: ${diff[`only_in_${w}`].join(", ")}`));
  return div(table(["", builds[0].name, builds[1].name, "change"], facts), h("p", { "data-differ": diff.operations.length }, `${count(diff.matched)} operations in both, ${count(diff.operations.length)} of them differ`), alone,
    table(["operation", `split in ${builds[0].name}`, `split in ${builds[1].name}`, "more time"], rows));
}
