// A record in a table's cell: its largest mismatch KL along its trainable tokens, on a log scale.

import { canvasOf, themeColour } from "./dom.js";

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
