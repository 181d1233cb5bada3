// What tokens can be coloured, ordered and filtered by. One place says what each is called and how it is drawn.

/**
 * @typedef {{key: string, label: string, name: string, formula: string, kind: "log" | "sequential" | "diverging",
 *   column: string, of?: (value: number, step: number) => number, about: string}} Metric
 */

/** @type {Metric[]} In the order of the keys 1 to 9. */
export const METRICS = [
  { key: "kl", label: "Mismatch KL", name: "mismatch_kl", formula: "r − ℓ − 1", kind: "log", column: "mismatch_kl",
    about: "How far trainer and inference disagree on this token" },
  { key: "entropy", label: "Entropy", name: "entropy", formula: "−Σ p log p", kind: "sequential", column: "entropy",
    about: "Of the trainer's distribution at this position" },
  { key: "surprise", label: "Surprise", name: "−trainer_logprobs", formula: "−log π", kind: "sequential", column: "trainer_logprobs",
    of: (value) => -value, about: "How unlikely the trainer finds the token" },
  { key: "adv", label: "Advantage", name: "advantages", formula: "A", kind: "diverging", column: "advantages",
    about: "Which way, and how hard, the loss pushes" },
  { key: "reward", label: "Reward", name: "rewards", formula: "R", kind: "diverging", column: "rewards",
    about: "Of the rollout" },
  { key: "logratio", label: "Log ratio", name: "log_importance_ratio", formula: "ℓ = log π − log μ", kind: "diverging",
    column: "log_importance_ratio", about: "Above 0: the trainer finds the token more likely than the engine did" },
  { key: "delta", label: "Prob. delta", name: "prob_delta", formula: "Δ = π − μ", kind: "diverging", column: "prob_delta",
    about: "What the trust region of DPPO looks at" },
  { key: "loss", label: "Token loss", name: "token_loss", formula: "L", kind: "diverging", column: "token_loss",
    about: "The sum over the step ÷ denominator is the logged loss" },
  { key: "stale", label: "Staleness", name: "step − policy_versions", formula: "n − v", kind: "sequential",
    column: "policy_versions", of: (value, step) => (value < 0 ? NaN : step - value),
    about: "Steps between the weights that sampled the token and this one" },
];

export const RATIO = /** @type {Metric} */ ({ key: "ratio", label: "Ratio", name: "importance_ratio", formula: "r = exp ℓ",
  kind: "log", column: "importance_ratio", about: "π ÷ μ" });

/** @param {string} key */
export const metricOf = (key) => [...METRICS, RATIO].find((metric) => metric.key === key) ?? METRICS[0];

/**
 * The metric of every token of a record or a step; null where nothing is recorded.
 * @param {{column(name: string): any, step: number}} tokens @param {Metric} metric
 * @returns {ArrayLike<number> | null}
 */
export function valuesOf(tokens, metric) {
  const column = tokens.column(metric.column);
  if (!column || !metric.of) return column ?? null;
  const values = new Float64Array(column.length);
  for (let i = 0; i < column.length; i += 1) values[i] = metric.of(column[i], tokens.step);
  return values;
}

/**
 * Where tokens nobody sampled hold a fill, and so say nothing: everything that compares with inference.
 * @type {Set<string>}
 */
export const AGAINST_INFERENCE = new Set([
  "inference_logprobs", "mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta", "policy_versions"]);
