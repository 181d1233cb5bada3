// Where a search finds something, in the record, the step or the run; a result leads to its token.

import { element } from "../draw/dom.js";
import { count, plural } from "../draw/format.js";

const SHOWN = 200;
const CONTEXT = 12;

export class SearchResults {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.status = element("p", { class: "results-status", role: "status" });
    this.list = element("ol");
    this.root = element("div", { class: "results", hidden: true }, this.status, this.list);
    this.turn = 0;
  }

  /** @param {import("../state.js").State} state */
  update(state) {
    if (!state.search) this.close();
    else if (!this.root.hidden && this.key !== this.keyOf(state)) this.run();
  }

  /** @param {import("../state.js").State} state */
  keyOf(state) {
    const place = state.within === "run" ? "" : state.within === "step" ? state.step : `${state.step}/${state.record}`;
    return `${state.search}\u0000${state.within}\u0000${place}`;
  }

  close() {
    if (this.root.hidden) return false;
    this.root.hidden = true;
    this.turn += 1;
    this.key = "";
    return true;
  }

  async run() {
    const turn = (this.turn += 1);
    const { state, run } = this.app;
    const query = parseQuery(state.search);
    if (!query) { this.close(); return; }
    this.key = this.keyOf(state);
    this.root.hidden = false;
    this.list.replaceChildren();
    let total = 0;
    let records = 0;
    const known = state.within === "run" && query.kind === "ids" ? await this.app.source.query({ ask: "find", ids: [...new Set(query.ids)] }) : null;
    if (turn !== this.turn) return;
    const steps = known ? [...new Set(known.map((/** @type {number[]} */ [step]) => step))] : state.within === "run" ? run.steps : [state.step];
    if (!steps.length) this.status.textContent = "0 hits in 0 records";
    for (const [place, step] of steps.entries()) {
      const index = await run.index(step);
      const numbers = known ? known.filter((/** @type {number[]} */ [own]) => own === step).map((/** @type {number[]} */ [, record]) => record)
        : state.within === "record" ? [state.record] : Array.from({ length: index.length }, (_, i) => i);
      for (const number of numbers) {
        const record = await run.record(step, number);
        if (turn !== this.turn) return;
        const ids = record.ids;
        const found = occurrences(query, ids, run.vocabulary);
        if (found.length) records += 1;
        for (const [from, to] of found) {
          if (total < SHOWN) this.list.append(this.result(record, ids, from, to));
          total += 1;
        }
      }
      const where = steps.length > 1 && !known ? ` · ${count(place + 1)} of ${count(steps.length)} steps searched` : "";
      this.status.textContent = `${plural(total, "hit")} in ${plural(records, "record")}${total > SHOWN ? `, the first ${SHOWN} below` : ""}${where}`;
    }
  }

  /** @param {any} record @param {ArrayLike<number>} ids @param {number} from @param {number} to */
  result(record, ids, from, to) {
    const show = (/** @type {number} */ a, /** @type {number} */ b) => Array.from({ length: Math.max(0, b - a) }, (_, i) => this.app.run.vocabulary.show(ids, a + i)).join("");
    return element("li", {}, element("button", { type: "button",
      onclick: () => this.app.go({ view: "record", step: record.step, record: record.record, token: from }) },
    element("small", {}, `${record.step} / ${record.record} / ${from}`),
    element("span", {}, show(Math.max(0, from - CONTEXT), from), element("mark", {}, show(from, to)), show(to, Math.min(ids.length, to + CONTEXT)))));
  }
}

// Where a text, a pattern, a token id or a sequence of ids occurs.
//
//   hello        text, in any case        /h[ae]llo/i  a pattern
//   #123         a token id               #123 45 6    ids in a row

/** @typedef {{kind: "ids", ids: number[]} | {kind: "text", pattern: RegExp}} Query */

export class SearchError extends Error {}

/** @param {string} text @returns {Query | null} */
export function parseQuery(text) {
  const asked = text.trim();
  if (!asked) return null;
  const ids = asked.match(/^#(\d+(?:[\s,]+#?\d+)*)$/);
  if (ids) return { kind: "ids", ids: ids[1].split(/[\s,#]+/).map(Number) };
  const pattern = asked.match(/^\/(.+)\/([imsu]*)$/);
  if (!pattern) return { kind: "text", pattern: new RegExp(asked.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu") };
  try {
    return { kind: "text", pattern: new RegExp(pattern[1], `g${pattern[2]}`) };
  } catch (error) {
    throw new SearchError(/** @type {Error} */ (error).message);
  }
}

/** [first, last) tokens of every occurrence.
 * @param {Query} query @param {ArrayLike<number>} ids @param {import("../data/texts.js").Vocabulary} vocabulary @param {number} [limit]
 * @returns {[number, number][]} */
export function occurrences(query, ids, vocabulary, limit = 10_000) {
  return query.kind === "ids" ? ofIds(query.ids, ids, limit) : ofText(query.pattern, ids, vocabulary, limit);
}

/** @param {number[]} wanted @param {ArrayLike<number>} ids @param {number} limit */
function ofIds(wanted, ids, limit) {
  const found = /** @type {[number, number][]} */ ([]);
  for (let at = 0; at + wanted.length <= ids.length && found.length < limit; at += 1) {
    if (wanted.every((id, i) => ids[at + i] === id)) found.push([at, at + wanted.length]);
  }
  return found;
}

/** @param {RegExp} pattern @param {ArrayLike<number>} ids @param {import("../data/texts.js").Vocabulary} vocabulary @param {number} limit */
function ofText(pattern, ids, vocabulary, limit) {
  const starts = new Int32Array(ids.length + 1);
  const parts = [];
  let length = 0;
  for (let at = 0; at < ids.length; at += 1) {
    starts[at] = length;
    const known = vocabulary.texts.get(ids[at]);
    const part = typeof known === "string" ? known : vocabulary.join(ids, at, at + 1);
    parts.push(part);
    length += part.length;
  }
  starts[ids.length] = length;
  const text = parts.join("");
  const found = /** @type {[number, number][]} */ ([]);
  let token = 0;
  for (const match of text.matchAll(pattern)) {
    if (found.length >= limit) break;
    const [from, to] = [match.index, match.index + Math.max(1, match[0].length)];
    while (token + 1 < ids.length && starts[token + 1] <= from) token += 1;
    let end = token + 1;
    while (end < ids.length && starts[end] < to) end += 1;
    found.push([token, end]);
  }
  return found;
}
