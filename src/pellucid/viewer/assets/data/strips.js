// The curves of a run over its steps: which there are, and their values.

import { isSliced } from "./points.js";

/**
 * @typedef {{label: string, name: string, values: (number | null)[], colour: string, width?: number}} StripLine
 * @typedef {{title: string, about: string, log?: boolean, percent?: boolean, lines: StripLine[]}} Strip
 * @typedef {{series(name: string): (number | null)[] | null, points(name: string): (number | null)[], envs: string[], env: string}} Context
 */

/** @type {{title: string, about: string, log?: boolean, percent?: boolean, lines: (context: Context) => any[]}[]} */
const STRIPS = [
  { title: "Reward", about: "mean over rollouts", lines: ({ series, points, envs, env }) => (series(`reward/${env || "all"}`)
    ? [{ label: env || "all", name: `reward/${env || "all"}`, values: series(`reward/${env || "all"}`), colour: "series-1", width: 2 },
      ...(env || envs.length < 2 ? [] : envs.map((name, i) => ({ label: name, name: `reward/${name}`, values: series(`reward/${name}`), colour: `series-${(i % 5) + 2}`, width: 1 })))]
    : [{ label: "exported records", name: "reward", values: points("reward"), colour: "series-1", width: 2 }]) },
  { title: "Mismatch KL", about: "trainer against inference, trainable tokens", log: true, lines: ({ points }) => [
    { label: "max", name: "kl_max", values: points("kl_max"), colour: "series-6", width: 1 }, { label: "p99", name: "kl_p99", values: points("kl_p99"), colour: "series-2", width: 1.25 },
    { label: "mean", name: "kl_mean", values: points("kl_mean"), colour: "series-1", width: 2 }] },
  { title: "Entropy", about: "mean, trainable tokens", lines: ({ points }) => [{ label: "entropy", name: "entropy", values: points("entropy"), colour: "series-1" }] },
  { title: "Masked", percent: true, about: "share of trainable tokens outside the trust region", lines: ({ points }) => [
    { label: "high", name: "masked_high", values: points("masked_high"), colour: "series-2" }, { label: "low", name: "masked_low", values: points("masked_low"), colour: "series-3" }] },
  { title: "Cut by length", percent: true, about: "share of exported records", lines: ({ points }) => [{ label: "cut", name: "truncated", values: points("truncated"), colour: "series-1" }] },
  { title: "Groups without signal", about: "all rewards equal: not trained", lines: ({ series }) => [{ label: "groups", name: "zero_advantage_groups", values: series("zero_advantage_groups/all"), colour: "series-5" }] },
  { title: "Staleness", about: "steps between sampling and training", lines: ({ series, env }) => [
    { label: "max", name: "off_policy_level_max", values: series(`off_policy_level/${env || "all"}/max`), colour: "series-6", width: 1 }, { label: "mean", name: "off_policy_level_mean", values: series(`off_policy_level/${env || "all"}/mean`), colour: "series-1" }] },
  { title: "Loss", about: "as optimised", lines: ({ series }) => [{ label: "loss", name: "loss", values: series("loss"), colour: "series-4" }] },
];

/**
 * The strips that have something to show. Metrics of the run are not kept by rank or weights: with such a filter
 * only what the exported records say is left.
 * @param {any} head @param {string[]} envs @param {import("./points.js").Chosen} chosen @param {any[]} points of the head's steps
 * @returns {{steps: number[], strips: Strip[]}}
 */
export function stripsOf(head, envs, chosen, points) {
  const metrics = isSliced(chosen) ? {} : head.metrics;
  const exported = head.steps.map((/** @type {any} */ summary) => summary.step);
  const logged = Object.keys(metrics).filter((name) => name.startsWith("reward/")).flatMap((name) => metrics[name].map((/** @type {number[]} */ [step]) => step));
  const steps = [...new Set([...exported, ...logged])].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  const spread = (/** @type {[number, number | null][]} */ pairs) => {
    const values = new Array(steps.length).fill(null);
    for (const [step, value] of pairs) if (place.has(step)) values[/** @type {number} */ (place.get(step))] = value;
    return values;
  };
  const context = { envs, env: chosen.env, series: (/** @type {string} */ name) => (metrics[name] ? spread(metrics[name]) : null),
    points: (/** @type {string} */ name) => spread(exported.map((/** @type {number} */ step, /** @type {number} */ i) => [step, points[i]?.[name] ?? null])) };
  const strips = STRIPS.map((strip) => ({ ...strip, lines: strip.lines(context).filter(({ values }) => values?.some((/** @type {number | null} */ value) => value !== null)) }));
  return { steps, strips: strips.filter(({ lines }) => lines.length) };
}

/** `40:80` @param {string} text @returns {[number, number] | null} */
export function parseRange(text) {
  const [, low, high] = text.match(/^(-?\d+):(-?\d+)$/) ?? [];
  return low !== undefined && Number(low) <= Number(high) ? [Number(low), Number(high)] : null;
}
