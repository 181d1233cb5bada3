// Which tokens of a step are meant: those of an environment, a rank, some weights, the brushes, and a filter
// expression over tokens such as `kl > 0.5 & adv < 0 & env = math`.
//
//   expression  = conjunction { "|" conjunction }
//   conjunction = term { "&" term }
//   term        = "!" term | "(" expression ")" | field [ operator value ]
//   operator    = > < >= <= = != ~        (~: contains)
//
// A field alone means that it is set: `masked`, `trainable`. A comparison with a value that a token lacks is false.

import { FIELDS, METRICS, WORDS, metricOf, valuesOf } from "./metrics.js";
import { versionIn } from "./run.js";

/**
 * @typedef {import("./run.js").StepTokens} StepTokens @typedef {import("./run.js").TokenRecord} TokenRecord
 * @typedef {import("./texts.js").Vocabulary} Vocabulary
 * @typedef {{metric: string, low: number, high: number}} Brush
 * @typedef {{tokens: Uint8Array, records: Uint32Array, isAll: boolean, count: number}} Selection
 * `tokens`: 1 for each trainable token that is meant; `records`: how many of them each record has.
 * @typedef {{any: Tree[]} | {all: Tree[]} | {not: Tree} | {field: string, is?: string, value?: string | number}} Tree
 * @typedef {(token: number) => boolean} Test
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
 * @param {StepTokens} all @param {Vocabulary} vocabulary
 * @param {{env: string, rank?: number, weights?: string, filter: string, brush: string}} state
 * @param {string} [except] a brush that does not count: a histogram is not cut by its own
 * @param {boolean} [untrainable] tokens that were sampled and are not trainable, instead of those that are
 * @returns {Selection}
 */
export function select(all, vocabulary, { env, rank = -1, weights = "", filter, brush }, except, untrainable = false) {
  const { owners, index } = all;
  /** @type {Test[]} */
  const tests = [];
  const isOf = (/** @type {ArrayLike<number>} */ values, /** @type {number} */ wanted) => tests.push((i) => values[owners[i]] === wanted);
  if (env) isOf(index.column("env"), index.words.env.indexOf(env));
  if (rank >= 0) isOf(index.column("rank"), rank);
  const version = versionIn(weights, all.step);
  if (version !== null) isOf(oldestVersions(all), version);
  for (const { metric, low, high } of parseBrushes(brush).filter((one) => one.metric !== except)) {
    const values = valuesOf(all, metricOf(metric));
    tests.push((i) => values !== null && values[i] >= low && values[i] <= high);
  }
  if (filter.trim()) {
    try {
      tests.push(testOf(parseFilter(filter), all, vocabulary));
    } catch { /* the top bar says what is wrong with it */ }
  }
  const sampled = all.column("sampled");
  const tokens = new Uint8Array(all.length);
  const records = new Uint32Array(index.length);
  let count = 0;
  for (let i = 0; i < all.length; i += 1) {
    if ((untrainable ? !all.isTrainable(i) && sampled?.[i] === 1 : all.isTrainable(i)) && tests.every((test) => test(i))) {
      tokens[i] = 1;
      records[owners[i]] += 1;
      count += 1;
    }
  }
  return { tokens, records, isAll: !tests.length, count };
}

/** The lowest policy version of each record's tokens; Infinity where none is known. @param {StepTokens} all */
function oldestVersions(all) {
  const versions = all.column("policy_versions");
  const oldest = new Float64Array(all.index.length).fill(Infinity);
  if (versions) for (let i = 0; i < all.length; i += 1) if (versions[i] >= 0) oldest[all.owners[i]] = Math.min(oldest[all.owners[i]], versions[i]);
  return oldest;
}

const COLUMNS = Object.fromEntries(FIELDS.map(({ key, name }) => [key, name]));
const ROLLOUT_WORDS = ["outcome", "reason"]; // of a saved rollout; a token has none
const NUMBERS = ["rank", "tokens", "micro_step", "record"];
const FIELD_NAMES = [...new Set([...METRICS.map(({ key }) => key), ...Object.keys(COLUMNS)]), "at", "text", "step", ...WORDS, ...ROLLOUT_WORDS, ...NUMBERS];

