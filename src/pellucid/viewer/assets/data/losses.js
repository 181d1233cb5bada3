// What each loss makes of a trainable token. Written by `python -m pellucid.loss.script`.

/**
 * Columns of a token by name, NaN where there is none; `sequence_log_ratio` is the mean over its sequence.
 * @typedef {Record<string, number>} LossToken
 * @typedef {{key: string, low: number, high: number, step: number, usual: number}} Parameter
 * @typedef {{loss: number, masked: boolean, high: boolean, low: boolean}} Decision
 * @typedef {{title: string, formula: string, masks: boolean, reduction: string, parameters: Parameter[],
 *   decide: (p: Record<string, number>, t: LossToken) => Decision}} Loss
 */

/** Columns that the losses read. */
export const LOSS_COLUMNS = ["teacher_logprobs", "advantages", "log_importance_ratio", "importance_ratio", "prob_delta", "trainer_logprobs"];

/** @param {Record<string, any>} columns @param {number} i @param {number} mean @return {LossToken} */
export const tokenAt = (columns, i, mean) => ({
  teacher_logprobs: columns.teacher_logprobs?.[i] ?? NaN,
  advantages: columns.advantages?.[i] ?? NaN,
  log_importance_ratio: columns.log_importance_ratio?.[i] ?? NaN,
  importance_ratio: columns.importance_ratio?.[i] ?? NaN,
  prob_delta: columns.prob_delta?.[i] ?? NaN,
  trainer_logprobs: columns.trainer_logprobs?.[i] ?? NaN,
  sequence_log_ratio: mean,
});

