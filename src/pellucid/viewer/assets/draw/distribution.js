// How a metric is distributed over tokens; dragging selects a range.

import { canvasOf, element, label, onDrag, themeColour } from "./dom.js";
import { count, plural, short } from "./format.js";
import { quantiles } from "./scale.js";

const HEIGHT = 74;
const AXIS = 14;
const BINS = 48;

/** Counts in equal bins from the p0.1 to the p99.9, the outermost taking what is beyond.
 * @param {ArrayLike<number>} values @param {(i: number) => boolean} counts @param {boolean} log @param {{low: number, high: number}} [range] */
export function binned(values, counts, log, range) {
  const { low, high } = range ?? rangeOf(values, counts, log);
  const bins = new Array(BINS).fill(0);
  let zeros = 0;
  for (let i = 0; i < values.length; i += 1) {
    if (!counts(i) || Number.isNaN(values[i])) continue;
    if (log && values[i] <= 0) { zeros += 1; continue; }
    const value = log ? Math.log10(values[i]) : values[i];
    bins[Math.min(BINS - 1, Math.max(0, Math.floor(((value - low) / (high - low)) * BINS)))] += 1;
  }
  return { low, high, log, counts: bins, zeros };
}

/** @param {ArrayLike<number>} values @param {(i: number) => boolean} counts @param {boolean} log */
function rangeOf(values, counts, log) {
  const found = quantiles(values, (i) => counts(i) && (!log || values[i] > 0), [0.001, 0.999]);
  if (!found) return { low: 0, high: 1 };
  const [low, high] = log ? found.map((value) => Math.log10(Math.max(value, 1e-12))) : found;
  return high > low ? { low, high } : { low: low - 0.5, high: low + 0.5 };
}

export class Histogram {
  /** @param {import("../data/metrics.js").Metric} metric @param {(low: number, high: number) => void} onBrush @param {() => void} onClear */
  constructor(metric, onBrush, onClear) {
    this.metric = metric;
    this.canvas = element("canvas", { tabindex: 0, role: "group", "aria-label": `${metric.label}: arrows move, Shift selects, Enter keeps the range, Delete clears it` });
    this.title = element("header", {}, element("h3", {}, metric.label), element("small", { class: "formula" }, metric.formula));
    this.clear = element("button", { type: "button", class: "quiet clear", hidden: true, title: "clear", "aria-label": `clear the range of ${metric.label}`, onclick: onClear }, "×");
    this.title.append(this.clear);
    this.note = element("small", { class: "muted" });
    this.root = element("div", { class: "card histogram" }, this.title, this.canvas, this.note);
    this.listenForKeys(onBrush, onClear);
    let from = 0;
    onDrag(this.canvas, (share, at) => {
      const { low, high, log } = this.bins;
      const value = log ? 10 ** (low + share * (high - low)) : low + share * (high - low);
      if (at === "start") { from = value; return; }
      const range = /** @type {[number, number]} */ ([Math.min(from, value), Math.max(from, value)]);
      if (at === "middle") this.draw(range);
      else if (Math.abs(this.position(value) - this.position(from)) < 0.01) onClear();
      else onBrush(...range);
    });
  }

  /** @param {(low: number, high: number) => void} onBrush @param {() => void} onClear */
  listenForKeys(onBrush, onClear) {
    let [at, from] = [-1, -1];
    this.canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      const { counts, low, high, log } = this.bins;
      const edge = (/** @type {number} */ bin) => { const place = low + (bin / counts.length) * (high - low); return log ? 10 ** place : place; };
      const range = () => /** @type {[number, number]} */ ([edge(Math.min(from, at)), edge(Math.max(from, at) + 1)]);
      const change = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowLeft: -1, Home: -counts.length, End: counts.length })[event.key];
      if (change) {
        if (event.shiftKey && from < 0) from = Math.max(0, at);
        at = Math.min(counts.length - 1, Math.max(0, at + change));
        if (!event.shiftKey) from = at;
        this.draw(range());
        this.note.textContent = `${short(edge(Math.min(from, at)), 2)} to ${short(edge(Math.max(from, at) + 1), 2)}: ${plural(counts.slice(Math.min(from, at), Math.max(from, at) + 1).reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0), "token")}`;
      } else if (event.key === "Enter" && at >= 0) onBrush(...range());
      else if (event.key === "Delete") onClear();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  /** @param {number} value */
  position(value) {
    const { low, high, log } = this.bins;
    return ((log ? Math.log10(Math.max(value, 1e-30)) : value) - low) / (high - low);
  }

  /** @param {any} bins @param {number[] | null} [chosen] counts of what is selected @param {[number, number] | null} [range] */
  show(bins, chosen = null, range = null) {
    this.bins = bins;
    this.chosen = chosen;
    this.clear.hidden = !range;
    this.note.textContent = bins.zeros ? `${count(bins.zeros)} at 0` : "";
    this.draw(range);
  }

  /** @param {[number, number] | null} range */
  draw(range) {
    const width = Math.max(120, this.root.clientWidth - 30);
    const { context } = canvasOf(width, HEIGHT + AXIS, this.canvas);
    const { counts, low, high, log } = this.bins;
    const tallest = Math.max(1, ...counts);
    const step = width / counts.length;
    const bars = (/** @type {number[]} */ values, /** @type {string} */ colour) => {
      context.fillStyle = themeColour(colour);
      values.forEach((value, i) => {
        const size = value ? Math.max(1, (value / tallest) * HEIGHT) : 0;
        context.fillRect(i * step, HEIGHT - size, step - 0.6, size);
      });
    };
    bars(counts, this.chosen ? "edge" : "series-1");
    if (this.chosen) bars(this.chosen, "series-1");
    if (range) {
      const [from, to] = range.map((value) => this.position(value) * width);
      context.fillStyle = `${themeColour("accent")}22`;
      context.fillRect(from, 0, to - from, HEIGHT);
      context.fillStyle = themeColour("accent");
      context.fillRect(from, 0, 1.5, HEIGHT);
      context.fillRect(to - 1.5, 0, 1.5, HEIGHT);
    }
    const text = (/** @type {number} */ value) => short(log ? 10 ** value : value, 2);
    label(context, text(low), 0, HEIGHT + AXIS - 2);
    label(context, text((low + high) / 2), width / 2, HEIGHT + AXIS - 2, "center");
    label(context, text(high), width, HEIGHT + AXIS - 2, "right");
  }
}

