// Values to colours: a background, and on it the ink that reads best.
// The ramps change in lightness all the way, away from the page's own background, so that they read without
// colour vision. Every ink has a contrast of at least 4.5:1 on its background; `contrast` is what tests ask.

import { valuesOf } from "../data/metrics.js";
import { element, painted } from "./dom.js";
import { short } from "./format.js";

const CLASSES = 24;
const MIN_CONTRAST = 4.5;

const RAMPS = {
  light: {
    log: ["#fbf3e2", "#f8d795", "#ec9d4d", "#c95b22", "#8a2f10", "#4d1505"],
    sequential: ["#eff5f8", "#bddbe6", "#74b3cc", "#2f83a8", "#125a7d", "#08344f"],
    diverging: ["#7a3803", "#c2702a", "#efbf8a", "#f7f5f1", "#a9c9e4", "#4a87ba", "#0f4678"],
  },
  dark: {
    log: ["#2c2721", "#57401f", "#8f5a1a", "#cf8428", "#f2b552", "#ffe9b8"],
    sequential: ["#20292e", "#1f4c5f", "#267391", "#479dbd", "#8cc9de", "#dcf2f9"],
    diverging: ["#ffc184", "#cd8138", "#6b4a2c", "#2a2a2c", "#2f5474", "#5a9bd0", "#b3dbfb"],
  },
};
const INKS = { light: "#1c1e22", dark: "#e9e7e2" };

/** @typedef {"light" | "dark"} Theme @typedef {{low: number, high: number}} Domain */

/** @returns {Theme} */
export function currentTheme() {
  return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
}

/** Takes the system's theme, and follows it until one is chosen. @param {() => void} onChange */
export function followSystemTheme(onChange) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const adopt = () => { document.documentElement.dataset.theme = system.matches ? "dark" : "light"; };
  adopt();
  system.addEventListener("change", () => { adopt(); onChange(); });
}

export class ColourScale {
  /** @param {import("../data/metrics.js").Metric} metric @param {Domain} domain @param {Theme} [theme] */
  constructor(metric, domain, theme = currentTheme()) {
    this.metric = metric;
    this.kind = metric.kind;
    this.low = this.kind === "diverging" ? -largest(domain) : domain.low;
    this.high = this.kind === "diverging" ? largest(domain) : domain.high;
    if (this.kind === "log") this.low = Math.max(this.low, this.high * 1e-9, 1e-12);
    this.colours = palette(theme, this.kind);
  }

  /** 0 to 1. @param {number} value */
  position(value) {
    const share = this.kind === "log"
      ? Math.log(Math.max(value, 1e-30) / this.low) / Math.log(this.high / this.low)
      : (value - this.low) / (this.high - this.low);
    return Math.min(1, Math.max(0, Number.isNaN(share) ? 0.5 : share));
  }

  /** [background, ink]; null for a value that is not known. @param {number | null | undefined} value */
  colour(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return null;
    return this.colours[Math.min(CLASSES - 1, Math.floor(this.position(value) * CLASSES))];
  }
}

/** The colours of tokens; null for those that do not train. @param {import("../data/run.js").TokenRecord | import("../data/run.js").StepTokens} tokens
 * @param {ColourScale} scale @returns {(token: number) => [string, string] | null} */
export function colouring(tokens, scale) {
  const values = valuesOf(tokens, scale.metric);
  return (i) => (values && tokens.isTrainable(i) ? scale.colour(values[i]) : null);
}

/** @param {Domain} domain */
const largest = ({ low, high }) => Math.max(Math.abs(low), Math.abs(high)) || 1;

/** @type {Map<string, [string, string][]>} */
const palettes = new Map();

/** @param {Theme} theme @param {"log" | "sequential" | "diverging"} kind @returns {[string, string][]} */
export function palette(theme, kind) {
  const key = `${theme} ${kind}`;
  let made = palettes.get(key);
  if (!made) {
    const anchors = RAMPS[theme][kind].map(channels);
    made = Array.from({ length: CLASSES }, (_, i) => {
      const background = between(anchors, i / (CLASSES - 1));
      return /** @type {[string, string]} */ ([background, inkOn(background, INKS[theme])]);
    });
    palettes.set(key, made);
  }
  return made;
}

/**
 * The middle of the values: p1 to p99 of those that are known (for a log scale p95, at least 0.05, and three
 * decades below it).
 * @param {ArrayLike<number>} values @param {(i: number) => boolean} counts @param {import("../data/metrics.js").Metric} metric
 * @returns {Domain}
 */
export function domainOf(values, counts, metric) {
  const found = quantiles(values, counts, [0.01, 0.95, 0.99]);
  if (metric.key === "kl") {
    const high = Math.max(found?.[1] ?? 0, 0.05);
    return { low: 10 ** Math.floor(Math.log10(high) - 3), high };
  }
  if (!found) return { low: 0, high: 1 };
  const [low, , high] = found;
  return high > low ? { low, high } : { low: Math.min(0, low), high: Math.max(low, low === 0 ? 1 : 0) };
}

/** Of those values that are known, or of a sample of many; null without any. @param {ArrayLike<number>} values @param {(i: number) => boolean} counts
 * @param {number[]} shares @returns {number[] | null} */
export function quantiles(values, counts, shares) {
  const known = [];
  const stride = Math.max(1, Math.floor(values.length / 200_000));
  for (let i = 0; i < values.length; i += stride) if (counts(i) && Number.isFinite(values[i])) known.push(values[i]);
  const sorted = Float64Array.from(known).sort();
  return sorted.length ? shares.map((share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))]) : null;
}

/** @param {string} background @param {string} preferred */
function inkOn(background, preferred) {
  if (contrast(background, preferred) >= MIN_CONTRAST) return preferred;
  return contrast(background, "#000000") > contrast(background, "#ffffff") ? "#000000" : "#ffffff";
}

/** WCAG 2 contrast ratio. @param {string} first @param {string} second */
export function contrast(first, second) {
  const [darker, lighter] = [luminance(first), luminance(second)].sort((a, b) => a - b);
  return (lighter + 0.05) / (darker + 0.05);
}

/** @param {string} colour */
function luminance(colour) {
  const [red, green, blue] = channels(colour).map((channel) => {
    const value = channel / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** @param {string} colour */
const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

/** @param {number[][]} anchors @param {number} position */
function between(anchors, position) {
  const scaled = position * (anchors.length - 1);
  const index = Math.min(Math.floor(scaled), anchors.length - 2);
  const share = scaled - index;
  return `#${[0, 1, 2].map((c) => Math.round(anchors[index][c] * (1 - share) + anchors[index + 1][c] * share)
    .toString(16).padStart(2, "0")).join("")}`;
}

/** The colours in use, with their numbers. @param {ColourScale} scale @param {string} scope */
export function legend({ kind, low, high, colours }, scope) {
  const bar = painted(element("span", { class: "legend-bar" }), [`linear-gradient(90deg, ${colours.map(([colour]) => colour).join(", ")})`, ""]);
  const [below, above] = kind === "diverging" ? ["", ""] : ["≤ ", "≥ "];
  return element("span", { class: "legend", title: `over trainable tokens of this ${scope}` },
    element("span", {}, below + short(low, 2)), bar, element("span", {}, above + short(high, 2)));
}
