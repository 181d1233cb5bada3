// Numbers, characters and nodes as the page shows them. Text reaches the page through text nodes only.

const ABSENT = "–";
const WHITE_SPACE = { " ": "·", "\n": "⏎\n", "\t": "→" };
const INVISIBLE = /[\s\p{Cc}\p{Cf}\p{Z}]/gu;

async function inflate(packed) {
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function svg(tag, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

function byId(id) {
  return document.getElementById(id);
}

function minus(text) {
  return text.replaceAll("-", "−");
}

function count(value) {
  return value === null ? ABSENT : value.toLocaleString("en-US");
}

function fixed(value, digits) {
  return value === null ? ABSENT : minus(value.toFixed(digits));
}

function signed(value, digits) {
  return value !== null && value > 0 ? `+${fixed(value, digits)}` : fixed(value, digits);
}

// 0.012 and 1.2e-5: as short as a table needs.
function short(value, digits = 2) {
  if (value === null) return ABSENT;
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 10000)) return minus(value.toExponential(1).replace(".0e", "e"));
  return minus(String(Number(value.toPrecision(digits))));
}

// Seven digits hold all that a float32 knows.
function precise(value) {
  const size = Math.abs(value);
  if (Number.isInteger(value)) return count(value);
  return minus(size < 1e-4 || size >= 1e7 ? value.toExponential(4) : String(Number(value.toPrecision(7))));
}

// White space as glyphs, characters that cannot be seen as their code, everything else as it is.
function visible(text) {
  return text.replace(INVISIBLE, (character) => WHITE_SPACE[character] ?? `⟨U+${codeOf(character)}⟩`);
}

function codeOf(character) {
  return character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

function definitions(pairs) {
  return pairs.map(([term, value, style]) =>
    element("div", {}, element("dt", {}, term), element("dd", style ? { class: style } : {}, value)));
}

// The class of a KL on the log scale: 0 at or below `low`, the last one from `high` on.
function klClass(kl, scale) {
  const position = Math.log(Math.max(kl, scale.low) / scale.low) / Math.log(scale.high / scale.low);
  return Math.min(scale.classes - 1, Math.floor(position * scale.classes));
}
