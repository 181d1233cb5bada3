// The tokens of a record as text. Lines are laid out by width first; only those in sight are in the document.

import { lastAtMost } from "../data/run.js";
import { afterPaint, element, painted, perFrame } from "./dom.js";
import { colouring } from "./scale.js";

const GUTTER = 92;
const OVERSCAN = 8; // lines beyond those in sight, once these are on screen
const SLICE_MS = 8; // of a frame, for lines that nobody sees yet
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

/** @typedef {{colour(token: number): [string, string] | null, classes(token: number): string}} Look */

export class TokenText {
  /** @type {import("../data/run.js").TokenRecord} */
  record;

  /** @type {import("../data/texts.js").Vocabulary} */
  vocabulary;

  /** @type {Look} */
  look;

  /** @type {ArrayLike<number>} */
  ids;

  /** @type {Lines} */
  laid;

  /** @param {{onPin(token: number): void, onHover(token: number): void, onScroll?: () => void}} handlers */
  constructor(handlers) {
    this.handlers = handlers;
    this.sheet = element("div", { class: "sheet" });
    this.root = element("div", { class: "tokens", role: "group", "aria-label": "Tokens", "data-arrows": true, tabindex: -1 }, this.sheet);
    /** @type {Map<number, HTMLElement>} */
    this.lines = new Map();
    this.pinned = -1;
    this.overscan = OVERSCAN;
    this.scrollsTo = 0;
    const draw = perFrame(() => { this.draw(); handlers.onScroll?.(); });
    this.root.addEventListener("scroll", draw, { passive: true });
    this.root.addEventListener("click", (/** @type {Event} */ event) => this.tokenAt(event, handlers.onPin));
    this.root.addEventListener("mouseover", (/** @type {Event} */ event) => this.tokenAt(event, handlers.onHover));
    this.root.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.tokenAt(event, handlers.onPin); }
    });
    this.observer = new ResizeObserver(perFrame(() => {
      this.size = this.measured();
      if (this.record && this.size.width) this.fit();
    }));
    this.observer.observe(this.root);
  }

  /** What is in sight, in pixels: asking for it takes a layout, so it is kept. */
  size = { width: 0, height: 0 };

  measured() { return { width: this.root.clientWidth, height: this.root.clientHeight }; }

  /** @param {Event} event @param {(token: number) => void} callback */
  tokenAt(event, callback) {
    const node = /** @type {HTMLElement} */ (event.target).closest(".token");
    if (node) callback(Number(/** @type {HTMLElement} */ (node).dataset.i));
  }

  /** Shows a record, or the same one in another look, with a token pinned. Where to scroll to is told by `settle`, once all else of the
   * page is in place: so it takes one layout. @param {import("../data/run.js").TokenRecord} record
   * @param {import("../data/texts.js").Vocabulary} vocabulary @param {Look} look @param {number} pinned @param {boolean} [middle] */
  show(record, vocabulary, look, pinned, middle = false) {
    const isNew = record !== this.record;
    const isOther = record.step !== this.record?.step || record.record !== this.record.record; // else it is the whole of what was begun
    Object.assign(this, { record, vocabulary, look, pinned });
    if (!this.size.width) this.size = this.measured();
    const scrollTop = isOther ? 0 : this.root.scrollTop;
    if (isNew) {
      this.ids = record.ids;
      this.layOut(scrollTop);
    }
    this.scrollsTo = isNew ? this.placeOf(pinned, scrollTop, middle) : scrollTop;
    this.sheet.style.height = `${this.laid.height}px`;
    this.overscan = 1;
    this.draw(true, this.scrollsTo);
    afterPaint().then(() => {
      if (this.look !== look) return;
      this.overscan = OVERSCAN;
      this.draw();
    });
  }

  /** @param {boolean} focus of the pinned token */
  settle(focus) {
    this.root.scrollTop = this.scrollsTo;
    if (focus) this.node(this.pinned)?.focus({ preventScroll: true });
  }

  /** @param {number} scrollTop */
  layOut(scrollTop) {
    const { ids, vocabulary, size } = this;
    this.laidOutFor = size.width;
    const room = Math.max(160, size.width - GUTTER - 2 * PADDING);
    this.laid = new Lines(this.record.segments, room, (at) => vocabulary.show(ids, at), widthOf);
    this.laid.reach({ top: scrollTop + size.height + OVERSCAN * LINE });
    this.sheet.style.height = `${this.laid.height}px`;
    if (!this.laid.isDone) setTimeout(() => this.layOutMore(this.laid));
  }

  /** Lays out for another width: what is in sight stays there, above all the token that is pinned. */
  fit() {
    const isOther = this.size.width !== this.laidOutFor;
    if (isOther) {
      const { scrollTop } = this.root;
      const [first, last] = this.window();
      const anchor = this.pinned >= first && this.pinned < last ? this.pinned : first;
      const below = this.laid.tops[this.laid.of(anchor)] - scrollTop;
      this.layOut(scrollTop);
      const top = this.laid.tops[this.laid.of(anchor)] - below;
      this.sheet.style.height = `${this.laid.height}px`;
      this.root.scrollTop = top;
    }
    this.draw(isOther);
  }

  /** The lines further down, a little at a time. @param {Lines} laid */
  layOutMore(laid) {
    if (laid !== this.laid) return;
    laid.reach({ until: performance.now() + SLICE_MS });
    this.sheet.style.height = `${laid.height}px`;
    if (!laid.isDone) setTimeout(() => this.layOutMore(laid));
  }

  /** @param {boolean} [again] also the lines that are there already @param {number} [scrollTop] */
  draw(again = false, scrollTop = this.root.scrollTop) {
    if (!this.record) return;
    const last = this.laid.atHeight(scrollTop + this.size.height + this.overscan * LINE);
    const from = Math.max(0, this.laid.atHeight(scrollTop) - this.overscan);
    const to = Math.min(this.laid.length, last + 1);
    if (again) this.lines.clear();
    for (const [line, node] of this.lines) {
      if (line < from || line >= to) { node.remove(); this.lines.delete(line); }
    }
    const fresh = [];
    for (let line = from; line < to; line += 1) {
      if (!this.lines.has(line)) {
        const node = this.line(line);
        this.lines.set(line, node);
        fresh.push(node);
      }
    }
    if (again) this.sheet.replaceChildren(...fresh);
    else this.sheet.append(...fresh);
  }

  /** @param {number} line */
  line(line) {
    const { starts, tops, owners } = this.laid;
    const segment = owners[line];
    const [role, start] = this.record.segments[segment];
    const isFirst = line === 0 || owners[line - 1] !== segment;
    const node = element("div", { class: "line" });
    node.style.top = `${tops[line]}px`;
    const gutter = element("span", { class: `gutter role-${ROLES.has(role) ? role : "other"}` },
      isFirst ? element("b", {}, role || (this.record.segments.length > 1 ? "no role" : "sequence")) : element("i", {}, String(starts[line])));
    if (isFirst) gutter.title = `from token ${start}`;
    node.append(gutter);
    for (let at = starts[line]; at < starts[line + 1]; at += 1) node.append(this.token(at));
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
    return painted(node, colour);
  }

  /** The tokens in sight: [first, last). @returns {[number, number]} */
  window() {
    const { scrollTop } = this.root;
    const last = this.laid.atHeight(scrollTop + this.size.height);
    const first = this.laid.atHeight(scrollTop);
    return [this.laid.starts[first], this.laid.starts[last + 1]];
  }

  /** The element of a token, if it is in the document. @param {number} token @returns {HTMLElement | null} */
  node(token) { return this.sheet.querySelector(`.token[data-i="${token}"]`); }

  /** @param {number} token @param {boolean} focus */
  pin(token, focus) {
    for (const [at, isPinned] of /** @type {[number, boolean][]} */ ([[this.pinned, false], [token, true]])) {
      const node = this.node(Math.max(0, at));
      node?.classList.toggle("pinned", isPinned && at >= 0);
      if (node) node.tabIndex = isPinned ? 0 : -1;
    }
    this.pinned = token;
    if (token >= 0) this.reveal(token);
    this.draw();
    if (focus) this.node(token)?.focus({ preventScroll: true });
  }

  /** @param {number} token @param {boolean} [middle] */
  reveal(token, middle = false) {
    const { scrollTop } = this.root;
    const place = this.placeOf(token, scrollTop, middle);
    this.sheet.style.height = `${this.laid.height}px`;
    if (place !== scrollTop) this.root.scrollTop = place;
  }

  /** What to scroll to so that a token is in sight, or in the middle. @param {number} token @param {number} scrollTop @param {boolean} middle */
  placeOf(token, scrollTop, middle) {
    if (token < 0) return scrollTop;
    const { height } = this.size;
    const top = this.laid.tops[this.laid.of(token)];
    if (!middle && top >= scrollTop + LINE && top <= scrollTop + height - 2 * LINE) return scrollTop;
    return Math.max(0, Math.min(top - height / 2, this.laid.height - height));
  }
}

