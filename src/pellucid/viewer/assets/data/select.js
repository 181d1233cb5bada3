// Which tokens of a step are meant: those of an environment, a rank, some weights, a filter expression, the brushes.

import { compileFilter, tokensOfStep } from "./filter.js";
import { metricOf, valuesOf } from "./metrics.js";
import { versionIn } from "./points.js";

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
