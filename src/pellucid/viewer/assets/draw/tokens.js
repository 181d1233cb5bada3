// The tokens of a record as text. Lines are laid out by width first; only those in sight are in the document.

import { lastAtMost } from "../data/sorted.js";
import { element, perFrame } from "./dom.js";

const LINE = 25;
const GAP = 14; // between two speakers
const GUTTER = 92;
const PADDING = 16;
const OVERSCAN = 8;
const TOKEN_PADDING = 2;
export const TOKEN_FONT = '13.5px ui-monospace, "SF Mono", SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace';
const ASCII = /^[\x20-\x7e·]*$/;

const ruler = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
/** @type {Map<string, number>} */
const widths = new Map();
let letter = 0;

/** @param {string} shown */
function widthOf(shown) {
  if (!letter) {
    ruler.font = TOKEN_FONT;
    letter = ruler.measureText("m".repeat(64)).width / 64;
  }
  let width = widths.get(shown);
  if (width === undefined) {
    width = ASCII.test(shown) ? shown.length * letter : ruler.measureText(shown).width;
    widths.set(shown, width);
  }
  return width;
}

/**
 * @typedef {{colour(token: number): [string, string] | null, classes(token: number): string, label(token: number): string}} Look
 */

export class TokenText {
  /** @type {import("../data/run.js").TokenRecord} */
  record;

  /** @type {import("../data/texts.js").Vocabulary} */
  vocabulary;

  /** @type {Look} */
  look;

  /** @type {ArrayLike<number>} */
  ids;

  /** @type {Int32Array} the first token of each line, and the number of tokens at the end */
  starts;

  /** @type {Float64Array} */
  tops;

  /** @type {Int32Array} the segment of each line */
  owners;