const ROLES = new Set(["system", "user", "assistant", "tool"]);

// Tokens into lines by width, as far as asked: what is in sight first, the rest when there is time.
//
//   const lines = new Lines(segments, room, (token) => …, (shown) => …);
//   lines.reach({ top: 900 });       // the lines down to 900 px are final
//   lines.reach({ token: 12_000 });  // and those up to this token

export const LINE = 25;
export const PADDING = 16;
const GAP = 14; // between two speakers
const TOKEN_PADDING = 2;
const LOOKS_AT_CLOCK = 1024; // tokens between two looks at the clock

export class Lines {
  /** @param {[string, number, number][]} segments @param {number} room in pixels
   * @param {(token: number) => string} show @param {(shown: string) => number} widthOf */
  constructor(segments, room, show, widthOf) {
    this.segments = segments;
    this.room = room;
    this.show = show;
    this.widthOf = widthOf;
    /** @type {number[]} the first token of each line, and the first token after them */
    this.starts = [segments[0]?.[1] ?? 0];
    /** @type {number[]} */
    this.tops = [];
    /** @type {number[]} the segment of each line */
    this.owners = [];
    this.top = PADDING;
    this.segment = 0;
    this.at = this.starts[0];
    this.used = 0;
    this.wordStart = this.at;
    this.wordUsed = 0;
  }