/** @type {Record<string, Loss>} */
export const LOSSES = {
  dppo: {
    title: "DPPO + KL",
    formula: "−keep·(adv_tau·A + teacher_tau·(log teacher − log π))·r + kl_tau·ℓ²; a token is out where A > 0 and Δ > dppo_mask_high, or A ≤ 0 and Δ < −dppo_mask_low",
    masks: true,
    reduction: "token",
    parameters: [
      {"key": "adv_tau", "low": 0, "high": 5.0, "step": 0.025, "usual": 1.0},
      {"key": "dppo_mask_high", "low": 0, "high": 1.0, "step": 0.005, "usual": 0.2},
      {"key": "dppo_mask_low", "low": 0, "high": 1.0, "step": 0.005, "usual": 0.2},
      {"key": "teacher_tau", "low": 0, "high": 1.0, "step": 0.005, "usual": 0.0},
      {"key": "kl_tau", "low": 0, "high": 0.005, "step": 2.5e-05, "usual": 0.001},
    ],
    decide(p, t) {
      const a1 = t.advantages > 0;
      const a2 = t.prob_delta > p.dppo_mask_high;
      const a3 = a1 && a2;
      const a4 = !a1;
      const a5 = -p.dppo_mask_low;
      const a6 = t.prob_delta < a5;
      const a7 = a4 && a6;
      const a8 = a3 || a7;
      const a9 = !a8;
      const a10 = p.adv_tau * t.advantages;
      const a11 = t.teacher_logprobs - t.trainer_logprobs;
      const a12 = Number.isNaN(a11);
      const a13 = a12 ? 0.0 : a11;
      const a14 = p.teacher_tau * a13;
      const a15 = a10 + a14;
      const a16 = !a9;
      const a17 = a16 ? 0.0 : t.log_importance_ratio;
      const a18 = Math.exp(a17);
      const a19 = a15 * a18;
      const a20 = a16 ? 0.0 : a19;
      const a21 = t.log_importance_ratio * t.log_importance_ratio;
      const a22 = p.kl_tau * a21;
      const a23 = a22 - a20;
      const a24 = t.advantages < 0;
      const a25 = a7 && a24;
      return { loss: a23, masked: a8, high: a3, low: a25 };
    },
  },
  ppo_clip: {
    title: "PPO clip",
    formula: "−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) + kl_tau·ℓ²",
    masks: true,
    reduction: "token",
    parameters: [
      {"key": "clip_high", "low": 0, "high": 1.0, "step": 0.005, "usual": 0.2},
      {"key": "clip_low", "low": 0, "high": 1.0, "step": 0.005, "usual": 0.2},
      {"key": "kl_tau", "low": 0, "high": 1.0, "step": 0.005, "usual": 0.0},
    ],
    decide(p, t) {
      const a1 = Math.exp(t.log_importance_ratio);
      const a2 = t.advantages > 0;
      const a3 = 1 + p.clip_high;
      const a4 = a1 > a3;
      const a5 = a2 && a4;
      const a6 = t.advantages < 0;
      const a7 = 1 - p.clip_low;
      const a8 = a1 < a7;
      const a9 = a6 && a8;
      const a10 = a5 || a9;
      const a11 = !a10;
      const a12 = !a11;
      const a13 = a12 ? 0.0 : t.log_importance_ratio;
      const a14 = a13 + a13;
      const a15 = a14 - a13;
      const a16 = a5 ? a3 : a7;
      const a17 = Math.exp(a15);
      const a18 = a11 ? a17 : a16;
      const a19 = a18 * t.advantages;
      const a20 = t.log_importance_ratio * t.log_importance_ratio;
      const a21 = p.kl_tau * a20;
      const a22 = a21 - a19;
      return { loss: a22, masked: a10, high: a5, low: a9 };
    },
  },
  cispo: {
    title: "CISPO",
    formula: "−stopgrad(clip(r, 1 − clip_low, 1 + clip_high))·A·log π + kl_tau·ℓ²",
    masks: false,
    reduction: "token",
    parameters: [
      {"key": "clip_high", "low": 0, "high": 20.0, "step": 0.1, "usual": 4.0},
      {"key": "clip_low", "low": 0, "high": 1.0, "step": 0.005, "usual": 1.0},
      {"key": "kl_tau", "low": 0, "high": 1.0, "step": 0.005, "usual": 0.0},
    ],
    decide(p, t) {
      const a1 = 1 - p.clip_low;
      const a2 = 1 + p.clip_high;
      const a3 = Math.min(a2, Math.max(a1, t.importance_ratio));
      const a4 = a3 * t.advantages;
      const a5 = a4 * t.trainer_logprobs;
      const a6 = t.log_importance_ratio * t.log_importance_ratio;
      const a7 = p.kl_tau * a6;
      const a8 = a7 - a5;
      return { loss: a8, masked: false, high: false, low: false };
    },
  },
  gspo: {
    title: "GSPO",
    formula: "−min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A) + kl_tau·ℓ², with one ratio for all tokens of a sequence: s = exp(mean of ℓ)",
    masks: true,
    reduction: "sequence",
    parameters: [
      {"key": "clip_high", "low": 0, "high": 0.002, "step": 1e-05, "usual": 0.0004},
      {"key": "clip_low", "low": 0, "high": 0.0015, "step": 7.5e-06, "usual": 0.0003},
      {"key": "kl_tau", "low": 0, "high": 1.0, "step": 0.005, "usual": 0.0},
    ],
    decide(p, t) {
      const a1 = Math.exp(t.sequence_log_ratio);
      const a2 = t.advantages > 0;
      const a3 = 1 + p.clip_high;
      const a4 = a1 > a3;
      const a5 = a2 && a4;
      const a6 = t.advantages < 0;
      const a7 = 1 - p.clip_low;
      const a8 = a1 < a7;
      const a9 = a6 && a8;
      const a10 = a5 || a9;
      const a11 = !a10;
      const a12 = !a11;
      const a13 = a12 ? 0.0 : t.log_importance_ratio;
      const a14 = a12 ? 0.0 : t.sequence_log_ratio;
      const a15 = a14 + a13;
      const a16 = a15 - a13;
      const a17 = a5 ? a3 : a7;
      const a18 = Math.exp(a16);
      const a19 = a11 ? a18 : a17;
      const a20 = a19 * t.advantages;
      const a21 = t.log_importance_ratio * t.log_importance_ratio;
      const a22 = p.kl_tau * a21;
      const a23 = a22 - a20;
      return { loss: a23, masked: a10, high: a5, low: a9 };
    },
  },
  icepop: {
    title: "IcePop",
    formula: "−keep·r·A + kl_tau·ℓ²; a token is out where r < min_ratio or r > max_ratio",
    masks: true,
    reduction: "token",
    parameters: [
      {"key": "max_ratio", "low": 1, "high": 21.0, "step": 0.1, "usual": 5.0},
      {"key": "min_ratio", "low": 0, "high": 1.0, "step": 0.005, "usual": 0.5},
      {"key": "kl_tau", "low": 0, "high": 1.0, "step": 0.005, "usual": 0.0},
    ],
    decide(p, t) {
      const a1 = t.importance_ratio > p.max_ratio;
      const a2 = t.importance_ratio < p.min_ratio;
      const a3 = a1 || a2;
      const a4 = !a3;
      const a5 = !a4;
      const a6 = a5 ? 0.0 : t.log_importance_ratio;
      const a7 = Math.exp(a6);
      const a8 = a7 * t.advantages;
      const a9 = a5 ? 0.0 : a8;
      const a10 = t.log_importance_ratio * t.log_importance_ratio;
      const a11 = p.kl_tau * a10;
      const a12 = a11 - a9;
      return { loss: a12, masked: a3, high: a1, low: a2 };
    },
  },
  tis: {
    title: "Truncated importance sampling",
    formula: "−stopgrad(min(r, max_ratio))·A·log π + kl_tau·ℓ²",
    masks: false,
    reduction: "token",
    parameters: [
      {"key": "max_ratio", "low": 0, "high": 10.0, "step": 0.05, "usual": 2.0},
      {"key": "kl_tau", "low": 0, "high": 1.0, "step": 0.005, "usual": 0.0},
    ],
    decide(p, t) {
      const a1 = Math.min(p.max_ratio, t.importance_ratio);
      const a2 = a1 * t.advantages;
      const a3 = a2 * t.trainer_logprobs;
      const a4 = t.log_importance_ratio * t.log_importance_ratio;
      const a5 = p.kl_tau * a4;
      const a6 = a5 - a3;
      return { loss: a6, masked: false, high: false, low: false };
    },
  },
};
