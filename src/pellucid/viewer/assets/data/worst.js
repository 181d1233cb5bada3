// The tokens of a step that stand out, by class.

import { metricOf, valuesOf } from "./metrics.js";
import { domainOf } from "../draw/scale.js";

/** @typedef {import("./run.js").StepTokens} StepTokens @typedef {{step: number, record: number, token: number, value: number, score: number}} Found */

/** @type {Record<string, {title: string, about: string}>} */
export const KINDS = {
  all: { title: "all trainable tokens", about: "furthest from 0 by the metric" },
  trained: { title: "high KL, yet trained", about: "trained although the mismatch KL is beyond the p95 of the step" },
  masked: { title: "masked", about: "outside the trust region, on either side" },
  high: { title: "masked high", about: "A > 0 and the probability already rose too far" },
  low: { title: "masked low", about: "A < 0 and the probability already fell too far" },
  against: { title: "advantage against the ratio", about: "the loss pushes up what went down since sampling, or the other way round" },
};

/**
 * @param {StepTokens} all @param {string} kind @param {string} key @param {Uint8Array} chosen @param {number} limit
 * @returns {Found[]} best first
 */
export function worstTokens(all, kind, key, chosen, limit) {
  const values = valuesOf(all, metricOf(key));
  if (!values) return [];
  const test = testOf(all, kind, chosen);
  /** @type {Found[]} */
  const found = [];
  let bar = -Infinity;
  for (let token = 0; token < all.length; token += 1) {
    if (!chosen[token] || Number.isNaN(values[token])) continue;
    const score = Math.abs(values[token]);
    if (score <= bar || !test(token)) continue;
    found.push({ step: all.step, record: all.owners[token], token: all.position(token), value: values[token], score });
    if (found.length >= 4 * limit) bar = cut(found, limit);
  }
  cut(found, limit);
  return found;
}

/** Keeps the best; returns what a further one has to beat. @param {Found[]} found @param {number} limit */
export function cut(found, limit) {
  found.sort((a, b) => b.score - a.score || a.step - b.step || a.record - b.record || a.token - b.token);
  if (found.length <= limit) return -Infinity;
  found.length = limit;
  return found[limit - 1].score;
}

/** @param {StepTokens} all @param {string} kind @param {Uint8Array} chosen @returns {(token: number) => boolean} */
function testOf(all, kind, chosen) {
  const column = (/** @type {string} */ name) => all.column(name);
  const flag = (/** @type {string} */ name) => { const values = column(name); return (/** @type {number} */ token) => values?.[token] === 1; };
  if (kind === "masked") return flag("is_masked");
  if (kind === "high") return flag("is_masked_high");
  if (kind === "low") return flag("is_masked_low");
  if (kind === "trained") {
    const [kl, masked] = [column("mismatch_kl"), flag("is_masked")];
    if (!kl) return () => false;
    const { high } = domainOf(kl, (i) => chosen[i] === 1, { ...metricOf("kl"), key: "kl" });
    return (token) => kl[token] >= Math.min(high, 0.05) && !masked(token);
  }
  if (kind === "against") {
    const [advantage, ratio] = [column("advantages"), column("log_importance_ratio")];
    return (token) => Boolean(advantage && ratio) && /** @type {any} */ (advantage)[token] * /** @type {any} */ (ratio)[token] < 0;
  }
  return () => true;
}
