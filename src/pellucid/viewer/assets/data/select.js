// Which tokens of a step are meant: those of an environment, a rank, some weights, a filter expression, the brushes.

import { METRICS, RATIO, metricOf, valuesOf } from "./metrics.js";
import { versionIn } from "./run.js";

/**
 * @typedef {{metric: string, low: number, high: number}} Brush
 * @typedef {{tokens: Uint8Array, records: Uint32Array, isAll: boolean, count: number}} Selection
 * `tokens`: 1 for each trainable token that is meant; `records`: how many of them each record has.
 */

/** `kl:0.1:2,entropy:0:1` @param {string} text @returns {Brush[]} */
export function parseBrushes(text) {
  return text.split(",").map((part) => part.split(":")).filter(([, low, high]) => low && high && Number(low) <= Number(high))
    .map(([metric, low, high]) => ({ metric, low: Number(low), high: Number(high) }));
}

/** @param {Brush[]} brushes */
export function serialiseBrushes(brushes) {
  return brushes.map(({ metric, low, high }) => `${metric}:${Number(low.toPrecision(5))}:${Number(high.toPrecision(5))}`).join(",");
}

/**
 * @param {import("./run.js").StepTokens} all @param {import("./texts.js").Vocabulary} vocabulary
 * @param {{env: string, rank?: number, weights?: string, filter: string, brush: string}} state @param {string} [except] a brush that does not count: a
 *   histogram is not cut by its own
 * @returns {Selection}
 */
export function select(all, vocabulary, { env, rank = -1, weights = "", filter, brush }, except) {
  const brushes = parseBrushes(brush).filter(({ metric }) => metric !== except);
  const tests = [];
  if (env) {
    const code = all.index.words.env.indexOf(env);
    const envs = all.index.column("env");
    tests.push((/** @type {number} */ i) => envs[all.owners[i]] === code);
  }
  if (rank >= 0) {
    const ranks = all.index.column("rank");
    tests.push((/** @type {number} */ i) => ranks[all.owners[i]] === rank);
  }
  const version = versionIn(weights, all.step);
  if (version !== null) {
    const oldest = oldestVersions(all);
    tests.push((/** @type {number} */ i) => oldest[all.owners[i]] === version);
  }
  for (const { metric, low, high } of brushes) {
    const values = valuesOf(all, metricOf(metric));
    tests.push((/** @type {number} */ i) => values !== null && values[i] >= low && values[i] <= high);
  }
  if (filter.trim()) {
    try {
      tests.push(compileFilter(filter).bind(tokensOfStep(all, vocabulary)));
    } catch { /* the top bar says what is wrong with it */ }
  }
  const tokens = new Uint8Array(all.length);
  const records = new Uint32Array(all.index.length);
  let count = 0;
  for (let i = 0; i < all.length; i += 1) {
    if (all.isTrainable(i) && tests.every((test) => test(i))) {
      tokens[i] = 1;
      records[all.owners[i]] += 1;
      count += 1;
    }
  }
  return { tokens, records, isAll: !tests.length, count };
}

/** The lowest policy version of each record's tokens; Infinity where none is known. @param {import("./run.js").StepTokens} all */
function oldestVersions(all) {
  const versions = all.column("policy_versions");
  const oldest = new Float64Array(all.index.length).fill(Infinity);
  if (versions) for (let i = 0; i < all.length; i += 1) if (versions[i] >= 0) oldest[all.owners[i]] = Math.min(oldest[all.owners[i]], versions[i]);
  return oldest;
}

// Filter expressions over tokens: `kl > 0.5 & adv < 0 & env = math`.
//
//   expression  = conjunction { "|" conjunction }
//   conjunction = term { "&" term }
//   term        = "!" term | "(" expression ")" | field [ operator value ]
//   operator    = > < >= <= = != ~        (~: contains)
//
// A field alone means that it is set: `masked`, `trainable`. A comparison with a value that a token lacks is false.


/**
 * @typedef {{column(name: string): any, step: number, word(name: string, token: number): any, text(token: number): string,
 *   at(token: number): number}} Tokens
 * @typedef {(token: number) => boolean} Test
 * @typedef {{any: Tree[]} | {all: Tree[]} | {not: Tree} | {field: string, is?: string, value?: string | number}} Tree
 * @typedef {{bind(tokens: Tokens): Test, tree: Tree}} Filter
 */

const FLAGS = /** @type {Record<string, string>} */ ({ masked: "is_masked", high: "is_masked_high", low: "is_masked_low", trainable: "loss_mask", sampled: "sampled" });
const COLUMNS = /** @type {Record<string, string>} */ ({ id: "token_ids", logp: "trainer_logprobs", version: "policy_versions", ...FLAGS });
const WORDS = ["env", "mode", "example", "group", "rollout", "sample", "run", "stop"];
const NUMBERS = ["rank", "tokens", "micro_step", "record"];

export const FIELD_NAMES = [...METRICS.map(({ key }) => key), RATIO.key, ...Object.keys(COLUMNS), "at", "text", "step", ...WORDS, ...NUMBERS];

export class FilterError extends Error {}

/** @param {string} text @returns {Filter} */
export function compileFilter(text) {
  const parser = new Parser(text);
  const filter = parser.expression();
  parser.end();
  return filter;
}

const TOKEN = /\s*(?:(>=|<=|!=|[><=~&|!()])|"([^"]*)"|([^\s>=<!~&|()"]+))/y;

