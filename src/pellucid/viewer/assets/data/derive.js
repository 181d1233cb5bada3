// Columns that follow from the logprobs. The page carries them only where a record says something else.

/** @typedef {import("./blob.js").Numbers} Numbers */

/** @type {Record<string, {formula: string, of: (trainer: number, inference: number) => number}>} */
export const DERIVED = {
  log_importance_ratio: { formula: "ℓ = log π − log μ", of: (t, i) => t - i },
  importance_ratio: { formula: "r = exp ℓ", of: (t, i) => Math.exp(t - i) },
  mismatch_kl: { formula: "r − ℓ − 1", of: (t, i) => Math.expm1(t - i) - (t - i) },
  prob_delta: { formula: "Δ = π − μ", of: (t, i) => Math.exp(t) - Math.exp(i) },
};

const ABSOLUTE = 1e-6;
const RELATIVE = 1e-5;

/** @param {string} name @param {Numbers} trainer @param {Numbers} inference */
export function derive(name, trainer, inference) {
  const { of } = DERIVED[name];
  const values = new Float32Array(trainer.length);
  for (let i = 0; i < values.length; i += 1) values[i] = of(trainer[i], inference[i]);
  return values;
}

/** Whether a recorded value is its formula's, but for rounding. @param {number} recorded @param {number} expected */
export function agrees(recorded, expected) {
  return Math.abs(recorded - expected) <= ABSOLUTE + RELATIVE * Math.abs(expected);
}
