// Making and finding elements. Text only ever becomes text.

/** @typedef {Node | string | null | undefined | false} Child what is null or false is left out */

/** @param {string} tag @param {Record<string, any>} [attributes] @param {...Child} children @returns {any} */
export const element = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);

/** @param {string} tag @param {Record<string, any>} [attributes] @param {...Child} children @returns {any} */
export const svg = (tag, attributes = {}, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** @param {Element} node @param {Record<string, any>} attributes @param {Child[]} children */
function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  refill(node, ...children);
  return node;
}

/** Replaces what an element holds. @param {Element} node @param {...Child} children */
export function refill(node, ...children) {
  node.replaceChildren(.../** @type {(Node | string)[]} */ (children.filter((child) => child !== null && child !== undefined && child !== false)));
}

/** Names with what is to say of them; those of which there is nothing are left out. @param {any[][]} pairs */
export function facts(pairs) {
  return element("dl", { class: "facts" }, ...pairs.filter(([, text]) => text)
    .map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(text)))));
}

/** Gives an element a background and an ink. @template {HTMLElement} T @param {T} node @param {[string, string] | null} colours @returns {T} */
export function painted(node, colours) {
  if (colours) [node.style.background, node.style.color] = colours;
  return node;
}

/** A line of a chart, named. @param {string} colour @param {string} text @param {number[]} [dash] */
export function swatch(colour, text, dash) {
  return element("span", {}, dash ? dashed(colour, dash) : painted(element("i", { class: "swatch" }), [`var(--${colour})`, ""]), text);
}

const DASHED_WIDTH = 26;

/** A piece of a line with its dashes. @param {string} colour @param {number[]} dash */
function dashed(colour, dash) {
  const pattern = dash.length ? dash : [DASHED_WIDTH];
  const pieces = [];
  for (let at = 0, i = 0; at < DASHED_WIDTH; at += pattern[i % pattern.length], i += 1) {
    if (i % 2 === 0) pieces.push(svg("rect", { x: at, y: 0, width: Math.min(pattern[i % pattern.length], DASHED_WIDTH - at), height: 3 }));
  }
  const line = svg("svg", { class: "dashed", width: DASHED_WIDTH, height: 3, "aria-hidden": "true" }, ...pieces);
  line.style.fill = `var(--${colour})`;
  return line;
}

/** @param {string} id @returns {any} */
export function byId(id) {
  const node = document.getElementById(id);
  if (!node) throw new Error(`no element #${id}`);
  return node;
}

/** A drop-down. @param {string} label @param {[string, string][]} choices value, text
 * @param {string} value @param {(value: string) => void} onChange */
export function choice(label, choices, value, onChange) {
  const select = element("select", { "aria-label": label, onchange: () => onChange(select.value) },
    ...choices.map(([key, text]) => element("option", { value: key, selected: key === value }, text)));
  return element("label", { class: "choice" }, element("span", {}, label), select);
}

/** @param {string} label @param {boolean} checked @param {(on: boolean) => void} onChange @param {string} [title] */
export function toggle(label, checked, onChange, title) {
  const box = element("input", { type: "checkbox", checked, onchange: () => onChange(box.checked) });
  return element("label", { class: "toggle", title }, box, element("span", {}, label));
}

/** Text in which what stands between backticks is code; a single one is itself. @param {string} text @returns {Child[]} */
export function prose(text) {
  const parts = text.split("`");
  return parts.length % 2 ? parts.map((part, i) => (i % 2 ? element("code", {}, part) : part)) : [text];
}

/** What stands where a view cannot be shown yet, or at all. @param {"loading" | "empty" | "error"} kind @param {string} title @param {string} [text]
 * @param {...Node} more */
export function notice(kind, title, text, ...more) {
  return element("div", { class: `notice ${kind}`, role: kind === "error" ? "alert" : "status" },
    element("strong", {}, title), text ? element("p", {}, ...prose(text)) : null, ...more);
}

/** A canvas for drawing in CSS pixels. @param {number} width @param {number} height @param {HTMLCanvasElement} [canvas]
 * @returns {{canvas: HTMLCanvasElement, context: CanvasRenderingContext2D}} */
export function canvasOf(width, height, canvas = document.createElement("canvas")) {
  const density = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * density));
  canvas.height = Math.max(1, Math.round(height * density));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.scale(density, density);
  return { canvas, context };
}

/** Writes small muted text. @param {CanvasRenderingContext2D} context @param {string} text @param {number} left @param {number} bottom
 * @param {CanvasTextAlign} [align] */
export function label(context, text, left, bottom, align = "left") {
  context.fillStyle = themeColour("muted");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = align;
  context.fillText(text, left, bottom);
}

/** Follows a pointer that is pressed: where it is, 0 to 1 from left to right. @param {HTMLElement} node
 * @param {(share: number, at: "start" | "middle" | "end") => void} callback */
export function onDrag(node, callback) {
  let isDown = false;
  const tell = (/** @type {PointerEvent} */ event, /** @type {"start" | "middle" | "end"} */ at) => {
    if (at === "start") node.setPointerCapture(event.pointerId);
    const box = node.getBoundingClientRect();
    if (isDown || at === "start") callback(Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)), at);
    isDown = at !== "end" && (isDown || at === "start");
  };
  node.addEventListener("pointerdown", (event) => tell(event, "start"));
  node.addEventListener("pointermove", (event) => tell(event, "middle"));
  node.addEventListener("pointerup", (event) => tell(event, "end"));
}

/** @type {Map<string, string>} */
const colours = new Map();

/** A colour of the page's theme: asking the browser for it may take a layout, so once. @param {string} name */
export function themeColour(name) {
  const key = `${document.documentElement.dataset.theme} ${name}`;
  let colour = colours.get(key);
  if (colour === undefined) {
    colour = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    colours.set(key, colour);
  }
  return colour;
}

/** When the next frame is on screen. @returns {Promise<void>} */
export function afterPaint() {
  return new Promise((resolve) => { requestAnimationFrame(() => setTimeout(resolve)); });
}

/** Calls back at most once per frame. @param {() => void} callback */
export function perFrame(callback) {
  let waiting = 0;
  return () => { waiting ||= requestAnimationFrame(() => { waiting = 0; callback(); }); };
}