class Parser {
  /** @param {string} text */
  constructor(text) {
    this.text = text;
    /** @type {{kind: "operator" | "word" | "quoted", text: string, at: number}[]} */
    this.parts = [];
    this.place = 0;
    TOKEN.lastIndex = 0;
    while (TOKEN.lastIndex < text.trimEnd().length) {
      const at = TOKEN.lastIndex;
      const match = TOKEN.exec(text);
      if (!match) throw new FilterError(`“${text.slice(at).trim()}” is not understood`);
      const [, operator, quoted, word] = match;
      this.parts.push(operator ? { kind: "operator", text: operator, at } : quoted !== undefined ? { kind: "quoted", text: quoted, at } : { kind: "word", text: word, at });
    }
  }

  /** @param {string} operator */
  takes(operator) {
    const part = this.parts[this.place];
    if (part?.kind !== "operator" || part.text !== operator) return false;
    this.place += 1;
    return true;
  }

  end() {
    const part = this.parts[this.place];
    if (part) throw new FilterError(`expected & or | before “${part.text}”`);
  }

  /** @returns {Filter} */
  expression() {
    const parts = [this.conjunction()];
    while (this.takes("|")) parts.push(this.conjunction());
    return { tree: { any: parts.map(({ tree }) => tree) },
      bind: (tokens) => { const tests = parts.map((part) => part.bind(tokens)); return (i) => tests.some((test) => test(i)); } };
  }

  /** @returns {Filter} */
  conjunction() {
    const parts = [this.term()];
    while (this.takes("&")) parts.push(this.term());
    return { tree: { all: parts.map(({ tree }) => tree) },
      bind: (tokens) => { const tests = parts.map((part) => part.bind(tokens)); return (i) => tests.every((test) => test(i)); } };
  }

  /** @returns {Filter} */
  term() {
    if (this.takes("!")) {
      const inner = this.term();
      return { tree: { not: inner.tree }, bind: (tokens) => { const test = inner.bind(tokens); return (i) => !test(i); } };
    }
    if (this.takes("(")) {
      const inner = this.expression();
      if (!this.takes(")")) throw new FilterError("a ( is not closed");
      return inner;
    }
    const part = this.parts[this.place];
    if (!part || part.kind === "operator") throw new FilterError(part ? `expected a field before “${part.text}”` : "something is missing at the end");
    this.place += 1;
    if (!FIELD_NAMES.includes(part.text)) throw new FilterError(`no field “${part.text}”; there are ${FIELD_NAMES.join(", ")}`);
    const operator = this.parts[this.place];
    if (operator?.kind !== "operator" || !COMPARISONS[operator.text]) {
      return { tree: { field: part.text }, bind: (tokens) => { const read = reader(part.text, tokens); return (i) => Boolean(read(i)); } };
    }
    const value = this.parts[this.place + 1];
    if (!value || value.kind === "operator") throw new FilterError(`${part.text} ${operator.text} what?`);
    this.place += 2;
    return comparison(part.text, operator.text, value.text);
  }
}

/** @type {Record<string, (a: any, b: any) => boolean>} */
const COMPARISONS = {
  ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b,
  "=": (a, b) => a === b, "!=": (a, b) => a !== b, "~": (a, b) => String(a).toLowerCase().includes(String(b).toLowerCase()),
};

/** @param {string} field @param {string} operator @param {string} text @returns {Filter} */
function comparison(field, operator, text) {
  const isText = WORDS.includes(field) || field === "text" || operator === "~";
  const value = isText ? text : Number(text.replace("−", "-"));
  if (!isText && Number.isNaN(value)) throw new FilterError(`${field} is a number, “${text}” is not`);
  const compare = COMPARISONS[operator];
  return { tree: { field, is: operator, value }, bind: (tokens) => {
    const read = reader(field, tokens);
    return (i) => { const found = read(i); return found !== null && found !== undefined && !Number.isNaN(found) && compare(found, value); };
  } };
}

/** @param {string} field @param {Tokens} tokens @returns {(token: number) => any} */
function reader(field, tokens) {
  if (field === "at") return (i) => tokens.at(i);
  if (field === "text") return (i) => tokens.text(i);
  if (field === "step") return () => tokens.step;
  if (WORDS.includes(field) || NUMBERS.includes(field)) return (i) => tokens.word(field, i);
  const metric = [...METRICS, RATIO].find(({ key }) => key === field);
  const column = tokens.column(metric ? metric.column : COLUMNS[field]);
  if (!column) return () => null;
  const of = metric?.of;
  return of ? (i) => of(column[i], tokens.step) : (i) => column[i];
}

/** @param {import("./run.js").TokenRecord} record @param {import("./texts.js").Vocabulary} vocabulary @returns {Tokens} */
export function tokensOfRecord(record, vocabulary) {
  const ids = record.ids;
  return { column: (name) => record.column(name), step: record.step, at: (i) => i, text: (i) => vocabulary.plain(ids[i]),
    word: (name) => (name === "record" ? record.record : record.field(name)) };
}

/** @param {import("./run.js").StepTokens} all @param {import("./texts.js").Vocabulary} vocabulary @returns {Tokens} */
export function tokensOfStep(all, vocabulary) {
  const ids = all.ids;
  return { column: (name) => all.column(name), step: all.step, at: (i) => all.position(i), text: (i) => vocabulary.plain(ids[i]),
    word: (name, i) => (name === "record" ? all.owners[i] : all.index.value(name, all.owners[i])) };
}