  get isDone() { return this.segment >= this.segments.length; }

  /** Of the whole sheet: guessed from the lines so far while there are tokens left. */
  get height() {
    const length = this.segments.at(-1)?.[2] ?? 0;
    return (this.isDone ? this.top : this.top * Math.max(1, length / Math.max(1, this.at))) + PADDING;
  }

  /** Goes on until a height, a token, or a time is reached. @param {{top?: number, token?: number, until?: number}} goal */
  reach({ top = Infinity, token = Infinity, until = Infinity }) {
    const isReached = () => this.top > top || this.starts[this.tops.length] > token || (until < Infinity && performance.now() > until);
    while (!this.isDone && !isReached()) {
      const end = this.segments[this.segment][2];
      this.lay(Math.min(end, this.at + LOOKS_AT_CLOCK), end);
      if (this.at < end) continue;
      if (this.starts[this.tops.length] < end) this.finish(end);
      this.segment += 1;
      if (!this.isDone) {
        this.top += GAP;
        this.at = this.wordStart = this.segments[this.segment][1];
        this.used = this.wordUsed = 0;
      }
    }
  }

  /** @param {number} stop @param {number} end of the segment */
  lay(stop, end) {
    const { room } = this;
    for (let { at } = this; at < stop; at += 1) {
      const shown = this.show(at);
      const width = Math.min(this.widthOf(shown) + TOKEN_PADDING, room);
      const first = shown[0];
      const lineStart = this.starts[this.tops.length];
      if (first === "·" || first === "<" || first === "#") { this.wordStart = at; this.wordUsed = this.used; }
      if (this.used + width > room && at > lineStart) {
        // Whole words go to the next line, unless that leaves this one half empty.
        const breakAt = this.wordStart > lineStart && this.wordUsed > room * 0.6 ? this.wordStart : at;
        this.finish(breakAt);
        this.used = breakAt === at ? 0 : this.used - this.wordUsed;
        this.wordUsed = 0;
      }
      this.used += width;
      if (shown.endsWith("⏎") && at + 1 < end) { this.finish(at + 1); this.used = 0; this.wordStart = at + 1; this.wordUsed = 0; }
    }
    this.at = stop;
  }

  /** Ends a line. @param {number} upTo the first token of the next */
  finish(upTo) {
    this.tops.push(this.top);
    this.owners.push(this.segment);
    this.starts.push(upTo);
    this.top += LINE;
  }

  get length() { return this.tops.length; }

  /** @param {number} height */
  atHeight(height) {
    this.reach({ top: height });
    return lastAtMost(this.tops, height);
  }

  /** @param {number} token */
  of(token) {
    this.reach({ token });
    return lastAtMost(this.starts, token, this.tops.length);
  }
}

const CONTEXT = 12;

/** A token with its neighbours in one line. @param {import("../data/texts.js").Vocabulary} vocabulary
 * @param {import("../data/run.js").TokenRecord | import("../data/run.js").StepTokens} tokens @param {number} token @param {import("./scale.js").ColourScale} scale */
export function contextLine(vocabulary, tokens, token, scale) {
  const [first, last] = tokens.neighbours(token);
  const { ids } = tokens;
  const colour = colouring(tokens, scale);
  const part = (/** @type {number} */ at) => painted(element("span", { class: at === token ? "token pinned" : "token" }, vocabulary.show(ids, at)), colour(at));
  const parts = (/** @type {number} */ from, /** @type {number} */ to) => Array.from({ length: Math.max(0, to - from) }, (_, i) => part(from + i));
  return element("span", { class: "context-line" },
    element("span", { class: "context-before" }, element("bdi", {}, ...parts(Math.max(first, token - CONTEXT), token))),
    part(token), element("span", { class: "context-after" }, ...parts(token + 1, Math.min(last, token + CONTEXT + 1))));
}
