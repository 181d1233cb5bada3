// Why a token did or did not train: its state in the ledger, and the numbers that decided.

import { short, signed } from "../draw/format.js";

/**
 * @typedef {{state: string, badge: string, why: string, rule: string | null}} Reason
 * `badge` is the ledger's name of the state; `rule` the inequality that decided, with its numbers.
 */

/**
 * @param {import("./run.js").TokenRecord} record @param {number} token @param {any} loss the run's `[trainer.loss]`, or null
 * @param {boolean} isSkipped whether its step moved no weights
 * @returns {Reason}
 */
export function reasonOf(record, token, loss, isSkipped) {
  const read = (/** @type {string} */ name) => record.value(name, token);
  const trainable = read("loss_mask");
  if (trainable === undefined) return reason("Unknown", "unknown", "This export has no loss mask: whether the token trained is not recorded.");
  if (!trainable) return untrainable(read, token);
  if (isSkipped) return reason("Skipped", "skipped", "The loss or the gradient of its step was not finite, so that no weights moved.");
  const mode = record.field("mode") ?? "rl";
  const side = maskSide(record, token);
  const bounds = mode === "opd" ? { type: "dppo", dppo_mask_low: 0.2, dppo_mask_high: 0.2 } : loss;
  const rule = mode === "sft" ? null : ruleOf(read, side, bounds);
  if (side) return masked(side, read("advantages") ?? null, rule);
  if (mode === "sft") return reason("Trained", "trained", "A supervised target: its loss is −log π.");
  if (mode === "opd") return reason("Trained", "trained", "Distilled: the teacher's logprob minus the trainer's is its advantage.", rule);
  if (read("is_masked") === undefined) return reason("Trainable", "unknown", "In the loss mask; whether the trust region kept it is not recorded.", rule);
  const advantage = read("advantages") ?? null;
  if (advantage === null) return reason("Trained", "trained", "Inside the trust region; its advantage is not recorded.", rule);
  if (advantage === 0) return reason("Trained", "trained", "Its advantage is 0: only a KL term, if the loss has one, moves it.", rule);
  const push = advantage > 0 ? "up" : "down";
  return reason("Trained", "trained", `Its advantage ${signed(advantage, 3)} pushes its probability ${push}.`, rule);
}

/** @param {import("./run.js").TokenRecord} record @param {number} token @returns {"high" | "low" | "neither" | null} */
export function maskSide(record, token) {
  if (record.value("is_masked", token) !== 1) return null;
  if (record.value("is_masked_high", token)) return "high";
  return record.value("is_masked_low", token) ? "low" : "neither";
}

/** @param {string} state @param {string} badge @param {string} why @param {string | null} [rule] @returns {Reason} */
const reason = (state, badge, why, rule = null) => ({ state, badge, why, rule });

/** @param {(name: string) => any} read @param {number} token */
function untrainable(read, token) {
  const sampled = read("sampled");
  if (sampled) return reason("Not trainable", "untrainable", "Sampled, but masked out by the environment or trained in another branch.");
  if (token === 0) return reason("Context", "context", "The first token of a sequence has no prediction, so there is nothing to train.");
  if (sampled === 0) return reason("Context", "context", "Prompt or tool output: the policy did not sample it.");
  return reason("Not trainable", "untrainable", "Outside the loss mask: prompt, tool output, or masked out by the environment.");
}

/** @param {"high" | "low" | "neither"} side @param {number | null} advantage @param {string | null} rule */
function masked(side, advantage, rule) {
  const pull = advantage === null ? "Its advantage" : `Its advantage ${signed(advantage, 3)}`;
  const rest = "Left out of the policy gradient; only a KL term, if the loss has one, still moves it.";
  const because = {
    high: `${pull} would raise a probability that is already too far above the one sampled from. ${rest}`,
    low: `${pull} would lower a probability that is already too far below the one sampled from. ${rest}`,
    neither: `Out of the trust region. ${rest}`,
  };
  const state = { high: "Masked high", low: "Masked low", neither: "Masked" }[side];
  return reason(state, "masked", because[side], rule);
}

/**
 * The comparison that the trust region of the run's loss makes for this token.
 * @param {(name: string) => any} read @param {"high" | "low" | "neither" | null} side @param {any} loss
 */
function ruleOf(read, side, loss) {
  const [advantage, delta, ratio] = [read("advantages"), read("prob_delta"), read("importance_ratio")];
  if (!loss || typeof advantage !== "number") return null;
  const relation = (/** @type {boolean} */ out, /** @type {string} */ beyond, /** @type {string} */ within) => (out ? beyond : within);
  const isOut = side !== null;
  if (loss.type === "dppo" && typeof delta === "number") {
    return advantage > 0
      ? `A > 0 and Δ = ${signed(delta, 4)} ${relation(isOut, ">", "≤")} dppo_mask_high = ${short(loss.dppo_mask_high)}`
      : `A ≤ 0 and Δ = ${signed(delta, 4)} ${relation(isOut, "<", "≥")} −dppo_mask_low = −${short(loss.dppo_mask_low)}`;
  }
  if (typeof ratio !== "number") return null;
  if (loss.type === "icepop") {
    if (!isOut) return `min_ratio = ${short(loss.min_ratio)} ≤ r = ${short(ratio, 4)} ≤ max_ratio = ${short(loss.max_ratio)}`;
    return ratio > loss.max_ratio ? `r = ${short(ratio, 4)} > max_ratio = ${short(loss.max_ratio)}` : `r = ${short(ratio, 4)} < min_ratio = ${short(loss.min_ratio)}`;
  }
  if (loss.type === "ppo_clip") {
    if (advantage === 0) return "A = 0: nothing to clip";
    return advantage > 0
      ? `A > 0 and r = ${short(ratio, 4)} ${relation(isOut, ">", "≤")} 1 + clip_high = ${short(1 + loss.clip_high)}`
      : `A < 0 and r = ${short(ratio, 4)} ${relation(isOut, "<", "≥")} 1 − clip_low = ${short(1 - loss.clip_low)}`;
  }
  return null;
}
