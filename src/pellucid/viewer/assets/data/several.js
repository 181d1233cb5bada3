// Several runs: what their settings say, which of them pass a filter, and their curves on one axis.

import { stripsOf } from "./curves.js";
import { lastAtMost } from "./run.js";

/** @typedef {string | [number, string][]} Setting text, or [first step, text] where a resume changed it
 * @typedef {{number: number, name: string, kind: string, state: string, reason: string, steps: number, max_steps: number | null, curve: [number, number][],
 *   loss: number | null, tokens: number | null, duration_s: number | null, written_at: number, exported: boolean, settings: Record<string, Setting>}} ListedRun
 * @typedef {{metrics: Record<string, [number, number][]>, time: [number, number][], tokens: [number, number][]}} Curves
 * @typedef {{name: string, colour: string, dash: number[]}} Look of a run in charts and texts
 */

export const MOST_COMPARED = 12;
const DASHES = [[], [7, 3], [2, 2.5], [9, 3, 2, 3], [5, 2, 1, 2, 1, 2]];
const NUM_COLOURS = 6;
const SEPARATOR = "//"; // no path has two slashes in a row

/** How the run at a place of the selection is drawn: no two of thirty look alike. @param {string} name @param {number} place @returns {Look} */
export const lookOf = (name, place) => ({ name, colour: `run-${(place % NUM_COLOURS) + 1}`, dash: DASHES[place % DASHES.length] });

/** @param {string} text @returns {string[]} */
export const namesOf = (text) => text.split(SEPARATOR).filter(Boolean);

/** @param {string[]} names */
export const joined = (names) => names.join(SEPARATOR);

/** The value that a run ended with; null where it has none. @param {ListedRun} run @param {string} key */
export function lastSetting({ settings }, key) {
  const value = settings[key];
  return value === undefined ? null : typeof value === "string" ? value : value[value.length - 1][1];
}

/** `0.0003 → 0.0001 from step 40` @param {Setting | undefined} value */
export function settingText(value) {
  if (value === undefined) return "not set";
  return typeof value === "string" ? value : value.map(([step, text], i) => (i ? ` → ${text} from step ${step}` : text)).join("");
}

/** Keys of settings that differ between these runs; `pellucid.viewer.runs.differing` says the same of a list.
 * @param {ListedRun[]} runs @param {string[]} keys that differ between all runs of the list @param {Record<string, object>} common settings by kind */
export function differing(runs, keys, common) {
  const known = runs.filter(({ kind, settings }) => Object.keys(settings).length || Object.keys(common[kind] ?? {}).length);
  return keys.filter((key) => {
    const values = new Set(known.filter(({ settings }) => key in settings).map(({ settings }) => JSON.stringify(settings[key])));
    const lacking = new Set(known.filter(({ settings }) => !(key in settings)).map(({ kind }) => kind));
    return values.size > 1 || known.some(({ kind, settings }) => key in settings && lacking.has(kind));
  });
}

/** What a key is called in a narrow column: its last words, at least two, as few as no other key ends with. @param {string} key @param {string[]} others */
export function shortKey(key, others) {
  const words = key.split(".");
  for (let from = words.length - 2; from > 0; from -= 1) {
    const end = words.slice(from).join(".");
    if (!others.some((other) => other !== key && (other === end || other.endsWith(`.${end}`)))) return end;
  }
  return key;
}

/** Whether a run passes: every word is in its name, state, kind or changed settings; `key=value` is one of its settings.
 * @param {ListedRun} run @param {string} filter @param {Record<string, Setting>} common settings that it shares with the others */
export function passes(run, filter, common) {
  return filter.split(/\s+/).filter(Boolean).every((word) => {
    const [key, value] = splitAt(word.toLowerCase());
    if (value === null) return [run.name, run.state, run.kind, ...Object.entries(run.settings).map(([name, own]) => `${name}=${settingText(own)}`)].some((text) => text.toLowerCase().includes(word.toLowerCase()));
    if (key === "state" || key === "kind") return run[key] === value;
    return Object.entries({ ...common, ...run.settings }).some(([name, own]) => isNamed(name.toLowerCase(), key) && isValue(typeof own === "string" ? own : own[own.length - 1][1], value));
  });
}

/** @param {string} word @returns {[string, string | null]} */
function splitAt(word) {
  const at = word.indexOf("=");
  return at > 0 ? [word.slice(0, at), word.slice(at + 1)] : [word, null];
}

