// The whole sequence in one strip: who speaks, the colouring at its strongest, what trains and what was masked.

import { canvasOf, element, onDrag, themeColour } from "./dom.js";

const HEIGHT = 40;
const ROLE_COLOURS = /** @type {Record<string, string>} */ ({ system: "role-system", user: "role-user", assistant: "role-assistant", tool: "role-tool" });

/** @typedef {import("../data/run.js").TokenRecord} TokenRecord @typedef {(i: number) => [string, string] | null} Colour of a token */

export class Minimap {
  /** Tokens. */
  length = 1;

  /** @param {{onSeek(token: number): void}} handlers */
  constructor(handlers) {
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.frame = element("div", { class: "minimap-frame" });
    this.root = element("div", { class: "minimap" }, this.canvas, this.frame);
    onDrag(this.root, (share, at) => { if (at !== "end") handlers.onSeek(Math.min(this.length - 1, Math.floor(share * this.length))); });
  }

  /** @param {TokenRecord} record @param {ArrayLike<number> | null} values @param {Colour} colour */
  show(record, values, colour) {
    this.length = record.length || 1;
    drawStrip(this.canvas, record, values, colour, Math.max(100, this.root.clientWidth), HEIGHT);
  }

  /** What of it is in sight. @param {number} first @param {number} last */
  mark(first, last) {
    this.frame.style.left = `${(100 * first) / this.length}%`;
    this.frame.style.width = `${Math.max(0.4, (100 * (last - first)) / this.length)}%`;
  }
}

/** @param {HTMLCanvasElement} canvas @param {TokenRecord} record @param {ArrayLike<number> | null} values @param {Colour} colourOf
 * @param {number} width @param {number} height */
export function drawStrip(canvas, record, values, colourOf, width, height) {
  const masked = record.column("is_masked");
  const { context } = canvasOf(width, height, canvas);
  const scale = width / Math.max(1, record.length);
  for (const [role, start, end] of record.segments) {
    context.fillStyle = themeColour(ROLE_COLOURS[role] ?? "role-other");
    context.fillRect(start * scale, 0, Math.max(1, (end - start) * scale - 1), 4);
  }
  const neutral = themeColour("minimap");
  const mark = themeColour("ink");
  const columns = Math.min(Math.ceil(width), record.length);
  const step = width / columns;
  for (let column = 0; column < columns; column += 1) {
    const from = Math.floor((column * record.length) / columns);
    const to = Math.max(from + 1, Math.floor(((column + 1) * record.length) / columns));
    let best = -1;
    let isMasked = false;
    for (let i = from; i < to; i += 1) {
      if (masked?.[i] === 1) isMasked = true;
      if (!values || !record.isTrainable(i) || Number.isNaN(values[i])) continue;
      if (best < 0 || Math.abs(values[i]) > Math.abs(values[best])) best = i;
    }
    const colour = best < 0 ? null : colourOf(best);
    context.fillStyle = colour ? colour[0] : neutral;
    const top = best < 0 ? height * 0.42 : 7;
    context.fillRect(column * step, top, Math.max(step, 0.7), best < 0 ? height * 0.2 : height - 13);
    if (isMasked) { context.fillStyle = mark; context.fillRect(column * step, height - 4, Math.max(step, 1.5), 3); }
  }
}

// A record in a table's cell: its largest mismatch KL along its trainable tokens, on a log scale.

/** @param {Uint8Array} cells 0 to 255 */
export function spark(cells) {
  const { canvas, context } = canvasOf(96, 20);
  canvas.setAttribute("aria-hidden", "true");
  const step = 96 / Math.max(1, cells.length);
  context.fillStyle = themeColour("line");
  for (let i = 0; i < cells.length; i += 1) {
    const size = (cells[i] / 255) * 18;
    if (size > 0) context.fillRect(i * step, 20 - size, step + 0.3, size);
  }
  return canvas;
}
