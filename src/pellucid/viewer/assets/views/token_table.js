// The tokens of a record as rows: what the coloured text shows, for those who would rather read numbers.

import { METRICS, valuesOf } from "../data/metrics.js";
import { reasonOf } from "../data/reason.js";
import { element } from "../draw/dom.js";
import { short } from "../draw/format.js";
import { VirtualTable } from "../draw/table.js";

export class TokenTable {
  /** @type {import("../data/run.js").TokenRecord} */
  record;

  /** @type {(ArrayLike<number> | null)[]} by metric */
  values = [];

  /** @param {any} app @param {HTMLElement} root */
  constructor(app, root) {
    this.app = app;
    this.table = new VirtualTable({
      label: "Tokens",
      rowHeight: 26,
      onChoose: (token) => app.go({ token }),
      columns: [
        { key: "at", label: "at", width: "56px", cell: (row) => String(row) },
        { key: "text", label: "token", width: "auto", text: true, cell: (row) => this.text(row) },
        { key: "state", label: "state", width: "110px", text: true, cell: (row) => reasonOf(this.record, row, app.run.lossAt(this.record.step), app.run.isSkipped(this.record.step)).state },
        ...METRICS.map((metric, i) => ({
          key: metric.key, label: metric.label, width: "92px", title: metric.about,
          cell: (/** @type {number} */ row) => short(this.values[i]?.[row]),
        })),
      ],
    });
    root.append(this.table.root);
  }

  /** @param {import("../data/run.js").TokenRecord} record @param {any} look @param {number} token */
  show(record, look, token) {
    this.record = record;
    this.look = look;
    this.ids = record.column("token_ids") ?? [];
    this.values = METRICS.map((metric) => valuesOf(record, metric));
    this.table.chosen = token;
    this.table.show(Array.from({ length: record.length }, (_, i) => i));
  }

  /** @param {number} row */
  text(row) {
    const node = element("span", { class: `token ${this.look.classes(row)}` }, this.app.run.vocabulary.show(this.ids, row));
    const colour = this.look.colour(row);
    if (colour) { node.style.background = colour[0]; node.style.color = colour[1]; }
    return node;
  }

  /** @param {number} token */
  reveal(token) { this.table.choose(token); }
}
