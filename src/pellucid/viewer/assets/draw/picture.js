// What is in sight of a record, as a picture: its title, its legend, its coloured lines.

import { canvasOf, themeColour } from "./dom.js";
import { short } from "./format.js";
import { TOKEN_FONT } from "./tokens.js";

const MARGIN = 20;
const HEADER = 54;

/** @param {any} view the record's view @returns {HTMLCanvasElement} */
export function picture(view) {
  const { text, record, scale, metric } = view;
  const { width, height } = text.root.getBoundingClientRect();
  const { canvas, context } = canvasOf(width, height + HEADER);
  context.fillStyle = themeColour("paper");
  context.fillRect(0, 0, width, height + HEADER);
  context.fillStyle = themeColour("ink");
  context.font = "600 14px system-ui, sans-serif";
  context.fillText(`Step ${record.step}, record ${record.record}`, MARGIN, 22);
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = themeColour("muted");
  context.fillText(`${metric.label}, ${metric.formula}: ${short(scale.low, 2)}`, MARGIN, 42);
  const from = MARGIN + context.measureText(`${metric.label}, ${metric.formula}: ${short(scale.low, 2)}`).width + 8;
  scale.colours.forEach((/** @type {[string, string]} */ [colour], /** @type {number} */ i) => { context.fillStyle = colour; context.fillRect(from + i * 6, 33, 6, 10); });
  context.fillStyle = themeColour("muted");
  context.fillText(short(scale.high, 2), from + scale.colours.length * 6 + 8, 42);
  const frame = text.root.getBoundingClientRect();
  context.save();
  context.beginPath();
  context.rect(0, HEADER, width, height);
  context.clip();
  for (const node of text.root.querySelectorAll(".token, .gutter b")) drawNode(context, node, frame);
  context.restore();
  return canvas;
}

/** @param {CanvasRenderingContext2D} context @param {HTMLElement} node @param {DOMRect} frame */
function drawNode(context, node, frame) {
  const box = node.getBoundingClientRect();
  const style = getComputedStyle(node);
  const [x, y] = [box.left - frame.left, box.top - frame.top + HEADER];
  context.fillStyle = style.backgroundColor;
  context.fillRect(x, y, box.width, box.height);
  context.fillStyle = style.color;
  if (node.classList.contains("masked-high")) context.fillRect(x, y, box.width, 2);
  if (node.classList.contains("masked-low")) context.fillRect(x, y + box.height - 2, box.width, 2);
  context.font = node.classList.contains("token") ? TOKEN_FONT : `${style.fontWeight} ${style.fontSize} system-ui, sans-serif`;
  context.fillText(node.textContent ?? "", x + 1, y + box.height * 0.72);
}
