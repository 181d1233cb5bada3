// Where bytes come from: blocks of this page, or the server that sent it. Both speak the same names.

import { byId } from "../draw/dom.js";
import { inflate, parseBlob, parseJson } from "./blob.js";

/**
 * @typedef {import("./blob.js").Blob} ColumnBlob
 * @typedef {{ids: number[], texts: (string | number[])[], special: number[], complete?: boolean}} Texts
 * @typedef {{run(): Promise<any>, slices(): Promise<any>, step(step: number): Promise<ColumnBlob>, rows(step: number): Promise<ColumnBlob>,
 *   chunk(step: number, index: number): Promise<ColumnBlob>, lead(step: number, record: number): Promise<ColumnBlob>, texts(ids: number[]): Promise<Texts>,
 *   query(question: object): Promise<number[][] | null>, pulse(): Promise<any>}} Source
 * `query`: what the server knows of the whole run; null where every step has to be looked through.
 */

/** @returns {Source} */
export function openSource() {
  return "served" in byId("run").dataset ? new ServerSource() : new PageSource();
}

/** @implements {Source} */
class PageSource {
  constructor() {
    this.allTexts = this.json("texts"); // every view of tokens needs them
  }

  run() { return this.json("run"); }

  slices() { return this.json("slices"); }

  /** @param {number} step */
  step(step) { return this.blob(`step/${step}`); }

  /** @param {number} step */
  rows(step) { return this.blob(`rows/${step}`); }

  /** @param {number} step @param {number} index */
  chunk(step, index) { return this.blob(`chunk/${step}/${index}`); }

  /** @param {number} step @param {number} record */
  lead(step, record) { return this.blob(`lead/${step}/${record}`); }

  /** @param {number[]} _ids */
  async texts(_ids) { return { ...await this.allTexts, complete: true }; }

  async query() { return null; }

  async pulse() { return null; }

  /** @param {string} name */
  async json(name) { return parseJson(await this.bytes(name)); }

  /** @param {string} name */
  async blob(name) { return parseBlob(await this.bytes(name)); }

  /** @param {string} name */
  async bytes(name) { return inflate(fromBase64((await blockOf(name)).textContent ?? "")); }
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

/** @implements {Source} */
class ServerSource {
  constructor() { this.isFirst = true; }

  /** The page brings the first one. */
  async run() {
    const head = this.isFirst ? fromBase64(byId("run").textContent).buffer : await this.bytes("run");
    this.isFirst = false;
    return parseJson(/** @type {ArrayBuffer} */ (head));
  }

  async slices() { return parseJson(await this.bytes("slices")); }

  /** @param {number} step */
  async step(step) { return parseBlob(await this.bytes(`step/${step}`)); }

  /** @param {number} step */
  async rows(step) { return parseBlob(await this.bytes(`rows/${step}`)); }

  /** @param {number} step @param {number} index */
  async chunk(step, index) { return parseBlob(await this.bytes(`chunk/${step}/${index}`)); }

  /** @param {number} step @param {number} record */
  async lead(step, record) { return parseBlob(await this.bytes(`lead/${step}/${record}`)); }

  /** @param {number[]} ids */
  async texts(ids) {
    return parseJson(await this.bytes("texts", { method: "POST", body: JSON.stringify(ids) }));
  }

  /** @param {object} question */
  async query(question) {
    return parseJson(await this.bytes("query", { method: "POST", body: JSON.stringify(question) })).answer;
  }

  async pulse() { return (await request("pulse")).json(); }

  /** @param {string} name @param {RequestInit} [options] */
  async bytes(name, options) {
    return (await request(name, options)).arrayBuffer();
  }
}

/** @param {string} name @param {RequestInit} [options] */
async function request(name, options) {
  let response;
  try {
    response = await fetch(`api/${name}`, options);
  } catch {
    throw new Error("The viewer's server does not answer. Is `pellucid view` still running?");
  }
  if (!response.ok) throw new Error(await response.text());
  return response;
}
