// The curves of a run over its steps: which there are, their values, and how they are grouped.

import { isSliced } from "./run.js";

/** @typedef {{label: string, name: string, values: (number | null)[], colour: string, width?: number, dash?: number[]}} StripLine
 * @typedef {{title: string, about: string, log?: boolean, percent?: boolean, lines: StripLine[]}} Strip
 * @typedef {{series(name: string): (number | null)[] | null, points(name: string): (number | null)[], envs: string[], env: string}} Context */

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
  { title: "Gradient norm", about: "before clipping", lines: ({ series }) => [{ label: "norm", name: "grad_norm", values: series("grad_norm"), colour: "series-3" }] },
  { title: "Learning rate", about: "of the step", lines: ({ series }) => [{ label: "lr", name: "lr", values: series("lr"), colour: "series-6" }] },
  { title: "Throughput", about: "tokens per second through the trainer", lines: ({ series }) => [{ label: "tokens/s", name: "throughput/tokens_per_s", values: series("throughput/tokens_per_s"), colour: "series-4" }] },
  { title: "Loss", about: "as optimised", lines: ({ series }) => [{ label: "loss", name: "loss", values: series("loss"), colour: "series-4" }] },
];

/** What there is to choose from, and the metrics that belong there. @type {[string, RegExp][]} */
const GROUPS = [
  ["Optimizer", /^(loss$|grad_norm|lr$|skipped_steps|kl_ent_ratio|update)/], ["Evaluations", /^(eval|validation)\//], ["Rewards", /^(reward|completion_length)\//],
  ["Environments", /^metrics\//], ["Mismatch and masks", /^(mismatch_kl|unmasked_mismatch_kl|is_masked|entropy)/], ["Staleness", /^(off_policy_level|policy_version)/],
  ["Rollouts", /(_rollouts|_groups|^batch_)/], ["Throughput", /throughput|per_s$|^memory/], ["Pipeline times", /(^|\/)time\//], ["Alarms", /^alarms\//], ["Other", /./],
];

export const OVERVIEW = "Overview";
export const EVERYTHING = "Everything";

/** @param {string} name */
const groupOf = (name) => /** @type {[string, RegExp]} */ (GROUPS.find(([, pattern]) => pattern.test(name)))[0];

/** Names of the groups that a run has metrics of. @param {Record<string, any>} metrics */
export function groupsOf(metrics) {
  const found = new Set(Object.keys(metrics).map(groupOf));
  return [OVERVIEW, ...GROUPS.map(([title]) => title).filter((title) => found.has(title)), EVERYTHING];
}

/** `mismatch_kl/all/mean` is the mean of the family `mismatch_kl` over all. @param {string} name @param {string[]} envs */
function placeOf(name, envs) {
  const words = name.split("/");
  const part = words.length > 1 && ["mean", "std", "max"].includes(words[words.length - 1]) ? words.pop() : "";
  const isScope = (/** @type {string} */ word) => word === "all" || envs.includes(word);
  const at = words.findIndex((word, i) => i > 0 && isScope(word));
  const [scope] = at < 0 ? [""] : words.splice(at, 1);
  return { family: words.join("/"), scope, part };
}

/**
 * The strips to show. Metrics of the run are not kept by rank or weights: with such a filter only what the exported
 * records say is left.
 * @param {any} head @param {Record<string, [number, number][]>} all every metric @param {string[]} envs @param {any[]} points of the head's steps
 * @param {import("./run.js").Chosen & {show: string, pick: string, smooth: number, log: boolean}} chosen
 * @returns {{steps: number[], strips: Strip[]}}
 */
export function stripsOf(head, all, envs, chosen, points) {
  const metrics = isSliced(chosen) ? {} : all;
  const exported = head.steps.map((/** @type {any} */ summary) => summary.step);
  const steps = [...new Set([...exported, ...Object.values(metrics).flatMap((pairs) => pairs.map(([step]) => step))])].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  const spread = (/** @type {[number, number | null][]} */ pairs) => {
    const values = new Array(steps.length).fill(null);
    for (const [step, value] of pairs) if (place.has(step)) values[/** @type {number} */ (place.get(step))] = value;
    return values;
  };
  const context = { envs, env: chosen.env, series: (/** @type {string} */ name) => (metrics[name] ? spread(metrics[name]) : null),
    points: (/** @type {string} */ name) => (exported.length ? spread(exported.map((/** @type {number} */ step, /** @type {number} */ i) => [step, points[i]?.[name] ?? null]))
      : metrics[AS_LOGGED[name]?.(chosen.env || "all")] ? spread(metrics[AS_LOGGED[name](chosen.env || "all")]) : []) };
  const isOverview = (!chosen.show || chosen.show === OVERVIEW) && !chosen.pick;
  const known = (/** @type {any[]} */ strips) => strips.map((strip) => ({ ...strip, log: chosen.log || strip.log, lines: strip.lines.filter((/** @type {any} */ { values }) => values?.some((/** @type {number | null} */ value) => value !== null)) })).filter(({ lines }) => lines.length);
  const overview = isOverview ? known(STRIPS.map((strip) => ({ ...strip, lines: strip.lines(context) }))) : [];
  // dumps may hold parts of the reward only: no curve of the overview, so all that there are
  const shown = overview.length ? overview : known(familiesOf(metrics, envs, isOverview ? { ...chosen, show: EVERYTHING } : chosen, spread));
  return { steps, strips: chosen.smooth > 1 ? shown.map((strip) => ({ ...strip, lines: strip.lines.map((/** @type {any} */ line) => ({ ...line, values: smoothed(line.values, chosen.smooth) })) })) : shown };
}

/** What the trainer logs of the same, for a run without an export. @type {Record<string, (env: string) => string>} */
const AS_LOGGED = {
  kl_max: (env) => `mismatch_kl/${env}/max`, kl_mean: (env) => `mismatch_kl/${env}/mean`, entropy: (env) => `entropy/${env}/mean`,
  masked_high: (env) => `is_masked_high/${env}`, masked_low: (env) => `is_masked_low/${env}`,
};

/** A strip for each family of metrics, with a line for each environment and part of it. @param {Record<string, [number, number][]>} metrics @param {string[]} envs
 * @param {{env: string, show: string, pick: string}} chosen @param {(pairs: [number, number][]) => (number | null)[]} spread @returns {Strip[]} */
function familiesOf(metrics, envs, { env, show, pick }, spread) {
  const wanted = pick.toLowerCase().split(/[\s,]+/).filter(Boolean);
  /** @type {Map<string, Strip>} */
  const found = new Map();
  const rank = (/** @type {string} */ name) => name.replace(/\/mean$/, "/"); // before its max
  for (const name of Object.keys(metrics).sort((a, b) => GROUPS.findIndex(([title]) => title === groupOf(a)) - GROUPS.findIndex(([title]) => title === groupOf(b)) || (rank(a) < rank(b) ? -1 : 1))) {
    const { family, scope, part } = placeOf(name, envs);
    if (wanted.length ? !wanted.some((word) => name.toLowerCase().includes(word)) : show && show !== EVERYTHING && show !== OVERVIEW && groupOf(name) !== show) continue;
    if ((envs.length === 1 && scope === envs[0] && metrics[name.replace(`/${scope}`, "/all")]) || part === "std" || (!part && metrics[`${name}/mean`]) || (env && scope && scope !== env)) continue;
    if (!found.has(family)) found.set(family, { title: family, about: groupOf(name), lines: [] });
    const { lines } = /** @type {Strip} */ (found.get(family));
    lines.push({ label: [scope, part].filter(Boolean).join(" ") || family, name, values: spread(metrics[name]), colour: `series-${(lines.length % 6) + 1}`, width: part !== "max" && (scope === "all" || !scope) ? 1.75 : 1 });
  }
  return [...found.values()];
}

/** The mean of up to so many values, the last of them at its place; gaps stay. @param {(number | null)[]} values @param {number} width */
export function smoothed(values, width) {
  return values.map((value, i) => {
    if (value === null) return null;
    const near = /** @type {number[]} */ (values.slice(Math.max(0, i - width + 1), i + 1).filter((one) => one !== null));
    return near.reduce((sum, one) => sum + one, 0) / near.length;
  });
}

/** `40:80` @param {string} text @returns {[number, number] | null} */
export function parseRange(text) {
  const [, low, high] = text.match(/^(-?\d+):(-?\d+)$/) ?? [];
  return low !== undefined && Number(low) <= Number(high) ? [Number(low), Number(high)] : null;
}
