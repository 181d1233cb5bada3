// The losses again, token by token, with bounds of one's own choice: the formulas of `pellucid.loss.functions`.

/**
 * @typedef {{key: string, label: string, low: number, high: number, step: number, usual: number}} Bound
 * @typedef {{title: string, formula: string, bounds: Bound[], masks: boolean}} Loss
 */

const KL_TAU = { key: "kl_tau", label: "kl_tau", low: 0, high: 0.1, step: 0.001, usual: 0 };

/** @type {Record<string, Loss>} */
export const LOSSES = {
  dppo: { title: "DPPO + KL", formula: "−keep·A·r + kl_tau·ℓ²; out where A > 0 and Δ > high, or A ≤ 0 and Δ < −low", masks: true, bounds: [
    { key: "dppo_mask_high", label: "high", low: 0, high: 1, step: 0.01, usual: 0.2 }, { key: "dppo_mask_low", label: "low", low: 0, high: 1, step: 0.01, usual: 0.2 },
    { ...KL_TAU, usual: 0.001 }] },
  icepop: { title: "IcePop", formula: "−keep·A·r + kl_tau·ℓ²; out where r < min or r > max", masks: true, bounds: [
    { key: "min_ratio", label: "min ratio", low: 0, high: 1, step: 0.01, usual: 0.5 }, { key: "max_ratio", label: "max ratio", low: 1, high: 10, step: 0.05, usual: 5 }, KL_TAU] },
  ppo_clip: { title: "PPO clip", formula: "−min(r·A, clip(r, 1 − low, 1 + high)·A) + kl_tau·ℓ²", masks: true, bounds: [
    { key: "clip_high", label: "clip high", low: 0, high: 2, step: 0.01, usual: 0.2 }, { key: "clip_low", label: "clip low", low: 0, high: 1, step: 0.01, usual: 0.2 }, KL_TAU] },
  cispo: { title: "CISPO", formula: "−clip(r, 1 − low, 1 + high)·A·log π + kl_tau·ℓ²", masks: false, bounds: [
    { key: "clip_high", label: "clip high", low: 0, high: 10, step: 0.05, usual: 4 }, { key: "clip_low", label: "clip low", low: 0, high: 1, step: 0.01, usual: 1 }, KL_TAU] },
  tis: { title: "TIS", formula: "−min(r, cap)·A·log π + kl_tau·ℓ²", masks: false, bounds: [
    { key: "max_ratio", label: "cap", low: 0.1, high: 10, step: 0.05, usual: 2 }, KL_TAU] },
};

/** `dppo_mask_high=0.3,kl_tau=0` @param {string} text @returns {Record<string, number>} */
export function parseBounds(text) {
  return Object.fromEntries(text.split(",").map((part) => part.split("=")).filter(([key, value]) => key && value && Number.isFinite(Number(value)))
    .map(([key, value]) => [key, Number(value)]));
}

/** @param {Record<string, number>} bounds */
export const serialiseBounds = (bounds) => Object.entries(bounds).map(([key, value]) => `${key}=${value}`).join(",");

/** The bounds in force: what was chosen, else the run's own, else the usual. @param {string} type @param {Record<string, number>} chosen @param {any} own */
export function boundsOf(type, chosen, own) {
  return Object.fromEntries(LOSSES[type].bounds.map(({ key, usual }) => [key, chosen[key] ?? (own?.type === type ? own[key] : undefined) ?? usual]));
}

export const KEPT = 0;
export const HIGH = 1;
export const LOW = 2;
export const OTHER = 3; // out of bounds, with an advantage of 0

/**
 * What a loss does with one trainable token.
 * @param {string} type @param {Record<string, number>} bounds @param {{A: number, delta: number, ratio: number, logRatio: number, logProb: number}} token
 * @returns {{mask: number, loss: number}}
 */
