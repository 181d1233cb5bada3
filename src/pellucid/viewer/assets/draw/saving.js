// Buttons that take what is seen out of the page. They stand at the right end of a header: of a view for all of it,
// of a card for that card.

import { saveColumns, saveFile } from "../data/save.js";
import { canvasOf, element, themeColour } from "./dom.js";

/** @typedef {import("../data/save.js").SavedColumn[]} Columns */

/** @param {string} what in words, for the tooltip @param {() => string} name of the file, without its ending
 * @param {{columns: () => Columns | Promise<Columns>, shown: () => Element}} from @param {...(Node | null)} others further buttons, before these */
export function saveBar(what, name, { columns, shown }, ...others) {
  const button = (/** @type {string} */ label, /** @type {() => void} */ onclick) => element("button", { type: "button", title: `save ${what} as ${label}`, onclick }, label);
  return element("span", { class: "save-bar" }, ...others,
    button("CSV", async () => saveColumns(name(), "csv", await columns())),
    button("Parquet", async () => saveColumns(name(), "parquet", await columns())),
    button("PNG", () => savePicture(name(), shown())));
}

/** The picture of one chart. @param {string} what @param {() => string} name */
export function saveChart(what, name) {
  const button = element("button", { type: "button", class: "quiet save-chart no-picture", title: `save ${what} as PNG`, "aria-label": `save ${what} as PNG`,
    onclick: () => savePicture(name(), /** @type {Element} */ (button.closest(".card"))) }, "↓");
  return button;
}

/** @param {string} name @param {Element} shown */
function savePicture(name, shown) {
  picture(shown).toBlob((blob) => blob && saveFile(`${name}.png`, "image/png", blob));
}

// What is in sight of a view or a chart, as a picture: boxes, texts, canvases and flows are drawn where they
// stand. The page's policy allows no image to be loaded, so nothing can be handed to the browser to draw.

const MARGIN = 16;
const LEFT_OUT = ".save-bar, .no-picture, .u-over, .u-under, .minimap-frame";
const COLOUR = /rgba?\([^)]*\)/g;

/** @param {Element} root @returns {HTMLCanvasElement} */
export function picture(root) {
  const frame = root.getBoundingClientRect();
  const [width, height] = [frame.width + 2 * MARGIN, frame.height + 2 * MARGIN];
  const { canvas, context } = canvasOf(width, height);
  context.fillStyle = themeColour("paper");
  context.fillRect(0, 0, width, height);
  context.translate(MARGIN - frame.left, MARGIN - frame.top);
  paint(context, root);
  return canvas;
}

/** @param {CanvasRenderingContext2D} context @param {Node} node */
function paint(context, node) {
  if (node.nodeType === Node.TEXT_NODE) { paintText(context, /** @type {Text} */ (node)); return; }
  if (!(node instanceof Element) || node.matches(LEFT_OUT)) return;
  const box = node.getBoundingClientRect();
  const style = getComputedStyle(node);
  if (style.display === "none" || style.visibility === "hidden") return;
  if (node instanceof SVGElement) { paintShape(context, node, style); return; }
  if (!box.width || !box.height) { for (const child of node.childNodes) paint(context, child); return; }
  paintBox(context, node, box, style);
  context.save();
  if (style.overflowX !== "visible") { context.beginPath(); context.rect(box.left, box.top, box.width, box.height); context.clip(); }
  if (node instanceof HTMLCanvasElement) context.drawImage(node, box.left, box.top, box.width, box.height);
  else if (node instanceof HTMLSelectElement) write(context, style, node.selectedOptions[0]?.text ?? "", box.left + 10, box);
  else if (node instanceof HTMLInputElement) paintInput(context, node, box, style);
  else for (const child of node.childNodes) paint(context, child);
  context.restore();
}

/** @param {CanvasRenderingContext2D} context @param {Element} node @param {DOMRect} box @param {CSSStyleDeclaration} style */
function paintBox(context, node, box, style) {
  const outline = new Path2D();
  outline.roundRect(box.left, box.top, box.width, box.height, Number.parseFloat(style.borderTopLeftRadius) || 0);
  context.fillStyle = style.backgroundColor;
  context.fill(outline);
  if (style.backgroundImage !== "none") paintGradient(context, outline, box, style.backgroundImage);
  const sides = /** @type {[number, string, number, number, number, number][]} */ ([
    [Number.parseFloat(style.borderTopWidth), style.borderTopColor, 0, 0, 1, 0], [Number.parseFloat(style.borderBottomWidth), style.borderBottomColor, 0, 1, 1, 1],
    [Number.parseFloat(style.borderLeftWidth), style.borderLeftColor, 0, 0, 0, 1], [Number.parseFloat(style.borderRightWidth), style.borderRightColor, 1, 0, 1, 1]]);
  if (sides.every(([size]) => size > 0)) {
    [context.lineWidth, context.strokeStyle] = [sides[0][0], sides[0][1]];
    context.stroke(outline);
  } else {
    for (const [size, colour, x, y, toX, toY] of sides) {
      if (!size) continue;
      [context.lineWidth, context.strokeStyle] = [size, colour];
      context.beginPath();
      context.moveTo(box.left + x * box.width, box.top + y * box.height);
      context.lineTo(box.left + toX * box.width, box.top + toY * box.height);
      context.stroke();
    }
  }
  context.fillStyle = style.color;
  if (node.matches(".masked-high, .key-high")) context.fillRect(box.left, box.top, box.width, 2.5);
  if (node.matches(".masked-low, .key-low")) context.fillRect(box.left, box.bottom - 2.5, box.width, 2.5);
  if (style.outlineStyle !== "none" && node.matches(".pinned, .match")) {
    [context.lineWidth, context.strokeStyle] = [2, style.outlineColor];
    context.stroke(outline);
  }
}

