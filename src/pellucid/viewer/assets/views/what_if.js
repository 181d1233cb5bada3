// Other bounds of the trust region: what they would have masked in this step, and the loss it would have had,
// beside what was recorded.

import { LOSSES, LOSS_COLUMNS, tokenAt } from "../data/losses.js";
import { metricOf, valuesOf } from "../data/metrics.js";
import { selectionColumns } from "../data/save.js";
import { select } from "../data/select.js";
import { lineChart } from "../draw/chart.js";
import { choice, element, notice, refill, swatch } from "../draw/dom.js";
import { count, percent, plural, short, signed } from "../draw/format.js";
import { saveBar, saveChart } from "../draw/saving.js";
import { ColourScale, domainOf } from "../draw/scale.js";
import { VirtualTable } from "../draw/table.js";
import { contextLine } from "../draw/tokens.js";

const CURVE_POINTS = 50;

export class WhatIfView {
  /** @type {import("../data/run.js").StepTokens} */
  all;

  /** @type {ColourScale} */
  scale;

  type = "dppo";

  controlsFor = "";

  /** @type {number[]} tokens that these bounds mask and the run's did not, or the other way round */
  changes = [];

  /** @type {Map<string, {slider: any, number: any}> | null} */
  inputs = null;

  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.controls = element("div", { class: "card controls" });
    this.verdict = element("div", { class: "card verdict", tabindex: 0, role: "region", "aria-label": "Recorded, and with these bounds" });
    this.curveRoot = element("div");
    this.curve = element("div", { class: "card" }, element("header", {}, element("h3", {}, "Masked, by bound"), element("small", {}, "each bound on its own, the others as set"),
      saveChart("the curve", () => app.fileName(`step_${app.state.step}_masked_by_bound`))), this.curveRoot);
    this.changedBar = element("header");
    this.table = new VirtualTable({
      label: "Tokens that change",
      rowHeight: 32,
      onChoose: (row) => app.go({ view: "record", record: this.all.owners[row], token: this.all.position(row), fill: "delta" }),
      columns: [
        { key: "change", label: "change", width: "132px", text: true, cell: (row) => (this.read("is_masked", row) === 1 ? "would train" : "would be masked") },
        { key: "context", label: "token and what is around it", width: "auto", least: 420, text: true, cell: (row) => contextLine(app.run.vocabulary, this.all, row, this.scale) },
        { key: "delta", label: "Δ", width: "84px", cell: (row) => signed(this.read("prob_delta", row), 4) },
        { key: "ratio", label: "r", width: "84px", cell: (row) => short(this.read("importance_ratio", row), 4) },
        { key: "adv", label: "A", width: "84px", cell: (row) => signed(this.read("advantages", row), 3) },
        { key: "where", label: "record / token", width: "110px", cell: (row) => `${this.all.owners[row]} / ${this.all.position(row)}` },
      ],
    });
    this.changed = element("div", { class: "card table-card changed" }, this.changedBar, this.table.root);
    this.empty = element("div");
    this.root = element("section", { class: "view whatif-view", "aria-label": "What if" }, element("header", { class: "step-head" }, element("h2", {}, "What if the trust region were another?"),
      element("span", { class: "view-tools" }, saveBar("the tokens that change", () => app.fileName(`step_${app.state.step}_what_if_${this.type}`), { columns: () => selectionColumns(this.all, this.changes, app.run.vocabulary), shown: () => this.root }))), this.empty,
      element("div", { class: "whatif-body" }, this.controls, this.verdict, this.curve), this.changed);
    this.turn = 0;
  }

  /** @param {string} name @param {number} token */
  read(name, token) { return this.all.column(name)?.[token]; }

  /** @param {import("../state.js").State} state */
  async update(state) {
    const turn = (this.turn += 1);
    const all = await this.app.run.stepTokens(state.step);
    if (turn !== this.turn) return;
    this.all = all;
    const own = this.app.run.lossAt(this.all.step);
    this.type = state.loss in LOSSES ? state.loss : own?.type in LOSSES ? own.type : "dppo";
    const values = valuesOf(all, metricOf("delta"));
    const isPossible = Boolean(values && all.column("advantages"));
    for (const part of [this.controls, this.verdict, this.curve, this.changed]) part.hidden = !isPossible;
    if (!isPossible) {
      refill(this.empty, notice("empty", "There is no trust region here", "These records have no ratios or no advantages: an sft run, or an export without them.", element("button", { type: "button", onclick: () => this.app.go({ view: "step" }) }, "look at the step")));
      return;
    }
    this.empty.replaceChildren();
    this.scale = new ColourScale(metricOf("delta"), domainOf(/** @type {any} */ (values), (i) => all.isTrainable(i), metricOf("delta")));
    this.drawControls(state);
    this.recompute(state, boundsOf(this.type, parseBounds(state.bounds), own), reductionOf(this.type, state.bounds, own));
  }

  /** @param {import("../state.js").State} state */
  drawControls(state) {
    const own = this.app.run.lossAt(this.all.step);
    const reduction = reductionOf(this.type, state.bounds, own);
    const key = `${this.type} ${state.step} ${reduction}`;
    const bounds = boundsOf(this.type, parseBounds(state.bounds), own);
    if (this.controlsFor === key && this.inputs) {
      for (const [name, { slider, number }] of this.inputs) if (document.activeElement !== number) { slider.value = number.value = String(bounds[name]); }
      return;
    }
    this.controlsFor = key;
    this.inputs = new Map();
    const loss = LOSSES[this.type];
    const sliders = loss.parameters.map(({ key: name, low, high, step }) => {
      const set = (/** @type {string} */ text, /** @type {boolean} */ keep) => {
        const next = { ...boundsOf(this.type, parseBounds(this.app.state.bounds), own), [name]: Number(text) };
        slider.value = number.value = text;
        if (keep) this.app.go({ bounds: serialiseBounds(next, reduction), loss: this.type }); else this.recompute(this.app.state, next, reduction);
      };
      const slider = element("input", { type: "range", min: low, max: high, step, value: bounds[name], "aria-label": name, oninput: () => set(slider.value, false), onchange: () => set(slider.value, true) });
      const number = element("input", { type: "number", min: 0, step: "any", value: bounds[name], "aria-label": `${name}, as a number`, onchange: () => set(number.value, true) });
      this.inputs?.set(name, { slider, number });
      const mark = own?.type === this.type ? `the run's: ${short(own[name])}` : "";
      return element("div", { class: "slider" }, element("span", {}, name, element("small", { class: "muted" }, ` ${mark}`)), slider, number);
    });
    refill(this.controls, element("header", {}, choice("Loss", Object.entries(LOSSES).map(([name, { title }]) => [name, title + (own?.type === name ? " (the run's)" : "")]), this.type, (next) => this.app.go({ loss: next, bounds: "" })),
      element("button", { type: "button", onclick: () => { this.controlsFor = ""; this.app.go({ loss: "", bounds: "" }); } }, "as recorded")),
    element("p", { class: "formula" }, loss.formula), ...sliders,
    choice("Mean over", REDUCTIONS.map((name) => [name, name + (own?.type === this.type && name === (own.reduction ?? loss.reduction) ? " (the run's)" : "")]), reduction,
      (next) => this.app.go({ loss: this.type, bounds: serialiseBounds(boundsOf(this.type, parseBounds(this.app.state.bounds), own), next) })));
  }

  /** @param {import("../state.js").State} state @param {Record<string, number>} bounds @param {string} reduction */
  recompute(state, bounds, reduction) {
    const { all } = this;
    const chosen = select(all, this.app.run.vocabulary, { ...state, brush: "" });
    const result = outcomeOf(all, this.type, bounds, reduction, chosen.tokens);
    this.drawVerdict(result, bounds, reduction);
    this.drawCurve(bounds, chosen.tokens);
    refill(this.changedBar, element("h3", {}, "Tokens that change"),
      element("small", {}, result.hasRecord ? `${plural(result.all.newlyMasked, "token")} would be masked, ${count(result.all.newlyKept)} would train` : "masks are not recorded, so there is nothing to compare with"));
    this.changes = result.changed;
    this.table.show(result.changed);
    this.table.root.hidden = !result.changed.length;
  }

  /** @param {Outcome} result @param {Record<string, number>} bounds @param {string} reduction */
  drawVerdict(result, bounds, reduction) {
    const own = this.app.run.lossAt(this.all.step);
    const names = [...result.envs.keys()].sort();
    const loss = LOSSES[this.type];
    const isOwn = own?.type === this.type && reduction === (own.reduction ?? loss.reduction) && loss.parameters.every(({ key, usual }) => bounds[key] === (own[key] ?? usual));
    const rows = [["all", result.all], ...(names.length > 1 ? names.map((name) => [name || "no name", result.envs.get(name)]) : [])];
    const cells = (/** @type {any} */ [name, tally]) => {
      const share = (/** @type {number} */ number) => (tally.trainable ? number / tally.trainable : null);
      const now = share(tally.masked);
      const before = result.hasRecord ? share(tally.recordedMasked) : null;
      return element("tr", {}, element("th", { scope: "row", class: "text" }, name), td(percent(before)), td(percent(now), changed(before, now)),
        td(`${count(tally.high)} / ${count(tally.low)}`), td(result.hasLoss ? signed(tally.recordedLoss / result.denominator, 6) : "–"),
        td(signed(tally.loss / result.denominator, 6), changed(result.hasLoss ? tally.recordedLoss / result.denominator : null, tally.loss / result.denominator)));
    };
    const gap = Math.abs(result.all.loss - result.all.recordedLoss) / result.denominator;
    const agrees = gap <= 1e-6 * Math.max(1, Math.abs(result.all.recordedLoss / result.denominator)) && result.all.newlyMasked + result.all.newlyKept === 0;
    const check = !isOwn || !result.hasLoss ? null
      : element("p", { class: agrees ? "good" : "bad" }, agrees ? "✓ With the run's own bounds, masks and loss are those recorded." : `✗ With the run's own bounds the loss differs from the record by ${short(gap)}.`);
    refill(this.verdict, element("header", {}, element("h3", {}, "Recorded, and with these bounds")),
      element("table", { class: "plain-table" }, element("thead", {}, element("tr", {}, ...["", "masked, recorded", "masked, now", "high / low", "loss, recorded", "loss, now"].map((text, i) => element("th", { scope: "col", class: i ? "number" : "text" }, text)))),
        element("tbody", {}, ...rows.map(cells))),
      check, result.skipped ? element("p", { class: "muted" }, `${plural(result.skipped, "token")} of other training modes left out.`) : null);
  }

  /** @param {Record<string, number>} bounds @param {Uint8Array} chosen */
  drawCurve(bounds, chosen) {
    const loss = LOSSES[this.type];
    this.curve.hidden = !loss.masks;
    if (!loss.masks) return;
    const shown = loss.parameters.filter(({ key }) => !key.endsWith("_tau"));
    const { all } = this;
    /** @type {import("../data/losses.js").LossToken[]} */
    const tokens = [];
    eachToken(all, recordsOf(all, "token").means, chosen, (_, token) => tokens.push(token), undefined, Math.max(1, Math.floor(all.length / 60_000)));
    const top = Math.max(...shown.map(({ high }) => high));
    const x = Array.from({ length: CURVE_POINTS + 1 }, (_, i) => (i / CURVE_POINTS) * top);
    const lines = shown.map(({ key, low, high }, i) => ({ label: key, colour: `series-${i + 2}`,
      values: x.map((value) => (value < low || value > high ? NaN : tokens.filter((token) => loss.decide({ ...bounds, [key]: value }, token).masked).length / (tokens.length || 1))) }));
    refill(this.curveRoot, element("p", { class: "strip-value" }, ...lines.map(({ label, colour }) => swatch(colour, label))));
    lineChart(this.curveRoot, { height: 170, x, lines, points: false, percent: true, fractions: true, unit: "bound" });
  }
}

