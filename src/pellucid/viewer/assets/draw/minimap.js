// The whole sequence in one strip: who speaks, the colouring at its strongest, what trains and what was masked.

import { canvasOf, element, themeColour } from "./dom.js";

const HEIGHT = 40;
const ROLE_COLOURS = /** @type {Record<string, string>} */ ({ system: "role-system", user: "role-user", assistant: "role-assistant", tool: "role-tool" });

/**
 * @typedef {{length: number, segments: [string, number, number][], value(i: number): number | null | undefined,
 *   colour(i: number): [string, string] | null, trains(i: number): boolean, masked(i: number): boolean}} Strip
 */

export class Minimap {
  /** @type {Strip} */
  strip;

  /** @param {{onSeek(token: number): void}} handlers */
  constructor(handlers) {
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.frame = element("div", { class: "minimap-frame" });
    this.root = element("div", { class: "minimap" }, this.canvas, this.frame);
    let isDown = false;
    const seek = (/** @type {PointerEvent} */ event) => {
      const box = this.root.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      handlers.onSeek(Math.min(this.strip.length - 1, Math.floor(share * this.strip.length)));
    };
    this.root.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => { isDown = true; this.root.setPointerCapture(event.pointerId); seek(event); });
    this.root.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => { if (isDown) seek(event); });
    this.root.addEventListener("pointerup", () => { isDown = false; });
  }

  /** @param {Strip} strip */
  show(strip) {
    this.strip = strip;
    drawStrip(this.canvas, strip, Math.max(100, this.root.clientWidth), HEIGHT);
  }

  /** What of it is in sight. @param {number} first @param {number} last */
  mark(first, last) {
    const length = this.strip?.length || 1;
    this.frame.style.left = `${(100 * first) / length}%`;
    this.frame.style.width = `${Math.max(0.4, (100 * (last - first)) / length)}%`;
  }
}

/** @param {HTMLCanvasElement} canvas @param {Strip} strip @param {number} width @param {number} height */
export function drawStrip(canvas, strip, width, height) {
  const { context } = canvasOf(width, height, canvas);
  const scale = width / Math.max(1, strip.length);
  for (const [role, start, end] of strip.segments) {
    context.fillStyle = themeColour(ROLE_COLOURS[role] ?? "role-other");
    context.fillRect(start * scale, 0, Math.max(1, (end - start) * scale - 1), 4);
  }
  const neutral = themeColour("minimap");
  const mark = themeColour("ink");
  const columns = Math.min(Math.ceil(width), strip.length);
  const step = width / columns;
  for (let column = 0; column < columns; column += 1) {
    const from = Math.floor((column * strip.length) / columns);
    const to = Math.max(from + 1, Math.floor(((column + 1) * strip.length) / columns));
    let best = -1;
    let isMasked = false;
    for (let i = from; i < to; i += 1) {
      if (strip.masked(i)) isMasked = true;
      if (!strip.trains(i)) continue;
      const value = strip.value(i);
      if (value === null || value === undefined || Number.isNaN(value)) continue;
      if (best < 0 || Math.abs(value) > Math.abs(/** @type {number} */ (strip.value(best)))) best = i;
    }
    const colour = best < 0 ? null : strip.colour(best);
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