  /** @param {{onPin(token: number): void, onHover(token: number): void, onScroll?: () => void}} handlers */
  constructor(handlers) {
    this.handlers = handlers;
    this.sheet = element("div", { class: "sheet" });
    this.root = element("div", { class: "tokens", role: "group", "aria-label": "Tokens", "data-arrows": true, tabindex: -1 }, this.sheet);
    /** @type {Map<number, HTMLElement>} */
    this.lines = new Map();
    this.pinned = -1;
    const draw = perFrame(() => { this.draw(); handlers.onScroll?.(); });
    this.root.addEventListener("scroll", draw, { passive: true });
    this.root.addEventListener("click", (/** @type {Event} */ event) => this.tokenAt(event, handlers.onPin));
    this.root.addEventListener("mouseover", (/** @type {Event} */ event) => this.tokenAt(event, handlers.onHover));
    this.root.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.tokenAt(event, handlers.onPin); }
    });
    this.observer = new ResizeObserver(perFrame(() => {
      if (this.record && this.root.clientWidth !== this.laidOutFor) { this.layOut(); this.draw(true); }
    }));
    this.observer.observe(this.root);
  }

  /** @param {Event} event @param {(token: number) => void} callback */
  tokenAt(event, callback) {
    const node = /** @type {HTMLElement} */ (event.target).closest(".token");
    if (node) callback(Number(/** @type {HTMLElement} */ (node).dataset.i));
  }

  /** @param {import("../data/run.js").TokenRecord} record @param {import("../data/texts.js").Vocabulary} vocabulary @param {Look} look */
  show(record, vocabulary, look) {
    const isNew = record !== this.record;
    this.record = record;
    this.vocabulary = vocabulary;
    this.look = look;
    if (isNew) {
      this.ids = record.column("token_ids") ?? [];
      this.layOut();
      this.root.scrollTop = 0;
    }
    this.draw(true);
  }

  layOut() {
    const room = Math.max(160, this.root.clientWidth - GUTTER - 2 * PADDING);
    this.laidOutFor = this.root.clientWidth;
    /** @type {number[]} */
    const starts = [];
    /** @type {number[]} */
    const tops = [];
    /** @type {number[]} */
    const owners = [];
    let top = PADDING;
    const { ids, vocabulary, record } = this;
    record.segments.forEach(([, start, end], segment) => {
      if (segment) top += GAP;
      let used = 0;
      let lineStart = start;
      let wordStart = start;
      let wordUsed = 0;
      const finish = (/** @type {number} */ upTo) => {
        starts.push(lineStart); tops.push(top); owners.push(segment);
        top += LINE;
        lineStart = upTo;
      };
      for (let at = start; at < end; at += 1) {
        const shown = vocabulary.show(ids, at);
        const width = Math.min(widthOf(shown) + TOKEN_PADDING, room);
        const first = shown[0];
        if (first === "·" || first === "<" || first === "#") { wordStart = at; wordUsed = used; }
        if (used + width > room && at > lineStart) {
          // Whole words go to the next line, unless that leaves this one half empty.
          const breakAt = wordStart > lineStart && wordUsed > room * 0.6 ? wordStart : at;
          finish(breakAt);
          used = breakAt === at ? 0 : used - wordUsed;
          wordUsed = 0;
        }
        used += width;
        if (shown.endsWith("⏎") && at + 1 < end) { finish(at + 1); used = 0; wordStart = at + 1; wordUsed = 0; }
      }
      if (lineStart < end) finish(end);
    });
    this.starts = Int32Array.from([...starts, record.length]);
    this.tops = Float64Array.from(tops);
    this.owners = Int32Array.from(owners);
    this.height = top + PADDING;
    this.sheet.style.height = `${this.height}px`;
  }

  /** @param {boolean} [again] also the lines that are there already */
  draw(again = false) {
    if (!this.record) return;
    const from = Math.max(0, this.lineAtHeight(this.root.scrollTop) - OVERSCAN);
    const to = Math.min(this.tops.length, this.lineAtHeight(this.root.scrollTop + this.root.clientHeight) + OVERSCAN + 1);
    for (const [line, node] of this.lines) {
      if (again || line < from || line >= to) { node.remove(); this.lines.delete(line); }
    }
    const fresh = document.createDocumentFragment();
    for (let line = from; line < to; line += 1) {
      if (!this.lines.has(line)) {
        const node = this.line(line);
        this.lines.set(line, node);
        fresh.append(node);
      }
    }
    this.sheet.append(fresh);
  }

  /** @param {number} line */
  line(line) {
    const segment = this.owners[line];
    const [role, start] = this.record.segments[segment];
    const isFirst = line === 0 || this.owners[line - 1] !== segment;
    const node = element("div", { class: "line" });
    node.style.top = `${this.tops[line]}px`;
    const gutter = element("span", { class: `gutter role-${ROLES.has(role) ? role : "other"}` },
      isFirst ? element("b", {}, role || (this.record.segments.length > 1 ? "no role" : "sequence")) : element("i", {}, String(this.starts[line])));
    if (isFirst) gutter.title = `from token ${start}`;
    node.append(gutter);
    for (let at = this.starts[line]; at < this.starts[line + 1]; at += 1) node.append(this.token(at));
    return node;
  }

  /** @param {number} at */
  token(at) {
    const node = document.createElement("span");
    const colour = this.look.colour(at);
    node.className = `token ${this.look.classes(at)}${at === this.pinned ? " pinned" : ""}`;
    node.dataset.i = String(at);
    node.setAttribute("role", "button");
    node.tabIndex = at === Math.max(0, this.pinned) ? 0 : -1;
    node.textContent = this.vocabulary.show(this.ids, at);
    if (colour) { node.style.background = colour[0]; node.style.color = colour[1]; }
    return node;
  }

  /** @param {number} height */
  lineAtHeight(height) { return lastAtMost(this.tops, height); }

  /** @param {number} token */
  lineOf(token) { return lastAtMost(this.starts, token, this.tops.length); }

  /** The tokens in sight: [first, last). @returns {[number, number]} */
  window() {
    const first = this.lineAtHeight(this.root.scrollTop);
    const last = this.lineAtHeight(this.root.scrollTop + this.root.clientHeight);
    return [this.starts[first], this.starts[last + 1]];
  }

  /** @param {number} token @param {{focus?: boolean, middle?: boolean}} [options] */
  pin(token, { focus = false, middle = false } = {}) {
    this.pinned = token;
    if (token >= 0) this.reveal(token, middle);
    this.draw(true);
    if (focus) this.sheet.querySelector(".token.pinned")?.focus({ preventScroll: true });
  }

  /** @param {number} token @param {boolean} [middle] */
  reveal(token, middle = false) {
    const top = this.tops[this.lineOf(token)];
    const { scrollTop, clientHeight } = this.root;
    if (middle || top < scrollTop + LINE || top > scrollTop + clientHeight - 2 * LINE) {
      this.root.scrollTop = Math.max(0, top - clientHeight / 2);
    }
  }
}

const ROLES = new Set(["system", "user", "assistant", "tool"]);
