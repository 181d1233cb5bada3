// The tokens of a step by id: how often, how far off, how often masked.

import { visible } from "../data/texts.js";
import { element } from "../draw/dom.js";
import { count, percent, short } from "../draw/format.js";
import { VirtualTable } from "../draw/table.js";

export class IdsTable {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    /** @type {{id: number, count: number, kl: number | null, klMax: number | null, masked: number | null, entropy: number | null, adv: number | null}[]} */
    this.rows = [];
    this.table = new VirtualTable({
      label: "Tokens by id",
      onChoose: (row) => app.go({ search: `#${this.rows[row].id}`, within: "step" }),
      onSort: (sort, up) => app.go({ sort, up }),
      columns: [
        { key: "id", label: "id", width: "90px", cell: (row) => String(this.rows[row].id) },
        { key: "text", label: "token", width: "auto", text: true, cell: (row) => element("span", { class: "token" }, visible(app.run.vocabulary.plain(this.rows[row].id))) },
        { key: "count", label: "count", width: "100px", cell: (row) => count(this.rows[row].count) },
        { key: "kl", label: "KL mean", width: "100px", cell: (row) => short(this.rows[row].kl) },
        { key: "klMax", label: "KL max", width: "100px", cell: (row) => short(this.rows[row].klMax) },
        { key: "masked", label: "masked", width: "100px", cell: (row) => percent(this.rows[row].masked) },
        { key: "entropy", label: "entropy", width: "100px", cell: (row) => short(this.rows[row].entropy) },
        { key: "adv", label: "adv. mean", width: "100px", cell: (row) => short(this.rows[row].adv) },
      ],
    });
    this.root = this.table.root;
  }

  /** @param {import("../data/run.js").StepTokens} all @param {Uint8Array} chosen @param {{sort: string, up: boolean}} state */
  show(all, chosen, { sort, up }) {
    this.rows = byId(all, chosen);
    const key = ["id", "text", "count", "kl", "klMax", "masked", "entropy", "adv"].includes(sort) ? sort : "count";
    const read = (/** @type {any} */ row) => (key === "text" ? this.app.run.vocabulary.plain(row.id) : row[key]);
    const order = this.rows.map((_, i) => i).sort((a, b) => {
      const [left, right] = [read(this.rows[a]), read(this.rows[b])];
      if (left === right) return this.rows[a].id - this.rows[b].id;
      if (left === null || right === null) return left === null ? 1 : -1;
      return (left < right ? -1 : 1) * (up ? 1 : -1);
    });
    this.table.show(order, { key, up });
  }
}

/** @param {import("../data/run.js").StepTokens} all @param {Uint8Array} chosen */
export function byId(all, chosen) {
  const ids = all.column("token_ids") ?? [];
  const columns = ["mismatch_kl", "is_masked", "entropy", "advantages"].map((name) => all.column(name) ?? null);
  /** @type {Map<number, {count: number, sums: number[], counts: number[], klMax: number}>} */
  const found = new Map();
  for (let i = 0; i < all.length; i += 1) {
    if (!chosen[i]) continue;
    let entry = found.get(ids[i]);
    if (!entry) { entry = { count: 0, sums: [0, 0, 0, 0], counts: [0, 0, 0, 0], klMax: -Infinity }; found.set(ids[i], entry); }
    entry.count += 1;
    for (let column = 0; column < 4; column += 1) {
      const value = columns[column]?.[i];
      if (value === undefined || Number.isNaN(value)) continue;
      entry.sums[column] += value;
      entry.counts[column] += 1;
      if (column === 0 && value > entry.klMax) entry.klMax = value;
    }
  }
  return [...found].map(([id, entry]) => {
    const [kl, masked, entropy, adv] = entry.sums.map((sum, i) => (entry.counts[i] ? sum / entry.counts[i] : null));
    return { id, count: entry.count, kl, klMax: entry.counts[0] ? entry.klMax : null, masked, entropy, adv };
  });
}
