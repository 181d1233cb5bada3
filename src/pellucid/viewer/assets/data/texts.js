// Ids to what is shown. White space and characters that cannot be seen get a glyph; a character that several
// tokens spell is shown by the first of them, and the others say that they continue it.

/** @typedef {import("./source.js").Source} Source */

const GLYPHS = /** @type {Record<string, string>} */ ({ " ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽" });
// Controls, format characters (bidi marks among them), unusual spaces, unassigned and private ones.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Zs}\p{Co}\p{Cn}\p{Cs}]/gu;
const ATTACHES = /^[\p{M}\u200d\ufe0f\u{1f3fb}-\u{1f3ff}]/u;
const JOINER = "\u200d"; // between two pictures it makes one of them
const JOINABLE = /[\p{Extended_Pictographic}\ufe0f\u{1f3fb}-\u{1f3ff}]/u;
const CONTINUES = "‥";
const LONGEST_CHARACTER = 12;

/** @param {string} text */
export function visible(text) {
  return text.replace(UNSEEN, (character, at) => {
    if (character === JOINER && JOINABLE.test([...text.slice(0, at)].at(-1) ?? "")) return character;
    return GLYPHS[character] ?? `⟨U+${/** @type {number} */ (character.codePointAt(0)).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** Text to read: spaces and line ends stay, other characters that cannot be seen get a glyph. @param {string} text */
export const readable = (text) => text.split(/([ \n\t]+)/).map((part, i) => (i % 2 ? part : visible(part))).join("");

export class Vocabulary {
  /** @param {Source} source */
  constructor(source) {
    this.source = source;
    /** @type {Map<number, string | number[]>} */
    this.texts = new Map();
    /** @type {Set<number>} */
    this.special = new Set();
    /** @type {Map<number, string>} */
    this.shown = new Map();
    /** @type {Map<number, boolean>} ids whose glyphs depend on their neighbours */
    this.partial = new Map();
    /** Whether all ids that there are have been looked up. */
    this.isComplete = false;
  }

  /** Looks up the ids that are not known yet. @param {ArrayLike<number>} ids */
  async learn(ids) {
    if (this.isComplete) return;
    const missing = new Set();
    for (let i = 0; i < ids.length; i += 1) if (!this.texts.has(ids[i])) missing.add(ids[i]);
    if (!missing.size) return;
    const found = await this.source.texts([...missing]);
    found.ids.forEach((id, at) => this.texts.set(id, found.texts[at]));
    for (const id of found.special) this.special.add(id);
    this.isComplete = found.complete ?? false;
  }

  /** @param {number} id */
  isSpecial(id) { return this.special.has(id); }

  /** The text of one id on its own; bytes that are no text as hex. @param {number} id */
  plain(id) {
    const text = this.texts.get(id) ?? `#${id}`;
    return typeof text === "string" ? text : text.map(hex).join("");
  }

  /** @param {number} id */
  isPartial(id) {
    let found = this.partial.get(id);
    if (found === undefined) {
      const text = this.texts.get(id);
      found = text !== undefined && (typeof text !== "string" || ATTACHES.test(text));
      if (text !== undefined) this.partial.set(id, found);
    }
    return found;
  }

  /** What a token of a sequence shows. @param {ArrayLike<number>} ids @param {number} at */
  show(ids, at) {
    const id = ids[at];
    if (this.isPartial(id) || (at + 1 < ids.length && this.isPartial(ids[at + 1]))) return this.spell(ids, at);
    let shown = this.shown.get(id);
    if (shown === undefined) {
      shown = visible(this.plain(id));
      this.shown.set(id, shown);
    }
    return shown;
  }

  /** The text of a stretch of tokens, bytes decoded jointly. @param {ArrayLike<number>} ids @param {number} start @param {number} end */
  join(ids, start, end) {
    let text = "";
    for (let at = start; at < end; at += 1) {
      const part = this.texts.get(ids[at]) ?? `#${ids[at]}`;
      text += typeof part === "string" ? part : this.characters(ids, at);
    }
    return text;
  }

  /** The characters that begin in a token of bytes. @param {ArrayLike<number>} ids @param {number} at */
  characters(ids, at) {
    const [bytes, from, to] = this.bytesAround(ids, at);
    return decode(bytes).filter(({ start }) => start >= from && start < to).map(({ text }) => text).join("");
  }

  /** @param {ArrayLike<number>} ids @param {number} at */
  spell(ids, at) {
    const own = this.texts.get(ids[at]);
    const next = at + 1 < ids.length ? this.texts.get(ids[at + 1]) : undefined;
    if (typeof own === "string" && (typeof next !== "string" || !ATTACHES.test(next)) && !ATTACHES.test(own)) {
      return visible(own);
    }
    const [bytes, from, to] = this.bytesAround(ids, at);
    const graphemes = clusters(decode(bytes));
    const mine = graphemes.filter(({ start }) => start >= from && start < to);
    return mine.length ? visible(mine.map(({ text }) => text).join("")) : CONTINUES;
  }

  /** The bytes of a token and its neighbours, and where its own are. @param {ArrayLike<number>} ids @param {number} at
   * @returns {[number[], number, number]} */
  bytesAround(ids, at) {
    const first = Math.max(0, at - LONGEST_CHARACTER);
    const last = Math.min(ids.length, at + LONGEST_CHARACTER + 1);
    const bytes = [];
    let from = 0;
    let to = 0;
    for (let i = first; i < last; i += 1) {
      if (i === at) from = bytes.length;
      const text = this.texts.get(ids[i]) ?? `#${ids[i]}`;
      bytes.push(...(typeof text === "string" ? new TextEncoder().encode(text) : text));
      if (i === at) to = bytes.length;
    }
    return [bytes, from, to];
  }
}

/** @param {number} byte */
const hex = (byte) => `⟨${byte.toString(16).toUpperCase().padStart(2, "0")}⟩`;

/** Characters with the byte that each begins at; a byte that belongs to none as hex. @param {number[]} bytes */
function decode(bytes) {
  const found = [];
  for (let at = 0; at < bytes.length;) {
    const lead = bytes[at];
    const width = lead < 0x80 ? 1 : lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc2 ? 2 : 0;
    let text = "";
    try {
      text = width ? new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes.slice(at, at + width))) : "";
    } catch { /* not a character: shown as its byte */ }
    found.push({ text: text || hex(lead), start: at });
    at += text ? width : 1;
  }
  return found;
}

/** @param {{text: string, start: number}[]} characters */
function clusters(characters) {
  const startOf = new Map();
  let length = 0;
  for (const { text, start } of characters) { startOf.set(length, start); length += text.length; }
  const segmenter = new Intl.Segmenter(undefined, { granularity: "grapheme" });
  return Array.from(segmenter.segment(characters.map(({ text }) => text).join("")),
    ({ segment, index }) => ({ text: segment, start: startOf.get(index) ?? 0 }));
}
