// The tokens that stand out, each with what stands around it. A row leads to its token.

import { METRICS, metricOf, valuesOf } from "../data/metrics.js";
import { joined, tokenRow } from "../data/save.js";
import { parseFilter, select } from "../data/select.js";
import { choice, element, notice, refill } from "../draw/dom.js";
import { count, plural, short, signed } from "../draw/format.js";
import { saveBar } from "../draw/saving.js";
import { ColourScale, domainOf, legend } from "../draw/scale.js";
import { VirtualTable } from "../draw/table.js";
import { contextLine } from "../draw/tokens.js";

const LIMIT = 200;
const AT_ONCE = 8;

export class WorstView {
  /** @type {ColourScale} */
  scale;

  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.bar = element("header", { class: "look plain" });
    this.note = element("p", { class: "muted", role: "status" });
    /** @type {Found[]} */
    this.found = [];
    /** @type {Map<string, import("../data/run.js").TokenRecord>} those that hold what was found */
    this.records = new Map();
    const number = (/** @type {string} */ name, /** @type {(value: any) => string} */ show) => (/** @type {number} */ row) => show(this.read(name, this.found[row]));
    const delta = (/** @type {any} */ value) => signed(value, 3);
    this.table = new VirtualTable({
      label: "Worst tokens",
      rowHeight: 32,
      onChoose: (row) => {
        const { step, record, token } = this.found[row];
        app.go({ view: "record", step, record, token, fill: app.state.top === "ratio" ? "logratio" : app.state.top });
      },
      columns: [
        { key: "value", label: "value", width: "92px", cell: (row) => short(this.found[row].value, 4) },
        { key: "context", label: "token and ± 12 around it", width: "auto", least: 420, text: true, cell: (row) => this.context(this.found[row]) },
        { key: "state", label: "state", width: "108px", text: true, cell: (row) => this.state(this.found[row]) },
        { key: "kl", label: "KL", width: "78px", cell: number("mismatch_kl", short) },
        { key: "delta", label: "Δ", width: "78px", cell: number("prob_delta", delta) },
        { key: "adv", label: "A", width: "72px", cell: number("advantages", delta) },
        { key: "entropy", label: "entropy", width: "72px", cell: number("entropy", short) },
        { key: "env", label: "environment", width: "110px", text: true, cell: (row) => this.record(this.found[row])?.field("env") ?? "–" },
        { key: "where", label: "step / record / token", width: "168px", cell: (row) => { const { step, record, token } = this.found[row]; return `${step} / ${record} / ${token}`; } },
      ],
    });
    const fileName = () => {
      const { step, within, kind, top } = app.state;
      return app.fileName(`${within === "run" ? "run" : `step_${step}`}_worst_${kind}_by_${top}`);
    };
    const columns = async () => joined(await Promise.all(this.found.map(async ({ step, record, token }) => tokenRow(await app.run.record(step, record), token, app.run.vocabulary))));
    this.root = element("section", { class: "view worst-view", "aria-label": "Worst tokens" }, element("header", { class: "step-head" }, element("h2", {}, "Worst tokens"),
      element("span", { class: "view-tools" }, saveBar("these tokens", fileName, { columns, shown: () => this.root }))), this.bar, this.note,
      this.card = element("div", { class: "card table-card" }, this.table.root));
    this.turn = 0;
  }

  /** Undefined as long as it is not read. @param {Found} found */
  record(found) { return this.records.get(`${found.step}/${found.record}`); }

  /** @param {string} name @param {Found} found */
  read(name, found) { return this.record(found)?.value(name, found.token); }

  /** @param {Found} found */
  state(found) {
    if (!this.record(found)) return "…";
    if (this.read("loss_mask", found) === 0) return "not trainable";
    if (this.app.run.isSkipped(found.step)) return "skipped";
    if (this.read("is_masked_high", found) === 1) return "masked high";
    if (this.read("is_masked_low", found) === 1) return "masked low";
    return this.read("is_masked", found) === 1 ? "masked" : "trained";
  }

  /** @param {Found} found */
  context(found) {
    const record = this.record(found);
    return record ? contextLine(this.app.run.vocabulary, record, found.token, this.scale) : "…";
  }

  /** @param {import("../state.js").State} state */
  async update(state) {
    const turn = (this.turn += 1);
    const { run } = this.app;
    const metric = metricOf(state.top);
    if (state.within === "run") {
      this.note.textContent = "Looking through the run …";
      const [answered, domain] = await Promise.all([this.ask(state), this.app.domain(metric, "run", null)]);
      if (turn !== this.turn) return;
      if (answered) {
        this.scale = new ColourScale(metric, domain);
        await this.show(state, turn, answered, plural(run.steps.length, "step"));
        return;
      }
    }
    const steps = state.within === "run" ? run.steps : [state.step];
    /** @type {Found[]} */
    let found = [];
    for (const [place, step] of steps.entries()) {
      const all = await run.stepTokens(step);
      if (turn !== this.turn) return;
      const chosen = select(all, run.vocabulary, { ...state, brush: "" }, undefined, state.kind === "untrainable");
      if (state.kind === "skipped" && !run.isSkipped(step)) chosen.tokens.fill(0);
      found = [...found, ...worstTokens(all, state.kind, state.top, chosen.tokens, LIMIT)];
      cut(found, LIMIT);
      if (place === 0 || place === steps.length - 1) {
        const values = valuesOf(all, metric);
        this.scale = new ColourScale(metric, values ? domainOf(values, (i) => chosen.tokens[i] === 1, metric) : { low: 0, high: 1 });
      }
      if (place % 10 === 0 || place === steps.length - 1) {
        await this.show(state, turn, [...found], steps.length > 1 ? `${count(place + 1)} of ${plural(steps.length, "step")} looked through` : `step ${step}`);
        if (turn !== this.turn) return;
      }
    }
  }

  /** Of the whole run, from the server; null where it has no answer. @param {import("../state.js").State} state
   * @returns {Promise<Found[] | null>} */
  async ask({ top, kind, env, rank, weights, filter }) {
    if (kind === "skipped") return null; // the metrics know which steps are
    let tree = null;
    try {
      if (filter.trim()) tree = parseFilter(filter);
    } catch { /* the top bar says what is wrong with it */ }
    const rows = await this.app.source.query({ ask: "worst", metric: top, kind, env, rank, weights, filter: tree, limit: LIMIT });
    return rows && rows.map((/** @type {number[]} */ [step, record, token, value]) => ({ step, record, token, value, score: Math.abs(value) }));
  }

  /** The rows at once, what stands around their tokens as it is read.
   * @param {import("../state.js").State} state @param {number} turn @param {Found[]} found @param {string} where */
  async show(state, turn, found, where) {
    this.found = found;
    const wanted = new Map(found.map(({ step, record }) => [`${step}/${record}`, { step, record }]));
    for (const key of this.records.keys()) if (!wanted.has(key)) this.records.delete(key);
    const missing = [...wanted].filter(([key]) => !this.records.has(key));
    this.draw(state, where);
    for (let i = 0; i < missing.length; i += AT_ONCE) {
      await Promise.all(missing.slice(i, i + AT_ONCE).map(async ([key, { step, record }]) => this.records.set(key, await this.app.run.record(step, record))));
      if (turn !== this.turn) return;
      this.table.draw();
    }
  }

  /** Nothing was found: the nearest place that has some. @param {import("../state.js").State} state */
  nothing(state) {
    const { app } = this;
    const action = (/** @type {string} */ label, /** @type {any} */ changes) => element("button", { type: "button", onclick: () => app.go(changes) }, label);
    if (state.filter || state.env || state.rank >= 0 || state.weights) return notice("empty", "No such token", "No token of this class passes the filter.", action("clear the filter", { filter: "", env: "", rank: -1, weights: "" }));
    const rate = /** @type {Record<string, (point: any) => number>} */ ({ masked: (point) => point.masked_high + point.masked_low, high: (point) => point.masked_high, low: (point) => point.masked_low })[state.kind];
    const near = rate && app.run.head.steps.filter((/** @type {any} */ { points }) => rate(points.all) > 0).map((/** @type {any} */ { step }) => step)
      .sort((/** @type {number} */ a, /** @type {number} */ b) => Math.abs(a - state.step) - Math.abs(b - state.step))[0];
    if (state.kind === "all" && state.top !== "surprise") return notice("empty", `${metricOf(state.top).label} is not recorded`, "An sft run has no ratios, and other trainers may not write all columns.", action("by surprise", { top: "surprise" }));
    if (state.within === "run") return notice("empty", "No such token", "No exported token of the run is of this class.", action("all trainable tokens", { kind: "all" }));
    if (near !== undefined) return notice("empty", `None in step ${state.step}`, "No token of this step is of this class.", action(`step ${near} has some`, { step: near }));
    return notice("empty", `None in step ${state.step}`, "No token of this step is of this class.", action("look in the whole run", { within: "run" }));
  }

  /** @param {import("../state.js").State} state @param {string} where */
  draw(state, where) {
    const { app } = this;
    refill(this.bar,
      choice("Class", Object.entries(KINDS).map(([key, { title }]) => [key, title]), state.kind, (kind) => app.go({ kind })),
      choice("by", METRICS.map(({ key, label }) => [key, label]), state.top, (top) => app.go({ top })),
      choice("in", [["step", "this step"], ["run", "the run"]], state.within === "run" ? "run" : "step", (within) => app.go({ within })),
      legend(this.scale, state.within === "run" ? "run" : "step"));
    this.note.textContent = `${KINDS[state.kind]?.about ?? ""} · ${plural(this.found.length, "token")}${this.found.length === LIMIT ? " (the first)" : ""} · ${where}`;
    this.card.hidden = !this.found.length;
    this.empty?.remove();
    if (!this.found.length) {
      this.empty = this.nothing(state);
      this.root.append(this.empty);
    }
    this.table.hide(new Set(app.run.envs.length < 2 ? ["env"] : []));
    this.table.show(Array.from({ length: this.found.length }, (_, i) => i));
  }
}

// The tokens of a step that stand out, by class.

/** @typedef {import("../data/run.js").StepTokens} StepTokens @typedef {{step: number, record: number, token: number, value: number, score: number}} Found */

/** @type {Record<string, {title: string, about: string}>} */
export const KINDS = {
  all: { title: "all trainable tokens", about: "furthest from 0 by the metric" },
  trained: { title: "high KL, yet trained", about: "trained although the mismatch KL is beyond the p95 of the step" },
  untrainable: { title: "sampled, not trainable", about: "masked out by the environment, or trained in another branch" },
  skipped: { title: "in skipped steps", about: "the loss or the gradient of the step was not finite" },
  masked: { title: "masked", about: "outside the trust region, on either side" },
  high: { title: "masked high", about: "A > 0 and the probability already rose too far" },
  low: { title: "masked low", about: "A < 0 and the probability already fell too far" },
  against: { title: "advantage against the ratio", about: "the loss pushes up what went down since sampling, or the other way round" },
};

/** @param {StepTokens} all @param {string} kind @param {string} key @param {Uint8Array} chosen @param {number} limit
 * @returns {Found[]} best first */
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