/** @param {string} text @param {string} [name] */
const td = (text, name = "") => element("td", { class: `number ${name}` }, text);

/** @param {number | null} before @param {number | null} now */
const changed = (before, now) => (before !== null && now !== null && Math.abs(before - now) > 5e-7 ? "changed-cell" : "");

// A step once more under another loss, token by token: `losses.js` has the formulas.

/** What a loss may take the mean over. */
export const REDUCTIONS = ["token", "sequence", "group"];

/** `dppo_mask_high=0.3,kl_tau=0` @param {string} text @returns {Record<string, number>} */
export function parseBounds(text) {
  return Object.fromEntries(text.split(",").map((part) => part.split("=")).filter(([key, value]) => key && value && Number.isFinite(Number(value)))
    .map(([key, value]) => [key, Number(value)]));
}

/** @param {Record<string, number>} bounds @param {string} reduction */
export const serialiseBounds = (bounds, reduction) => [...Object.entries(bounds), ["reduction", reduction]].map(([key, value]) => `${key}=${value}`).join(",");

/** The bounds in force: what was chosen, else the run's own, else the usual. @param {string} type @param {Record<string, number>} chosen @param {any} own */
export function boundsOf(type, chosen, own) {
  return Object.fromEntries(LOSSES[type].parameters.map(({ key, usual }) => [key, chosen[key] ?? (own?.type === type ? own[key] : undefined) ?? usual]));
}

