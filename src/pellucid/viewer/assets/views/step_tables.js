// The tables of a step, which sort: its records with a sparkline each, and its tokens by id.

import { visible } from "../data/texts.js";
import { element } from "../draw/dom.js";
import { count, fixed, percent, short, signed } from "../draw/format.js";
import { spark } from "../draw/minimap.js";
import { VirtualTable } from "../draw/table.js";

const END_TOKENS = 60; // more than a cell has room for

export class RecordsTable {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    const number = (/** @type {string} */ name, /** @type {(value: any) => string} */ show) => (/** @type {number} */ row) => show(this.index.value(name, row));
    const text = (/** @type {string} */ name) => (/** @type {number} */ row) => this.index.value(name, row) ?? "–";
    this.table = new VirtualTable({
      label: "Records",
      onChoose: (record) => app.go({ view: "record", record, token: -1 }),
      onSort: (sort, up) => app.go({ sort, up }),
      columns: [
        { key: "record", label: "#", width: "44px", cell: (row) => String(row) },
        { key: "hits", label: "hits", width: "46px", title: "tokens that filter and brushes select", cell: (row) => (this.hits ? count(this.hits[row]) : "–") },
        { key: "env", label: "environment", width: "110px", text: true, cell: text("env") },
        { key: "group", label: "group", width: "64px", text: true, cell: text("group") },
        { key: "prompt", label: "end of the prompt", width: "auto", text: true, sortable: false, cell: (row) => this.text(row, "prompt") },
        { key: "reply", label: "end of the reply", width: "auto", text: true, sortable: false, cell: (row) => this.text(row, "reply") },
        { key: "reward", label: "reward", width: "66px", cell: number("reward", (value) => fixed(value, 3)) },
        { key: "advantage", label: "adv.", width: "68px", cell: number("advantage", (value) => signed(value, 3)) },
        { key: "tokens", label: "tokens", width: "60px", cell: number("tokens", count) },
        { key: "trainable", label: "trainable", width: "80px", cell: number("trainable", count) },
        { key: "spark", label: "KL along it", width: "112px", sortable: false, text: true, cell: (row) => spark(this.index.spark(row)) },
        { key: "kl_mean", label: "KL mean", width: "78px", cell: number("kl_mean", short) },
        { key: "kl_max", label: "KL max", width: "70px", cell: number("kl_max", short) },
        { key: "entropy", label: "entropy", width: "72px", cell: number("entropy", short) },
        { key: "masked", label: "masked", width: "72px", title: "share of trainable tokens out of the trust region", cell: (row) => percent(maskedShare(this.index, row)) },
        { key: "loss", label: "loss", width: "74px", title: "sum of its token losses", cell: number("loss", (value) => signed(value, 3)) },
        { key: "stop", label: "ended by", width: "78px", text: true, cell: text("stop") },
      ],
    });
    this.root = this.table.root;
  }

  /** The end of what a record was asked, or of what it answered; nothing before the tokens are read. @param {number} row @param {"prompt" | "reply"} part */
  text(row, part) {
    const { all } = this;
    if (!all) return "…";
    const { index, ids, starts } = all;
    const number = index.chunkOf(row);
    const segments = all.chunks[number].blob.meta.segments[row - index.chunkStarts[number]];
    const reply = segments.findLast((/** @type {[string, number, number]} */ [role]) => role === "assistant") ?? segments[segments.length - 1] ?? ["", 0, 0];
    const [from, to] = part === "reply" ? [reply[1], reply[2]] : [0, reply[1]];
    const { vocabulary } = this.app.run;
    const shown = [];
    for (let i = Math.max(from, to - END_TOKENS); i < to; i += 1) {
      const token = starts[row] + i;
      if (!vocabulary.isSpecial(ids[token]) && (part === "prompt" || all.isTrainable(token))) shown.push(vocabulary.show(ids, token));
    }
    return element("span", { class: "ending" }, element("bdi", {}, shown.join("")));
  }

  /** @param {any} index @param {number[]} records @param {Uint32Array | null} hits @param {{sort: string, up: boolean, record: number}} state
   * @param {import("../data/run.js").StepTokens | null} [all] */
  show(index, records, hits, { sort, up, record }, all = null) {
    this.index = index;
    this.hits = hits;
    this.all = all;
    this.table.hide(new Set(this.table.options.columns.map(({ key }) => key).filter((key) => key !== sort && !this.says(key, records))));
    const read = (/** @type {number} */ row) => {
      if (sort === "hits") return hits ? hits[row] : 0;
      return sort === "record" ? row : sort === "masked" ? maskedShare(index, row) : index.value(sort, row);
    };
    const order = sort ? sorted(records, up, read) : records;
    this.table.chosen = record;
    this.table.show(order, { key: sort, up });
    this.app.order = { step: index.step, records: order };
  }

  /** Whether a column tells these records apart. @param {string} key @param {number[]} records @returns {boolean} */
  says(key, records) {
    if (key === "hits") return this.hits !== null;
    if (key === "spark") return this.says("kl_max", records);
    if (["record", "tokens", "prompt", "reply"].includes(key)) return true;
    const read = (/** @type {number} */ row) => (key === "masked" ? maskedShare(this.index, row) : this.index.value(key, row));
    const first = records.length ? read(records[0]) : null;
    return records.length === 1 ? first !== null : records.some((row) => read(row) !== first);
  }
}

