// Two metrics of the same tokens against each other; where many lie, the dots get darker.

import { canvasOf, element, themeColour } from "./dom.js";
import { short } from "./format.js";

const HEIGHT = 230;
const LEFT = 52;
const BOTTOM = 20;
const MOST = 40_000;

/** @typedef {import("../data/metrics.js").Metric} Metric @typedef {{metric: Metric, values: ArrayLike<number> | null, low: number, high: number}} Axis */

export class Scatter {
  /** @type {[number, number, number][]} left, top, token */
  points = [];

  /** @param {(token: number) => void} onChoose */
  constructor(onChoose) {
    this.canvas = element("canvas", { role: "img", "aria-label": "scatter of two metrics" });
    this.root = element("div", { class: "scatter" }, this.canvas);
    this.canvas.addEventListener("click", (/** @type {MouseEvent} */ event) => {
      const box = this.canvas.getBoundingClientRect();
      const near = this.nearest(event.clientX - box.left, event.clientY - box.top);
      if (near >= 0) onChoose(near);
    });
  }

  /** @param {Axis} x @param {Axis} y @param {ArrayLike<number>} tokens which to show */
  show(x, y, tokens) {
    const width = Math.max(160, this.root.clientWidth);
    const { context } = canvasOf(width, HEIGHT, this.canvas);
    this.points = [];
    if (!x.values || !y.values) {
      context.fillStyle = themeColour("muted");
      context.font = "13px system-ui, sans-serif";
      context.fillText("One of the two is not recorded.", 12, 24);
      return;
    }
    const placeX = place(x, LEFT, width - 8);
    const placeY = place(y, HEIGHT - BOTTOM, 8);
    context.fillStyle = themeColour("rule");
    context.fillRect(LEFT, 8, 1, HEIGHT - BOTTOM - 8);
    context.fillRect(LEFT, HEIGHT - BOTTOM, width - LEFT - 8, 1);
    context.fillStyle = `${themeColour("series-1")}${tokens.length > 4000 ? "30" : "70"}`;
    const stride = Math.max(1, Math.ceil(tokens.length / MOST));
    for (let i = 0; i < tokens.length; i += stride) {
      const token = tokens[i];
      const [left, top] = [placeX(x.values[token]), placeY(y.values[token])];
      if (Number.isNaN(left) || Number.isNaN(top)) continue;
      context.fillRect(left - 1.3, top - 1.3, 2.6, 2.6);
      this.points.push([left, top, token]);
    }
    context.fillStyle = themeColour("muted");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.fillText(short(y.high, 2), LEFT - 5, 16);
    context.fillText(short(y.low, 2), LEFT - 5, HEIGHT - BOTTOM);
    context.fillText(short(x.high, 2), width - 8, HEIGHT - 5);
    context.textAlign = "left";
    context.fillText(short(x.low, 2), LEFT, HEIGHT - 5);
    if (stride > 1) context.fillText(`every ${stride}th token`, LEFT + 80, HEIGHT - 5);
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