/** The mean in force, in the same order. @param {string} type @param {string} text the bounds of the address @param {any} own @returns {string} */
export function reductionOf(type, text, own) {
  const chosen = text.split(",").find((part) => part.startsWith("reduction="))?.slice("reduction=".length) ?? "";
  return REDUCTIONS.includes(chosen) ? chosen : (own?.type === type ? own.reduction : undefined) ?? LOSSES[type].reduction;
}

/** Whether a record's tokens are trained by the loss. @param {import("../data/run.js").StepIndex} index @param {number} record */
const isRl = (index, record) => (index.value("mode", record) ?? "rl") === "rl";

/** By record: what its tokens weigh in the step's mean (`pellucid.loss.record`), and the mean of ℓ over its trainable tokens.
 * @param {import("../data/run.js").StepTokens} all @param {string} reduction */
export function recordsOf(all, reduction) {
  const { index, owners } = all;
  const logRatio = all.column("log_importance_ratio");
  const [trainable, sums, weights] = [0, 1, 2].map(() => new Float64Array(index.length));
  for (let i = 0; i < all.length; i += 1) {
    if (!all.isTrainable(i)) continue;
    trainable[owners[i]] += 1;
    sums[owners[i]] += logRatio ? logRatio[i] : NaN;
  }
  /** @type {Map<string | number, number>} */
  const units = new Map();
  const unitOf = (/** @type {number} */ record) => (reduction === "group" && index.value("group", record)) || record;
  let total = 0;
  for (let record = 0; record < index.length; record += 1) {
    if (!isRl(index, record) || !trainable[record]) continue;
    total += trainable[record];
    units.set(unitOf(record), (units.get(unitOf(record)) ?? 0) + trainable[record]);
  }
  return {
    weights: weights.map((_, record) => (reduction === "token" ? 1 : total / (units.size * (units.get(unitOf(record)) ?? 1)))),
    means: sums.map((sum, record) => sum / Math.max(1, trainable[record])),
  };
}

