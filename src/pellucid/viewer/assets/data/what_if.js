// A step once more under another loss, token by token: `losses.js` has the formulas.

import { LOSSES } from "./losses.js";

/** What a loss may take the mean over. */
export const REDUCTIONS = ["token", "sequence", "group"];

/** `dppo_mask_high=0.3,kl_tau=0` @param {string} text @returns {Record<string, number>} */
export function parseBounds(text) {
  return Object.fromEntries(text.split(",").map((part) => part.split("=")).filter(([key, value]) => key && value && Number.isFinite(Number(value)))
    .map(([key, value]) => [key, Number(value)]));
}

/** @param {Record<string, number>} bounds @param {string} reduction */
export const serialiseBounds = (bounds, reduction) => [...Object.entries(bounds), ["reduction", reduction]].map(([key, value]) => `${key}=${value}`).join(",");

/** The bounds in force: what was chosen, else the run's own, else the usual. @param {string} type @param {Record<string, number>} chosen @param {any} own */
export function boundsOf(type, chosen, own) {
  return Object.fromEntries(LOSSES[type].parameters.map(({ key, usual }) => [key, chosen[key] ?? (own?.type === type ? own[key] : undefined) ?? usual]));
}

/** The mean in force, in the same order. @param {string} type @param {string} text the bounds of the address @param {any} own @returns {string} */
export function reductionOf(type, text, own) {
  const chosen = text.split(",").find((part) => part.startsWith("reduction="))?.slice("reduction=".length) ?? "";
  return REDUCTIONS.includes(chosen) ? chosen : (own?.type === type ? own.reduction : undefined) ?? LOSSES[type].reduction;
}

/** Whether a record's tokens are trained by the loss. @param {import("./run.js").StepIndex} index @param {number} record */
const isRl = (index, record) => (index.value("mode", record) ?? "rl") === "rl";

/**
 * By record: what its tokens weigh in the step's mean (`pellucid.loss.reduction`), and the mean of ℓ over its trainable tokens.
 * @param {import("./run.js").StepTokens} all @param {string} reduction
 */
export function recordsOf(all, reduction) {
  const { index, owners } = all;
  const logRatio = all.column("log_importance_ratio");
  const [trainable, sums, weights] = [0, 1, 2].map(() => new Float64Array(index.length));
  for (let i = 0; i < all.length; i += 1) {
    if (!all.isTrainable(i)) continue;
    trainable[owners[i]] += 1;
    sums[owners[i]] += logRatio ? logRatio[i] : NaN;
  }
  /** @type {Map<string | number, number>} */
  const units = new Map();
  const unitOf = (/** @type {number} */ record) => (reduction === "group" && index.value("group", record)) || record;
  let total = 0;
  for (let record = 0; record < index.length; record += 1) {
    if (!isRl(index, record) || !trainable[record]) continue;
    total += trainable[record];
    units.set(unitOf(record), (units.get(unitOf(record)) ?? 0) + trainable[record]);
  }
  return {
    weights: weights.map((_, record) => (reduction === "token" ? 1 : total / (units.size * (units.get(unitOf(record)) ?? 1)))),
    means: sums.map((sum, record) => sum / Math.max(1, trainable[record])),
  };
}

/**
 * @typedef {{trainable: number, masked: number, high: number, low: number, loss: number, recordedMasked: number, recordedLoss: number,
 *   newlyMasked: number, newlyKept: number}} Tally
 * @typedef {{all: Tally, envs: Map<string, Tally>, changed: number[], denominator: number, hasRecord: boolean, hasLoss: boolean, skipped: number}} Outcome
 */

/** @returns {Tally} */
const tally = () => ({ trainable: 0, masked: 0, high: 0, low: 0, loss: 0, recordedMasked: 0, recordedLoss: 0, newlyMasked: 0, newlyKept: 0 });

/**
 * Chosen tokens as a loss sees them, one by one; `skip` is called for those of other training modes.
 * @param {import("./run.js").StepTokens} all @param {Float64Array} means of ℓ, by record @param {Uint8Array} chosen
 * @param {(i: number, token: import("./losses.js").LossToken) => void} visit @param {() => void} [skip] @param {number} [stride]
 */
export function eachToken(all, means, chosen, visit, skip = () => {}, stride = 1) {
  const [A, delta, ratio, logRatio, logProb, teacher] = ["advantages", "prob_delta", "importance_ratio", "log_importance_ratio", "trainer_logprobs", "teacher_logprobs"]
    .map((name) => all.column(name));
  for (let i = 0; i < all.length; i += stride) {
    if (!chosen[i]) continue;
    if (!A || !ratio || !delta || !logRatio || Number.isNaN(ratio[i]) || !isRl(all.index, all.owners[i])) { skip(); continue; }
    visit(i, { A: A[i], delta: delta[i], ratio: ratio[i], logRatio: logRatio[i], sequenceLogRatio: means[all.owners[i]], logProb: logProb ? logProb[i] : 0, teacher: teacher ? teacher[i] : NaN });
  }
}

/**
 * A step under other bounds. Only rl tokens have a trust region that these losses speak of.
 * @param {import("./run.js").StepTokens} all @param {string} type @param {Record<string, number>} bounds
 * @param {string} reduction @param {Uint8Array} chosen which tokens count @returns {Outcome}
 */
export function outcomeOf(all, type, bounds, reduction, chosen) {
  const [masked, loss] = ["is_masked", "token_loss"].map((name) => all.column(name));
  const { weights, means } = recordsOf(all, reduction);
  const result = { all: tally(), envs: new Map(), changed: /** @type {number[]} */ ([]), denominator: all.index.value("denominator", 0) || 0, hasRecord: Boolean(masked), hasLoss: Boolean(loss), skipped: 0 };
  eachToken(all, means, chosen, (i, token) => {
    const now = LOSSES[type].decide(bounds, token);
    const name = all.index.value("env", all.owners[i]) ?? "";
    if (!result.envs.has(name)) result.envs.set(name, tally());
    const wasMasked = masked?.[i] === 1;
    for (const into of [result.all, /** @type {Tally} */ (result.envs.get(name))]) {
      into.trainable += 1;
      if (now.masked) into.masked += 1;
      if (now.high) into.high += 1;
      if (now.low) into.low += 1;
      into.loss += weights[all.owners[i]] * now.loss;
      if (wasMasked) into.recordedMasked += 1;
      into.recordedLoss += loss?.[i] ?? 0;
      if (now.masked && !wasMasked) into.newlyMasked += 1;
      if (!now.masked && wasMasked) into.newlyKept += 1;
    }
    if (masked && now.masked !== wasMasked) result.changed.push(i);
  }, () => { result.skipped += 1; });
  result.denominator ||= result.all.trainable;
  return result;
}