/** @type {Record<string, (a: any, b: any) => boolean>} */
const COMPARISONS = {
  ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b,
  "=": (a, b) => a === b, "!=": (a, b) => a !== b, "~": (a, b) => String(a).toLowerCase().includes(String(b).toLowerCase()),
};
const PART = /\s*(?:(>=|<=|!=|[><=~&|!()])|"([^"]*)"|([^\s>=<!~&|()"]+))/y;

/** An expression as a tree; an error says what is wrong with it. @param {string} text @returns {Tree} */
export function parseFilter(text) {
  /** @type {{operator?: string, text: string}[]} */
  const parts = [];
  PART.lastIndex = 0;
  while (PART.lastIndex < text.trimEnd().length) {
    const at = PART.lastIndex;
    const match = PART.exec(text);
    if (!match) throw new Error(`“${text.slice(at).trim()}” is not understood`);
    const [, operator, quoted, word] = match;
    parts.push({ operator, text: operator ?? quoted ?? word });
  }
  const takes = (/** @type {string} */ operator) => parts[0]?.operator === operator && Boolean(parts.shift());

  /** @returns {Tree} */
  function expression() {
    const any = [conjunction()];
    while (takes("|")) any.push(conjunction());
    return { any };
  }

  /** @returns {Tree} */
  function conjunction() {
    const all = [term()];
    while (takes("&")) all.push(term());
    return { all };
  }

  /** @returns {Tree} */
  function term() {
    if (takes("!")) return { not: term() };
    if (takes("(")) {
      const inner = expression();
      if (!takes(")")) throw new Error("a ( is not closed");
      return inner;
    }
    const part = parts.shift();
    if (!part || part.operator) throw new Error(part ? `expected a field before “${part.text}”` : "something is missing at the end");
    const field = part.text;
    if (!FIELD_NAMES.includes(field)) throw new Error(`no field “${field}”; there are ${FIELD_NAMES.join(", ")}`);
    const is = parts[0]?.operator;
    if (!is || !COMPARISONS[is]) return { field };
    const [, value] = parts.splice(0, 2);
    if (!value || value.operator) throw new Error(`${field} ${is} what?`);
    if (WORDS.includes(field) || ROLLOUT_WORDS.includes(field) || field === "text" || is === "~") return { field, is, value: value.text };
    const number = Number(value.text.replace("−", "-"));
    if (Number.isNaN(number)) throw new Error(`${field} is a number, “${value.text}” is not`);
    return { field, is, value: number };
  }

  const tree = expression();
  if (parts.length) throw new Error(`expected & or | before “${parts[0].text}”`);
  return tree;
}

/** @param {Tree} tree @param {TokenRecord | StepTokens} tokens @param {Vocabulary} vocabulary @returns {Test} */
export const testOf = (tree, tokens, vocabulary) => testBy(tree, (field) => reader(field, tokens, vocabulary));

/** @param {Tree} tree @param {(field: string) => (token: number) => any} readerOf @returns {Test} */
export function testBy(tree, readerOf) {
  if ("not" in tree) {
    const test = testBy(tree.not, readerOf);
    return (i) => !test(i);
  }
  if ("any" in tree || "all" in tree) {
    const tests = ("any" in tree ? tree.any : tree.all).map((part) => testBy(part, readerOf));
    return "any" in tree ? (i) => tests.some((test) => test(i)) : (i) => tests.every((test) => test(i));
  }
  const { field, is, value } = tree;
  const read = readerOf(field);
  if (!is) return (i) => Boolean(read(i));
  const compare = COMPARISONS[is];
  return (i) => { const found = read(i); return found !== null && found !== undefined && !Number.isNaN(found) && compare(found, value); };
}

/** @param {string} field @param {TokenRecord | StepTokens} tokens @param {Vocabulary} vocabulary @returns {(token: number) => any} */
function reader(field, tokens, vocabulary) {
  const { ids, step } = tokens;
  if (field === "at") return (i) => tokens.position(i);
  if (field === "text") return (i) => vocabulary.plain(ids[i]);
  if (field === "step") return () => step;
  if (ROLLOUT_WORDS.includes(field)) return () => null;
  if (WORDS.includes(field) || NUMBERS.includes(field)) return (i) => (field === "record" ? tokens.owner(i) : tokens.index.value(field, tokens.owner(i)));
  const metric = METRICS.find(({ key }) => key === field);
  const column = tokens.column(metric ? metric.column : COLUMNS[field]);
  if (!column) return () => null;
  const of = metric?.of;
  return of ? (i) => of(column[i], step) : (i) => column[i];
}