/** From left to right, or hatched. @param {CanvasRenderingContext2D} context @param {Path2D} outline @param {DOMRect} box @param {string} image */
function paintGradient(context, outline, box, image) {
  const colours = image.match(COLOUR) ?? [];
  if (!colours.length) return;
  context.save();
  context.clip(outline);
  if (image.startsWith("repeating")) {
    [context.lineWidth, context.strokeStyle] = [1, colours[colours.length - 1]];
    context.beginPath();
    for (let x = box.left - box.height; x < box.right; x += 5.6) { context.moveTo(x, box.bottom); context.lineTo(x + box.height, box.top); }
    context.stroke();
  } else if (image.startsWith("linear")) {
    const gradient = context.createLinearGradient(box.left, 0, box.right, 0);
    colours.forEach((colour, i) => gradient.addColorStop(colours.length < 2 ? 0 : i / (colours.length - 1), colour));
    context.fillStyle = gradient;
    context.fillRect(box.left, box.top, box.width, box.height);
  }
  context.restore();
}

/** @param {CanvasRenderingContext2D} context @param {HTMLInputElement} node @param {DOMRect} box @param {CSSStyleDeclaration} style */
function paintInput(context, node, box, style) {
  if (node.type === "checkbox") write(context, style, node.checked ? "☑" : "☐", box.left, box);
  else if (node.type !== "range") write(context, style, node.value, box.left + 10, box);
}

/** A part of a flow. @param {CanvasRenderingContext2D} context @param {SVGElement} node @param {CSSStyleDeclaration} style */
function paintShape(context, node, style) {
  context.save();
  context.globalAlpha *= Number(style.opacity);
  context.fillStyle = style.fill;
  if (node instanceof SVGRectElement) {
    const box = node.getBoundingClientRect();
    context.fillRect(box.left, box.top, box.width, box.height);
  } else if (node instanceof SVGPathElement) {
    const origin = /** @type {SVGSVGElement} */ (node.ownerSVGElement).getBoundingClientRect();
    context.translate(origin.left, origin.top);
    context.fill(new Path2D(node.getAttribute("d") ?? ""));
  } else if (!(node instanceof SVGTitleElement)) for (const child of node.childNodes) paint(context, child);
  context.restore();
}

/** Line by line, as the browser broke it. @param {CanvasRenderingContext2D} context @param {Text} node */
function paintText(context, node) {
  const parent = node.parentElement;
  if (!parent || !node.data.trim()) return;
  const style = getComputedStyle(parent);
  const colour = parent instanceof SVGElement ? style.fill : style.color;
  const range = document.createRange();
  range.selectNodeContents(node);
  const boxes = range.getClientRects();
  if (boxes.length === 1) { write(context, style, node.data, boxes[0].left, boxes[0], colour); return; }
  let from = 0;
  /** @type {DOMRect | null} */
  let line = null;
  for (let i = 0; i <= node.length; i += 1) {
    range.setStart(node, Math.min(i, node.length));
    range.setEnd(node, Math.min(i + 1, node.length));
    const box = i < node.length ? range.getBoundingClientRect() : null;
    if (box && !box.width && !box.height) continue;
    if (!line) { line = box; from = i; continue; }
    if (box && Math.abs(box.top - line.top) < box.height / 2) continue;
    write(context, style, node.data.slice(from, i), line.left, line, colour);
    [line, from] = [box, i];
  }
}

/** @param {CanvasRenderingContext2D} context @param {CSSStyleDeclaration} style @param {string} text @param {number} left @param {DOMRect} box
 * @param {string} [colour] */
function write(context, style, text, left, box, colour = style.color) {
  context.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.letterSpacing = style.letterSpacing === "normal" ? "0px" : style.letterSpacing;
  context.fillStyle = colour;
  const { fontBoundingBoxAscent: above, fontBoundingBoxDescent: below } = context.measureText(text);
  const shown = style.whiteSpace.startsWith("pre") ? text.replace(/\n/g, "") : text.replace(/\s+/g, " ");
  context.fillText(shown, left, box.top + (box.height - above - below) / 2 + above);
}
