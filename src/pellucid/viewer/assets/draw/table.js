// A table of any number of rows: only those in sight are in the document.

import { element, perFrame } from "./dom.js";

const MARGIN = 8;
const AUTO_WIDTH = 140; // at least, of a column that takes the rest

/** @typedef {{key: string, label: string, width: string, least?: number, text?: boolean, title?: string, sortable?: boolean,
 * cell(row: number): Node | string}} TableColumn */

export class VirtualTable {
  /** @param {{columns: TableColumn[], rowHeight?: number, label: string, onChoose?: (row: number) => void, onMark?: (row: number) => void,
   * onSort?: (key: string, up: boolean) => void}} options */
  constructor(options) {
    this.options = options;
    this.rowHeight = options.rowHeight ?? 30;
    /** @type {ArrayLike<number>} */
    this.order = [];
    this.chosen = -1;
    /** @type {Set<string>} keys of columns that say nothing here */
    this.hidden = new Set();
    this.body = element("tbody");
    this.heads = options.columns.map((column) => this.heading(column));
    this.table = element("table", { "aria-label": options.label }, element("thead", {}, element("tr", {}, ...this.heads)), this.body);
    this.hide(this.hidden);
    this.root = element("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": options.label }, this.table);
    this.root.addEventListener("scroll", perFrame(() => this.draw()), { passive: true });
    this.body.addEventListener("click", (/** @type {Event} */ event) => {
      const row = /** @type {HTMLElement} */ (event.target).closest("tr[data-row]");
      if (row) options.onChoose?.(Number(/** @type {HTMLElement} */ (row).dataset.row));
    });
    this.body.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.key(event));
    new ResizeObserver(perFrame(() => this.draw())).observe(this.root);
  }

  /** Leaves columns out. @param {Set<string>} keys */
  hide(keys) {
    this.hidden = keys;
    const { columns } = this.options;
    columns.forEach(({ key }, i) => { this.heads[i].hidden = keys.has(key); });
    this.table.style.minWidth = `${columns.filter(({ key }) => !keys.has(key)).reduce((sum, { width, least = AUTO_WIDTH }) => sum + (Number.parseInt(width, 10) || least), 0)}px`;
  }

  /** @param {TableColumn} column */
  heading(column) {
    const cell = element("th", { scope: "col", class: column.text ? "text" : "number", title: column.title });
    cell.style.width = column.width;
    if (this.options.onSort && column.sortable !== false) {
      const button = element("button", { type: "button", onclick: () => {
        const isSame = this.sortedBy === column.key;
        this.options.onSort?.(column.key, isSame ? !this.sortedUp : Boolean(column.text));
      } }, column.label, element("span", { class: "order" }));
      cell.append(button);
    } else cell.append(column.label);
    return cell;
  }

  /** @param {ArrayLike<number>} order @param {{key?: string, up?: boolean}} [sorted] */
  show(order, { key = "", up = false } = {}) {
    this.order = order;
    this.sortedBy = key;
    this.sortedUp = up;
    this.options.columns.forEach((column, i) => {
      const isSorted = column.key === key;
      this.heads[i].toggleAttribute("aria-sort", isSorted);
      if (isSorted) this.heads[i].setAttribute("aria-sort", up ? "ascending" : "descending");
      const mark = this.heads[i].querySelector(".order");
      if (mark) mark.textContent = isSorted ? (up ? "↑" : "↓") : "";
    });
    this.table.setAttribute("aria-rowcount", String(order.length + 1));
    this.draw();
  }

  /** Rows are reached by arrows, as the tokens are; Enter opens one. @param {KeyboardEvent} event */
  key(event) {
    const row = /** @type {HTMLElement} */ (event.target).closest("tr[data-row]");
    if (!row) return;
    const number = Number(/** @type {HTMLElement} */ (row).dataset.row);
    const page = Math.max(1, Math.floor(this.root.clientHeight / this.rowHeight) - 2);
    const change = /** @type {Record<string, number>} */ ({ ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.order.length, End: this.order.length })[event.key];
    if (change) {
      const place = Array.prototype.indexOf.call(this.order, number) + change;
      const next = this.order[Math.min(this.order.length - 1, Math.max(0, place))];
      this.choose(next);
      this.body.querySelector(`tr[data-row="${next}"]`)?.focus({ preventScroll: true });
    } else if (event.key === " " && this.options.onMark) this.options.onMark(number);
    else if (event.key === "Enter" || event.key === " ") this.options.onChoose?.(number);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  draw() {
    const focused = this.body.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement).dataset.row : undefined;
    const first = Math.max(0, Math.floor(this.root.scrollTop / this.rowHeight) - MARGIN);
    const room = Math.ceil(this.root.clientHeight / this.rowHeight) + 2 * MARGIN;
    const last = Math.min(this.order.length, first + room);
    const rows = [];
    for (let place = first; place < last; place += 1) rows.push(this.row(place));
    this.body.replaceChildren(this.spacer(first), ...rows, this.spacer(this.order.length - last));
    if (!rows.some((row) => row.tabIndex === 0) && rows.length) rows[0].tabIndex = 0;
    if (focused !== undefined) this.body.querySelector(`tr[data-row="${focused}"]`)?.focus({ preventScroll: true });
  }

  /** @param {number} place */
  row(place) {
    const row = this.order[place];
    const node = element("tr", { "data-row": row, "aria-rowindex": place + 2, "aria-current": row === this.chosen ? "true" : null, tabindex: row === this.chosen ? 0 : -1 },
      ...this.options.columns.filter(({ key }) => !this.hidden.has(key)).map((column) => element("td", { class: column.text ? "text" : "number" }, column.cell(row))));
    node.style.height = `${this.rowHeight}px`;
    return node;
  }

  /** @param {number} rows */
  spacer(rows) {
    const node = element("tr", { class: "spacer", "aria-hidden": "true" });
    node.style.height = `${Math.max(0, rows) * this.rowHeight}px`;
    return node;
  }

  /** @param {number} row */
  choose(row) {
    this.chosen = row;
    const place = Array.prototype.indexOf.call(this.order, row);
    if (place >= 0) {
      const top = place * this.rowHeight;
      const room = this.root.clientHeight - 3 * this.rowHeight;
      if (top < this.root.scrollTop || top > this.root.scrollTop + room) this.root.scrollTop = Math.max(0, top - room / 2);
    }
    this.draw();
  }
}