/** @typedef {{trainable: number, masked: number, high: number, low: number, loss: number, recordedMasked: number, recordedLoss: number,
 * newlyMasked: number, newlyKept: number}} Tally
 * @typedef {{all: Tally, envs: Map<string, Tally>, changed: number[], denominator: number, hasRecord: boolean, hasLoss: boolean, skipped: number}} Outcome */

/** @returns {Tally} */
const tally = () => ({ trainable: 0, masked: 0, high: 0, low: 0, loss: 0, recordedMasked: 0, recordedLoss: 0, newlyMasked: 0, newlyKept: 0 });

/** Chosen tokens as a loss sees them, one by one; `skip` is called for those of other training modes.
 * @param {import("../data/run.js").StepTokens} all @param {Float64Array} means of ℓ, by record @param {Uint8Array} chosen
 * @param {(i: number, token: import("../data/losses.js").LossToken) => void} visit @param {() => void} [skip] @param {number} [stride] */
export function eachToken(all, means, chosen, visit, skip = () => {}, stride = 1) {
  const columns = Object.fromEntries(LOSS_COLUMNS.map((name) => [name, all.column(name)]));
  const ratio = columns.advantages && columns.importance_ratio;
  for (let i = 0; i < all.length; i += stride) {
    if (!chosen[i]) continue;
    if (!ratio || Number.isNaN(ratio[i]) || !isRl(all.index, all.owners[i])) { skip(); continue; }
    visit(i, tokenAt(columns, i, means[all.owners[i]]));
  }
}

/** A step under other bounds. Only rl tokens have a trust region that these losses speak of.
 * @param {import("../data/run.js").StepTokens} all @param {string} type @param {Record<string, number>} bounds
 * @param {string} reduction @param {Uint8Array} chosen which tokens count @returns {Outcome} */
export function outcomeOf(all, type, bounds, reduction, chosen) {
  const [masked, loss] = ["is_masked", "token_loss"].map((name) => all.column(name));
  const { weights, means } = recordsOf(all, reduction);
  const result = { all: tally(), envs: new Map(), changed: /** @type {number[]} */ ([]), denominator: all.index.value("denominator", 0) || 0, hasRecord: Boolean(masked), hasLoss: Boolean(loss), skipped: 0 };
  eachToken(all, means, chosen, (i, token) => {
    const now = LOSSES[type].decide(bounds, token);
    const name = all.index.value("env", all.owners[i]) ?? "";
    if (!result.envs.has(name)) result.envs.set(name, tally());
    const wasMasked = masked?.[i] === 1;
    for (const into of [result.all, /** @type {Tally} */ (result.envs.get(name))]) {
      into.trainable += 1;
      if (now.masked) into.masked += 1;
      if (now.high) into.high += 1;
      if (now.low) into.low += 1;
      into.loss += weights[all.owners[i]] * now.loss;
      if (wasMasked) into.recordedMasked += 1;
      into.recordedLoss += loss?.[i] ?? 0;
      if (now.masked && !wasMasked) into.newlyMasked += 1;
      if (!now.masked && wasMasked) into.newlyKept += 1;
    }
    if (masked && now.masked !== wasMasked) result.changed.push(i);
  }, () => { result.skipped += 1; });
  result.denominator ||= result.all.trainable;
  return result;
}