export function decide(type, bounds, { A, delta, ratio, logRatio, logProb }) {
  const penalty = bounds.kl_tau * logRatio * logRatio;
  if (type === "dppo") {
    const out = A > 0 ? delta > bounds.dppo_mask_high : delta < -bounds.dppo_mask_low;
    return { mask: out ? (A > 0 ? HIGH : A < 0 ? LOW : OTHER) : KEPT, loss: penalty - (out ? 0 : A * ratio) };
  }
  if (type === "icepop") {
    const mask = ratio > bounds.max_ratio ? HIGH : ratio < bounds.min_ratio ? LOW : KEPT;
    return { mask, loss: penalty - (mask ? 0 : A * ratio) };
  }
  if (type === "ppo_clip") {
    const mask = A > 0 && ratio > 1 + bounds.clip_high ? HIGH : A < 0 && ratio < 1 - bounds.clip_low ? LOW : KEPT;
    const weight = mask === HIGH ? 1 + bounds.clip_high : mask === LOW ? 1 - bounds.clip_low : ratio;
    return { mask, loss: penalty - weight * A };
  }
  const weight = type === "tis" ? Math.min(ratio, bounds.max_ratio) : Math.min(1 + bounds.clip_high, Math.max(1 - bounds.clip_low, ratio));
  return { mask: KEPT, loss: penalty - weight * A * logProb };
}

/**
 * @typedef {{trainable: number, high: number, low: number, other: number, loss: number, recordedHigh: number, recordedLow: number,
 *   recordedMasked: number, recordedLoss: number, newlyMasked: number, newlyKept: number}} Tally
 * @typedef {{all: Tally, envs: Map<string, Tally>, changed: number[], denominator: number, hasRecord: boolean, hasLoss: boolean, skipped: number}} Outcome
 */

/** @returns {Tally} */
const tally = () => ({ trainable: 0, high: 0, low: 0, other: 0, loss: 0, recordedHigh: 0, recordedLow: 0, recordedMasked: 0, recordedLoss: 0, newlyMasked: 0, newlyKept: 0 });

/**
 * A step under other bounds. Only rl tokens have a trust region that these losses speak of.
 * @param {import("./run.js").StepTokens} all @param {string} type @param {Record<string, number>} bounds
 * @param {Uint8Array} chosen which tokens count @returns {Outcome}
 */
export function outcomeOf(all, type, bounds, chosen) {
  const [A, delta, ratio, logRatio, logProb, masked, high, low, loss] = ["advantages", "prob_delta", "importance_ratio", "log_importance_ratio",
    "trainer_logprobs", "is_masked", "is_masked_high", "is_masked_low", "token_loss"].map((name) => all.column(name));
  const result = { all: tally(), envs: new Map(), changed: /** @type {number[]} */ ([]), denominator: all.index.value("denominator", 0) || 0, hasRecord: Boolean(masked), hasLoss: Boolean(loss), skipped: 0 };
  const { index } = all;
  for (let i = 0; i < all.length; i += 1) {
    if (!chosen[i]) continue;
    const record = all.owners[i];
    const name = index.value("env", record) ?? "";
    if (!A || !ratio || !delta || !logRatio || Number.isNaN(ratio[i]) || (index.value("mode", record) ?? "rl") !== "rl") { result.skipped += 1; continue; }
    const { mask, loss: now } = decide(type, bounds, { A: A[i], delta: delta[i], ratio: ratio[i], logRatio: logRatio[i], logProb: logProb ? logProb[i] : 0 });
    if (!result.envs.has(name)) result.envs.set(name, tally());
    const wasMasked = masked?.[i] === 1;
    for (const into of [result.all, /** @type {Tally} */ (result.envs.get(name))]) {
      into.trainable += 1;
      if (mask === HIGH) into.high += 1;
      if (mask === LOW) into.low += 1;
      if (mask === OTHER) into.other += 1;
      into.loss += now;
      if (high?.[i] === 1) into.recordedHigh += 1;
      if (low?.[i] === 1) into.recordedLow += 1;
      if (wasMasked) into.recordedMasked += 1;
      into.recordedLoss += loss?.[i] ?? 0;
      if (mask && !wasMasked) into.newlyMasked += 1;
      if (!mask && wasMasked) into.newlyKept += 1;
    }
    if (masked && Boolean(mask) !== wasMasked) result.changed.push(i);
  }
  result.denominator ||= result.all.trainable;
  return result;
}
