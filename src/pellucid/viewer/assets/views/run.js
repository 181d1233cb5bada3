// The whole run: what rang, what happened over its steps, and where its tokens went. A click on a curve opens the step; a
// brush looks closer, in all curves.

import { isSliced } from "../data/run.js";
import { lineChart } from "../draw/chart.js";
import { afterPaint, element, facts, notice, refill, swatch } from "../draw/dom.js";
import { compact, count, percent, plural, short } from "../draw/format.js";
import { sankey } from "../draw/sankey.js";
import { saveBar, saveChart } from "../draw/saving.js";

export class RunView {
  /** @type {import("../state.js").State} */
  state;

  /** @type {number[]} */
  steps = [];

  /** @type {Strip[]} */
  drawn = [];

  drawnFor = "";

  /** @type {any[]} */
  charts = [];

  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.about = element("div", { class: "about" });
    const change = () => this.show(Number(this.low.value), Number(this.high.value)); // what a brush sets, and what can be typed
    this.low = element("input", { type: "number", "aria-label": "first step shown", onchange: change });
    this.high = element("input", { type: "number", "aria-label": "last step shown", onchange: change });
    this.allSteps = element("button", { type: "button", title: "all steps (Esc, or a double click on a curve)", onclick: () => this.showAll() }, "all steps");
    this.range = element("span", { class: "step-range", title: "drag over a curve to look closer" }, "steps", this.low, "to", this.high, this.allSteps);
    this.head = element("header", { class: "step-head" }, this.about, element("span", { class: "view-tools" }, this.range,
      saveBar("these curves", () => app.fileName(this.shown ? `run_steps_${this.shown[0]}-${this.shown[1]}` : "run"), { columns: () => this.columns(), shown: () => this.root })));
    this.alarms = element("section", { class: "card alarms", "aria-label": "Alarms" });
    this.ledger = element("div", { class: "card ledger" });
    this.strips = element("div", { class: "strips" });
    this.root = element("section", { class: "view run-view", "aria-label": "Run" }, this.head, this.alarms, this.ledger, this.strips);
    new ResizeObserver(() => this.drawLedger()).observe(this.ledger);
    this.isDragging = false;
    this.strips.addEventListener("pointerdown", () => { this.isDragging = true; });
    window.addEventListener("pointerup", () => { this.isDragging = false; });
    this.turn = 0;
  }

  /** @param {import("../state.js").State} state @param {Set<string>} [changed] */
  async update(state, changed) {
    if (this.isDragging && changed?.has("head")) return; // a new step does not take the curve from under the pointer
    const turn = (this.turn += 1);
    const { run } = this.app;
    const points = await run.points(state);
    if (turn !== this.turn) return;
    this.state = state;
    const { steps, strips } = stripsOf(run.head, run.envs, state, points);
    this.steps = steps;
    this.drawn = strips;
    const asked = parseRange(state.steps);
    this.shown = asked && steps.some((step) => step >= asked[0] && step <= asked[1]) ? asked : null;
    this.drawHead(points);
    this.drawAlarms();
    this.drawLedger();
    this.drawStrips();
  }

  /** Looks closer at some steps. @param {number} low @param {number} high */
  show(low, high) {
    const [from, to] = [Math.max(Math.ceil(low), this.steps[0]), Math.min(Math.floor(high), this.steps[this.steps.length - 1])];
    const inside = this.steps.filter((step) => step >= from && step <= to);
    if (inside.length < 2) { this.update(this.state); this.app.say("A range has at least two steps"); return; }
    this.app.go({ steps: from === this.steps[0] && to === this.steps[this.steps.length - 1] ? "" : `${from}:${to}` });
    this.app.say(`Steps ${from} to ${to}`);
  }

  /** @returns {boolean} whether there was anything to go back from */
  showAll() {
    if (!this.app.store.state.steps) return false;
    this.app.go({ steps: "" });
    this.app.say("All steps");
    return true;
  }

  /** @param {any[]} points */
  drawHead(points) {
    const { app, state, shown } = this;
    const { head } = app.run;
    const inside = points.filter((point, i) => point && (!shown || (head.steps[i].step >= shown[0] && head.steps[i].step <= shown[1])));
    const sum = (/** @type {string} */ name) => inside.reduce((total, point) => total + point[name], 0);
    const losses = head.losses.map((/** @type {[number, any]} */ [first, loss], /** @type {number} */ i) => (i ? `${loss.type} from step ${first}` : loss.type));
    const skipped = this.steps.filter((/** @type {number} */ step) => app.run.isSkipped(step)).length;
    const ends = [this.steps[0], this.steps[this.steps.length - 1]];
    for (const input of [this.low, this.high]) [input.min, input.max] = ends.map(String);
    [this.low.value, this.high.value] = (shown ?? ends).map(String);
    this.range.hidden = this.steps.length < 2;
    this.allSteps.hidden = !shown;
    refill(this.about, element("h2", {}, head.name), facts([
      ["steps", `${count(inside.length)}${inside.length < head.steps.length ? ` of ${count(head.steps.length)}` : ""}${head.held.length < head.steps.length ? `, ${count(head.held.length)} with tokens` : ""}`],
      ["records", count(sum("records"))], ["tokens", `${compact(sum("tokens"))}, ${compact(sum("trainable"))} trainable`],
      ["environments", state.env || app.run.envs.join(", ")], ["loss", losses.join(", ")], ["skipped", skipped ? plural(skipped, "step") : null],
    ]),
      head.pending ? element("span", { class: "muted", role: "status" }, `reading ${plural(head.pending, "more step")} …`) : null,
      isSliced(state) ? element("span", { class: "muted" }, "Only what exported records say: the run's own metrics and its ledger are not kept by rank or weights.") : null);
  }

  /** What the curves show, a row per step. */
  columns() {
    const rows = this.steps.map((_, i) => i).filter((i) => !this.shown || (this.steps[i] >= this.shown[0] && this.steps[i] <= this.shown[1]));
    return [{ name: "step", values: rows.map((i) => this.steps[i]) },
      ...this.drawn.flatMap(({ lines }) => lines.map(({ name, values }) => ({ name, values: rows.map((i) => values[i]) })))];
  }

  drawAlarms() {
    const { app } = this;
    const { alarms } = app.run.head;
    this.alarms.hidden = !alarms.length;
    refill(this.alarms, element("header", {}, element("h3", {}, plural(alarms.length, "alarm"))),
      element("ul", {}, ...alarms.map((/** @type {{name: string, step: number, finding: string, causes: string}} */ { name, step, finding, causes }) => element("li", {},
        element("button", { type: "button", class: "link", title: "open the step", onclick: () => app.go({ view: "step", step: app.run.nearestStep(step) }) }, `${name} at step ${count(step)}`),
        element("span", {}, finding), element("small", {}, causes)))));
  }

  drawLedger() {
    const { ledger } = this.app.run.head;
    this.ledger.hidden = !ledger || !this.state || isSliced(this.state);
    if (this.ledger.hidden) return;
    if (ledger.error) { refill(this.ledger, notice("error", "The ledger cannot be read", ledger.error)); return; }
    const { env } = this.state;
    const accounts = ledger.accounts.filter((/** @type {any} */ account) => !env || account.env === env);
    /** @type {Record<string, number>} */
    const states = {};
    let sampled = 0;
    let context = 0;
    for (const account of accounts) {
      sampled += account.sampled;
      context += account.beside.context ?? 0;
      for (const [state, tokens] of Object.entries(account.states)) states[state] = (states[state] ?? 0) + Number(tokens);
    }
    const width = Math.max(760, this.ledger.clientWidth - 30);
    const key = `${width} ${Boolean(this.shown)} ${sampled} ${JSON.stringify(states)} ${document.documentElement.dataset.theme}`;
    if (this.drawnFor === key) return;
    this.drawnFor = key;
    refill(this.ledger, element("header", {}, element("h3", {}, `Where every sampled token went${this.shown ? ", over all steps" : ""}`),
      element("small", { class: ledger.balanced ? "good" : "bad" }, ...ledger.verdict.map((/** @type {string} */ line) => element("span", {}, `${ledger.balanced ? "✓ " : "✗ "}${line}`))),
      context ? element("small", {}, `${compact(context)} context tokens beside them`) : null, saveChart("the flow", () => this.app.fileName("ledger"))),
    element("div", { class: "flow-frame", tabindex: 0, role: "region", "aria-label": "ledger" }, sankey(states, sampled, width, (state) => this.app.go({ view: "worst", kind: state === "masked" ? "masked" : "all" }))));
  }

  drawStrips() {
    const focused = [...this.strips.children].findIndex((card) => card.querySelector(".strip-chart") === document.activeElement);
    for (const chart of this.charts) chart.destroy();
    this.charts = [];
    this.strips.replaceChildren();
    if (!this.drawn.length) {
      this.strips.append(isSliced(this.state) ? notice("empty", "No such records", "No step has records of this rank and these weights.") : notice("empty", "No step has been read yet"));
      return;
    }
    const strips = this.drawn.map((strip) => this.addStrip(strip));
    const boxes = strips.map(({ root }) => root.getBoundingClientRect()); // of all at once: it takes a layout
    const draw = (/** @type {(top: number) => boolean} */ isMeant) => strips.forEach((strip, i) => {
      if (isMeant(boxes[i].top)) this.charts.push(strip.chart(boxes[i].width));
    });
    const { turn } = this;
    draw((top) => top < innerHeight);
    this.strips.children[focused]?.querySelector(".strip-chart")?.focus({ preventScroll: true });
    afterPaint().then(() => { if (turn === this.turn) draw((top) => top >= innerHeight); });
  }

  /** A card, and what draws the chart in it. @param {Strip} strip @returns {{root: HTMLElement, chart: (width: number) => any}} */
  addStrip({ title, about, lines, log, percent: isShare }) {
    const { app, steps, shown } = this;
    const value = element("span", { class: "strip-value" });
    const root = element("div", { class: "strip-chart" });
    this.strips.append(element("div", { class: "card strip" }, element("header", {}, element("h3", {}, title), element("small", {}, about), saveChart(title, () => app.fileName(`run_${title}`)), value), root));
    const end = shown ? steps.findLastIndex((step) => step <= shown[1]) : steps.length - 1;
    const last = lines.map(({ values }) => values.findLastIndex((one, i) => one !== null && i <= end));
    const tell = (/** @type {number | null} */ at) => refill(value, ...lines.map(({ label, colour, values }, i) => {
      const number = values[at ?? last[i]];
      return swatch(colour, `${lines.length > 1 ? `${label} ` : ""}${isShare ? percent(number) : short(number)}`);
    }), at === null ? null : element("span", { class: "muted" }, `step ${steps[at]}`));
    tell(null);
    const chart = (/** @type {number} */ width) => lineChart(root, { height: 136, width, x: steps, lines, log, percent: isShare, sync: "run", points: steps.length < 3, range: shown, onHover: tell,
      label: `${title} over steps`,
      onClick: (step) => app.go({ view: "step", step: app.run.nearestStep(step) }),
      onBrush: (low, high) => this.show(low, high),
      onReset: shown ? () => this.showAll() : undefined });
    return { root, chart };
  }
}

// The curves of a run over its steps: which there are, and their values.

/** @typedef {{label: string, name: string, values: (number | null)[], colour: string, width?: number}} StripLine
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
  { title: "Loss", about: "as optimised", lines: ({ series }) => [{ label: "loss", name: "loss", values: series("loss"), colour: "series-4" }] },
];

/**
 * The strips that have something to show. Metrics of the run are not kept by rank or weights: with such a filter
 * only what the exported records say is left.
 * @param {any} head @param {string[]} envs @param {import("../data/run.js").Chosen} chosen @param {any[]} points of the head's steps
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