// Two metrics of the same tokens against each other; where many lie, the dots get darker.

const SCATTER_HEIGHT = 230;
const LEFT = 52;
const BOTTOM = 20;
const MOST = 40_000;

/** @typedef {import("../data/metrics.js").Metric} Metric @typedef {{metric: Metric, values: ArrayLike<number> | null, low: number, high: number}} Axis */

export class Scatter {
  /** @type {[number, number, number][]} left, top, token */
  points = [];

  /** @type {number | undefined} the token that the keyboard reached */
  chosen;

  /** @param {(token: number) => void} onChoose */
  constructor(onChoose) {
    this.canvas = element("canvas", { tabindex: 0, role: "group", "aria-label": "scatter of two metrics: arrows move from token to token, Enter opens one" });
    this.mark = element("i", { class: "scatter-mark", hidden: true });
    this.root = element("div", { class: "scatter" }, this.canvas, this.mark);
    this.at = -1;
    this.canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      const change = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -this.points.length, End: this.points.length })[event.key];
      if (change && this.points.length) {
        const order = [...this.points].sort(([a], [b]) => a - b);
        this.at = Math.min(order.length - 1, Math.max(0, this.at + change));
        const [left, top, token] = order[this.at];
        this.chosen = token;
        this.mark.hidden = false;
        [this.mark.style.left, this.mark.style.top] = [`${left - 6}px`, `${top - 6}px`];
      } else if (event.key === "Enter" && this.chosen !== undefined) onChoose(this.chosen);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.canvas.addEventListener("click", (/** @type {MouseEvent} */ event) => {
      const box = this.canvas.getBoundingClientRect();
      const near = this.nearest(event.clientX - box.left, event.clientY - box.top);
      if (near >= 0) onChoose(near);
    });
  }

  /** @param {Axis} x @param {Axis} y @param {ArrayLike<number>} tokens which to show */
  show(x, y, tokens) {
    const width = Math.max(160, this.root.clientWidth);
    const { context } = canvasOf(width, SCATTER_HEIGHT, this.canvas);
    this.points = [];
    this.at = -1;
    this.mark.hidden = true;
    if (!x.values || !y.values) { label(context, "One of the two is not recorded.", 12, 24); return; }
    const placeX = place(x, LEFT, width - 8);
    const placeY = place(y, SCATTER_HEIGHT - BOTTOM, 8);
    context.fillStyle = themeColour("rule");
    context.fillRect(LEFT, 8, 1, SCATTER_HEIGHT - BOTTOM - 8);
    context.fillRect(LEFT, SCATTER_HEIGHT - BOTTOM, width - LEFT - 8, 1);
    context.fillStyle = `${themeColour("series-1")}${tokens.length > 4000 ? "30" : "70"}`;
    const stride = Math.max(1, Math.ceil(tokens.length / MOST));
    for (let i = 0; i < tokens.length; i += stride) {
      const token = tokens[i];
      const [left, top] = [placeX(x.values[token]), placeY(y.values[token])];
      if (Number.isNaN(left) || Number.isNaN(top)) continue;
      context.fillRect(left - 1.3, top - 1.3, 2.6, 2.6);
      this.points.push([left, top, token]);
    }
    label(context, short(y.high, 2), LEFT - 5, 16, "right");
    label(context, short(y.low, 2), LEFT - 5, SCATTER_HEIGHT - BOTTOM, "right");
    label(context, short(x.high, 2), width - 8, SCATTER_HEIGHT - 5, "right");
    label(context, short(x.low, 2), LEFT, SCATTER_HEIGHT - 5);
    if (stride > 1) label(context, `every ${stride}th token`, LEFT + 80, SCATTER_HEIGHT - 5);
  }

  /** @param {number} left @param {number} top */
  nearest(left, top) {
    let best = -1;
    let distance = 144;
    for (const [x, y, token] of this.points) {
      const next = (x - left) ** 2 + (y - top) ** 2;
      if (next < distance) { distance = next; best = token; }
    }
    return best;
  }
}

/** @param {Axis} axis @param {number} from @param {number} to */
function place({ metric, low, high }, from, to) {
  const log = metric.kind === "log";
  const scale = (/** @type {number} */ value) => (log ? Math.log10(Math.max(value, 1e-12)) : value);
  const [a, b] = [scale(low), scale(high)];
  return (/** @type {number} */ value) => {
    if (log && value <= 0) return NaN;
    return from + Math.min(1, Math.max(0, (scale(value) - a) / (b - a || 1))) * (to - from);
  };
}
