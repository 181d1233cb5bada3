// Where bytes come from, and the columns in them: blocks of this page, or the server that sent it. Both speak the
// same names. `blob.py` describes the format of columns.

import { byId } from "../draw/dom.js";

/**
 * @typedef {Float32Array | Float64Array | Uint8Array | Int16Array | Int32Array} Numbers
 * @typedef {{fill?: number | null, ramp?: number, type?: string, at?: number, length?: number,
 *   split?: boolean, against?: string, per?: string}} Column
 * @typedef {{meta: any, columns: Record<string, Column>, payload: ArrayBuffer}} ColumnBlob
 * @typedef {{ids: number[], texts: (string | number[])[], special: number[], complete?: boolean}} Texts
 */

/** @type {Record<string, any>} */
const ARRAYS = { u1: Uint8Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

/** @returns {Source} */
export function openSource() {
  return "served" in byId("run").dataset ? new ServerSource() : new PageSource();
}

export class Source {
  /** @param {string} _name @param {object} [_question] @returns {Promise<ArrayBuffer>} */
  async bytes(_name, _question) { throw new Error("not implemented"); }

  /** @param {string} name @param {object} [question] */
  async json(name, question) { return JSON.parse(new TextDecoder().decode(await this.bytes(name, question))); }

  /** @param {string} name @returns {Promise<ColumnBlob>} */
  async blob(name) {
    const buffer = await this.bytes(name);
    const length = new DataView(buffer).getUint32(0, true);
    const { meta, columns } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    return { meta, columns, payload: buffer.slice(4 + length) };
  }

  /** @returns {Promise<any>} */
  async run() { return this.json("run"); }

  /** @param {number[]} ids @returns {Promise<Texts>} */
  async texts(ids) { return this.json("texts", ids); }

  /** What the server knows of the whole run; null where every step has to be looked through.
   * @param {object} question @returns {Promise<number[][] | null>} */
  async query(question) { return (await this.json("query", question)).answer; }
}

class PageSource extends Source {
  allTexts = this.json("texts"); // every view of tokens needs them

  async texts() { return { ...await this.allTexts, complete: true }; }

  async query() { return null; }

  /** @param {string} name */
  async bytes(name) { return inflate(fromBase64((await blockOf(name)).textContent ?? "")); }
}

class ServerSource extends Source {
  isFirst = true;

  /** The page brings the first one. */
  async run() {
    const isFirst = this.isFirst;
    this.isFirst = false;
    return isFirst ? JSON.parse(new TextDecoder().decode(fromBase64(byId("run").textContent))) : super.run();
  }

  /** @param {string} name @param {object} [question] */
  async bytes(name, question) {
    let response;
    try {
      response = await fetch(`api/${name}`, question && { method: "POST", body: JSON.stringify(question) });
    } catch {
      throw new Error("The viewer's server does not answer. Is `pellucid view` still running?");
    }
    if (!response.ok) throw new Error(await response.text());
    return response.arrayBuffer();
  }
}

/** A block of this page: its script runs while blocks after it are still being read. @param {string} name @returns {Promise<Element>} */
function blockOf(name) {
  return new Promise((resolve, reject) => {
    const look = () => {
      const block = document.getElementById(name);
      const isRead = document.readyState !== "loading";
      if (block && (isRead || block.nextSibling)) resolve(block); // one that nothing follows may go on
      else if (isRead) reject(new Error(`This page does not hold ${name.replace("/", " ")}.`));
      else return false;
      return true;
    };
    if (look()) return;
    const observer = new MutationObserver(() => { if (look()) observer.disconnect(); });
    observer.observe(document.body, { childList: true });
    document.addEventListener("DOMContentLoaded", () => { look(); observer.disconnect(); }, { once: true });
  });
}

/** @param {string} text @returns {Uint8Array} */
function fromBase64(text) {
  const native = /** @type {any} */ (Uint8Array).fromBase64;
  return native ? native.call(Uint8Array, text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

/** @param {Uint8Array} bytes */
async function inflate(bytes) {
  const { readable, writable } = new DecompressionStream("deflate");
  const writer = writable.getWriter();
  // Both fail with what reading fails with.
  Promise.allSettled([writer.write(/** @type {any} */ (bytes)), writer.close()]);
  // Part by part, not as a `Response`: that waits behind whatever else the page has to do.
  const reader = readable.getReader();
  const parts = [];
  let length = 0;
  for (let { value } = await reader.read(); value; { value } = await reader.read()) {
    parts.push(value);
    length += value.length;
  }
  const whole = new Uint8Array(length);
  let at = 0;
  for (const part of parts) { whole.set(part, at); at += part.length; }
  return whole.buffer;
}

/**
 * One value per token (or per record, for a blob of rows). Undefined where the column is not there, null where
 * it is but says nothing.
 * @param {ColumnBlob} blob @param {string} name @param {number} length
 * @param {ArrayLike<number>} [lengths] tokens of each record, for columns with one value per record
 * @returns {Numbers | null | undefined}
 */
export function readColumn(blob, name, length, lengths = [length]) {
  const column = blob.columns[name];
  if (!column) return undefined;
  if (column.fill === null) return null;
  if (column.fill !== undefined) return new Float64Array(length).fill(column.fill);
  const isRamp = column.ramp !== undefined;
  const stored = isRamp ? [] : readStored(blob, column);
  if (!isRamp && column.per !== "record") return /** @type {Numbers} */ (stored);
  const values = isRamp ? new Int32Array(length) : new Float64Array(length);
  for (let record = 0, at = 0; record < lengths.length; record += 1) {
    for (let i = 0; i < lengths[record]; i += 1, at += 1) values[at] = isRamp ? i : stored[record];
  }
  return values;
}

/** @param {ColumnBlob} blob @param {Column} column @returns {Numbers} */
function readStored(blob, column) {
  const { at = 0, length = 0, type = "f4" } = column;
  const Type = ARRAYS[type];
  const width = Type.BYTES_PER_ELEMENT;
  const raw = new Uint8Array(blob.payload, at, length * width);
  const bytes = raw.slice();
  if (column.split) { // the first byte of every value, then the second, …
    for (let place = 0; place < width; place += 1) {
      const from = place * length;
      for (let i = 0, to = place; i < length; i += 1, to += width) bytes[to] = raw[from + i];
    }
  }
  const values = new Type(bytes.buffer);
  if (!column.against) return values;
  const reference = /** @type {Float32Array} */ (readStored(blob, blob.columns[column.against]));
  const bits = new Int32Array(reference.buffer);
  const folded = new Uint32Array(values.buffer);
  for (let i = 0; i < length; i += 1) bits[i] += (folded[i] >>> 1) ^ -(folded[i] & 1);
  return reference;
}