/** @param {string} name @param {string} key its last words */
const isNamed = (name, key) => name === key || name.endsWith(`.${key}`);

/** @param {string} own @param {string} wanted */
const isValue = (own, wanted) => own.toLowerCase() === wanted || (wanted !== "" && own !== "" && Number(own) === Number(wanted));

/** Where a step lies on the x axis: seconds in milliseconds, so that every place is a whole number.
 * @param {Curves} curves @param {string} over @returns {(step: number) => number | null} */
function placing({ time, tokens }, over) {
  if (over !== "time" && over !== "tokens") return (step) => step;
  const pairs = over === "time" ? time : tokens;
  const steps = pairs.map(([step]) => step);
  const scale = over === "time" ? 1000 : 1;
  return (step) => (!steps.length || step < steps[0] ? null : Math.round(scale * pairs[lastAtMost(steps, step)][1]));
}

const NO_EXPORT = { steps: [] }; // numbers of exports are left out: the runs are compared by what all of them log

/**
 * The strips of all runs, a line for each run: a strip of several lines becomes as many strips.
 * @param {{look: Look, curves: Curves}[]} runs @param {string} over @param {any} chosen which curves, see `stripsOf`
 * @returns {{x: number[], strips: import("./curves.js").Strip[], metrics: Record<string, any>}}
 */
export function overlay(runs, over, chosen) {
  const envs = [...new Set(runs.flatMap(({ curves }) => Object.keys(curves.metrics).filter((name) => /^reward\/[^/]+$/.test(name) && name !== "reward/all").map((name) => name.slice(7))))].sort();
  const parts = runs.map(({ look, curves }) => {
    const { steps, strips } = stripsOf(NO_EXPORT, curves.metrics, envs, chosen, []);
    const placeOf = placing(curves, over);
    return { look, strips, places: steps.map(placeOf) };
  });
  const x = /** @type {number[]} */ ([...new Set(parts.flatMap(({ places }) => places))].filter((place) => place !== null).sort((a, b) => /** @type {number} */ (a) - /** @type {number} */ (b)));
  const indexOf = new Map(x.map((place, i) => [place, i]));
  /** @type {Map<string, {strip: import("./curves.js").Strip, label: string, of: string}>} */
  const found = new Map();
  for (const { look, strips, places } of parts) {
    for (const strip of strips) {
      for (const { label, name, values } of strip.lines) {
        const key = `${strip.title}\u0000${name}`;
        if (!found.has(key)) found.set(key, { strip: { ...strip, lines: [] }, label, of: strip.title });
        const spread = new Array(x.length).fill(null);
        values.forEach((value, i) => { if (value !== null && places[i] !== null) spread[/** @type {number} */ (indexOf.get(/** @type {number} */ (places[i])))] = value; });
        /** @type {any} */ (found.get(key)).strip.lines.push({ label: look.name, name: `${look.name}/${name}`, values: spread, colour: look.colour, dash: look.dash, width: 1.75 });
      }
    }
  }
  const all = [...found.values()];
  const strips = all.map(({ strip, label, of }) => (all.filter((other) => other.of === of).length > 1 ? { ...strip, title: `${of}: ${label}` } : strip));
  return { x, strips, metrics: Object.assign({}, ...runs.map(({ curves }) => curves.metrics)) };
}

/** An example that several runs tried: by run, [step, attempts, mean reward] each time. @typedef {{env: string, example: string, places: ([number, number, number | null][] | null)[]}} SharedExample */

/** @param {[string, string, [number, number, number | null][]][][]} indexes of the runs @returns {SharedExample[]} those that at least two runs tried */
export function sharedExamples(indexes) {
  /** @type {Map<string, SharedExample>} */
  const found = new Map();
  indexes.forEach((index, run) => {
    for (const [env, example, places] of index) {
      const key = exampleKey(env, example);
      if (!found.has(key)) found.set(key, { env, example, places: indexes.map(() => null) });
      /** @type {SharedExample} */ (found.get(key)).places[run] = places;
    }
  });
  return [...found.values()].filter(({ places }) => places.filter(Boolean).length > 1);
}

/** @param {string} env @param {string} example */
export const exampleKey = (env, example) => `${env}${SEPARATOR}${example}`;

/** The time that is nearest to a step. @param {[number, number, number | null][]} places @param {number} step */
export function nearestPlace(places, step) {
  return places.reduce((best, next) => (Math.abs(next[0] - step) < Math.abs(best[0] - step) ? next : best), places[0]);
}