/** @param {any} index @param {number} row */
function maskedShare(index, row) {
  const [masked, trainable] = [index.value("masked", row), index.value("trainable", row)];
  return masked === null || !trainable ? null : masked / trainable;
}

/** Rows that do not say come last, whichever way. @param {number[]} rows @param {boolean} up @param {(row: number) => any} read */
export function sorted(rows, up, read) {
  const keys = new Map(rows.map((row) => [row, read(row)]));
  return [...rows].sort((a, b) => {
    const [left, right] = [keys.get(a), keys.get(b)];
    if (left === right) return a - b;
    if (left === null || right === null) return left === null ? 1 : -1;
    return (left < right ? -1 : 1) * (up ? 1 : -1);
  });
}

export class IdsTable {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    /** @type {ReturnType<typeof byId>} */
    this.rows = [];
    const cell = (/** @type {"kl" | "klMax" | "entropy" | "adv"} */ name) => (/** @type {number} */ row) => short(this.rows[row][name]);
    this.table = new VirtualTable({
      label: "Tokens by id",
      onChoose: (row) => app.go({ search: `#${this.rows[row].id}`, within: "step" }),
      onSort: (sort, up) => app.go({ sort, up }),
      columns: [
        { key: "id", label: "id", width: "90px", cell: (row) => String(this.rows[row].id) },
        { key: "text", label: "token", width: "auto", text: true, cell: (row) => element("span", { class: "token" }, visible(app.run.vocabulary.plain(this.rows[row].id))) },
        { key: "count", label: "count", width: "100px", cell: (row) => count(this.rows[row].count) },
        { key: "kl", label: "KL mean", width: "100px", cell: cell("kl") },
        { key: "klMax", label: "KL max", width: "100px", cell: cell("klMax") },
        { key: "masked", label: "masked", width: "100px", cell: (row) => percent(this.rows[row].masked) },
        { key: "entropy", label: "entropy", width: "100px", cell: cell("entropy") },
        { key: "adv", label: "adv. mean", width: "100px", cell: cell("adv") },
      ],
    });
    this.root = this.table.root;
  }

  /** @param {import("../data/run.js").StepTokens} all @param {Uint8Array} chosen @param {{sort: string, up: boolean}} state */
  show(all, chosen, { sort, up }) {
    this.rows = byId(all, chosen);
    const key = this.table.options.columns.some((column) => column.key === sort) ? sort : "count";
    const read = (/** @type {number} */ row) => (key === "text" ? this.app.run.vocabulary.plain(this.rows[row].id) : /** @type {any} */ (this.rows[row])[key]);
    this.table.show(sorted(this.rows.map((_, i) => i), up, read), { key, up });
  }
}

/** By ascending id. @param {import("../data/run.js").StepTokens} all @param {Uint8Array} chosen */
function byId(all, chosen) {
  const { ids } = all;
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
  return [...found].sort(([a], [b]) => a - b).map(([id, entry]) => {
    const [kl, masked, entropy, adv] = entry.sums.map((sum, i) => (entry.counts[i] ? sum / entry.counts[i] : null));
    return { id, count: entry.count, kl, klMax: entry.counts[0] ? entry.klMax : null, masked, entropy, adv };
  });
}
