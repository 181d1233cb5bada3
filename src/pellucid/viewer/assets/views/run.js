// The whole run: what rang, what happened over its steps, and where its tokens went. A click on a curve opens the step; a
// brush looks closer, in all curves.

import { OVERVIEW, groupsOf, parseRange, stripsOf } from "../data/curves.js";
import { isSliced } from "../data/run.js";
import { lineChart } from "../draw/chart.js";
import { afterPaint, choice, element, facts, notice, refill, swatch, toggle } from "../draw/dom.js";
import { compact, count, percent, plural, short } from "../draw/format.js";
import { sankey } from "../draw/sankey.js";
import { saveBar, saveChart } from "../draw/saving.js";

/** @typedef {import("../data/curves.js").Strip} Strip */

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

  /** The x axis: its name, and how a place on it is written; without ticks, as a chart has them. @type {{name: string, place(x: number): string, text?(x: number): string, ticks?(low: number, high: number): number[]}} */
  axis = { name: "steps", place: (step) => `step ${step}` };

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
    this.alarms = element("section", { class: "card alarms", "aria-label": "Alarms", hidden: true });
    this.ledger = element("div", { class: "card ledger" });
    this.pick = element("input", { type: "search", placeholder: "find metrics: lr time/", "aria-label": "Find metrics", onchange: () => app.go({ pick: this.pick.value }) });
    this.chooser = element("div", { class: "look plain chooser no-picture" });
    this.strips = element("div", { class: "strips" });
    this.root = element("section", { class: "view run-view", "aria-label": "Run" }, this.head, this.alarms, this.ledger, this.chooser, this.strips);
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
    const [points, metrics] = await Promise.all([run.points(state), run.metrics()]);
    if (turn !== this.turn) return;
    this.state = state;
    this.metrics = metrics;
    const { steps, strips } = stripsOf(run.head, metrics, run.envs, state, points);
    this.steps = steps;
    this.drawn = strips;
    const asked = parseRange(state.steps);
    this.shown = asked && steps.some((step) => step >= asked[0] && step <= asked[1]) ? asked : null;
    this.drawHead(points);
    this.drawAlarms();
    this.drawLedger();
    this.drawChooser();
    this.drawStrips();
  }

  /** Which curves, and how they are drawn. */
  drawChooser() {
    const { app, state } = this;
    this.chooser.hidden = isSliced(state) || !Object.keys(this.metrics ?? {}).length;
    if (document.activeElement !== this.pick) this.pick.value = state.pick;
    if (this.chooser.contains(document.activeElement) && this.chooser.dataset.drawn) return; // not from under the keyboard
    this.chooser.dataset.drawn = "1";
    refill(this.chooser, choice("Curves", groupsOf(this.metrics ?? {}).map((title) => [title === OVERVIEW ? "" : title, title]), state.show, (show) => app.go({ show, pick: "" })), this.pick,
      choice("smooth over", [["0", "1 step"], ...[5, 10, 30, 100].map((steps) => /** @type {[string, string]} */ ([String(steps), `${steps} steps`]))], String(state.smooth), (smooth) => app.go({ smooth: Number(smooth) })),
      toggle("log axes", state.log, (log) => app.go({ log })));
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
      ["steps", !head.steps.length ? count(this.steps.length) : `${count(inside.length)}${inside.length < head.steps.length ? ` of ${count(head.steps.length)}` : ""}${head.held.length < head.steps.length ? `, ${count(head.held.length)} with tokens` : ""}`],
      ["records", inside.length ? count(sum("records")) : null], ["tokens", inside.length ? `${compact(sum("tokens"))}, ${compact(sum("trainable"))} trainable` : null],
      ["rollouts", app.run.numRollouts() ? count(this.numRollouts()) : null],
      ["environments", state.env || app.run.envs.join(", ")], ["loss", losses.join(", ")], ["skipped", skipped ? plural(skipped, "step") : null],
    ]),
      head.pending ? element("span", { class: "muted", role: "status" }, `reading ${plural(head.pending, "more step")} …`) : null,
      head.held.length || !(head.in_run || head.lacks) ? null : element("span", { class: "muted" }, app.withoutTokens()),
      isSliced(state) ? element("span", { class: "muted" }, "Only what exported records say: the run's own metrics and its ledger are not kept by rank or weights.") : null);
  }

  /** Saved rollouts of the steps that are shown. */
  numRollouts() {
    const { app, shown } = this;
    if (!shown) return app.run.numRollouts();
    return this.steps.filter((step) => step >= shown[0] && step <= shown[1]).reduce((sum, step) => sum + app.run.numRollouts(undefined, step), 0);
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
        element("button", { type: "button", class: "link", title: "open the step", onclick: () => app.openStep(step) }, `${name} at step ${count(step)}`),
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
    const width = Math.max(330, this.ledger.clientWidth - 30);
    const key = `${width} ${Boolean(this.shown)} ${sampled} ${JSON.stringify(states)} ${document.documentElement.dataset.theme}`;
    if (this.drawnFor === key) return;
    this.drawnFor = key;
    refill(this.ledger, element("header", {}, element("h3", {}, `Where every sampled token went${this.shown ? ", over all steps" : ""}`),
      element("small", { class: ledger.balanced ? "good" : "bad" }, ...ledger.verdict.map((/** @type {string} */ line) => element("span", {}, `${ledger.balanced ? "✓ " : "✗ "}${line}`))),
      context ? element("small", {}, `${compact(context)} context tokens beside them`) : null, saveChart("the flow", () => this.app.fileName("ledger"))),
    element("div", { class: "flow-frame", tabindex: 0, role: "region", "aria-label": "ledger" }, sankey(states, sampled, width, (state) => this.app.openState(state))));
  }

  drawStrips() {
    const { app } = this;
    const focused = [...this.strips.children].findIndex((card) => card.querySelector(".strip-chart") === document.activeElement);
    for (const chart of this.charts) chart.destroy();
    this.charts = [];
    this.strips.replaceChildren();
    if (!this.drawn.length) {
      this.strips.append(isSliced(this.state) ? notice("empty", "No such records", "No step has records of this rank and these weights.", element("button", { type: "button", onclick: () => app.go({ rank: -1, weights: "" }) }, "all ranks and weights")) : this.state.pick || this.state.show
        ? notice("empty", "No such metrics", "No metric of the run has such a name.", element("button", { type: "button", onclick: () => app.go({ show: "", pick: "" }) }, "show the overview")) : notice("empty", "No step has been read yet", app.run.head.writing ? "The first one appears here as soon as it is written." : "The run has no metrics and no export."));
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

  /** What a line says at a place of the x axis. @param {(number | null)[]} values @param {number} at */
  valueAt(values, at) { return values[at]; }

  /** @param {number} step */
  openAt(step) { this.app.openStep(step); }

  /** A card, and what draws the chart in it. @param {Strip} strip @returns {{root: HTMLElement, chart: (width: number) => any}} */
  addStrip({ title, about, lines, log, percent: isShare }) {
    const { app, steps, shown } = this;
    const value = element("span", { class: "strip-value" });
    const root = element("div", { class: "strip-chart" });
    this.strips.append(element("div", { class: "card strip" }, element("header", {}, element("h3", {}, title), element("small", {}, about), saveChart(title, () => app.fileName(`run_${title}`)), value), root));
    const end = shown ? steps.findLastIndex((step) => step <= shown[1]) : steps.length - 1;
    const last = lines.map(({ values }) => values.findLastIndex((one, i) => one !== null && i <= end));
    const tell = (/** @type {number | null} */ at) => refill(value, ...lines.map(({ label, colour, values, dash }, i) => {
      const number = at === null ? values[last[i]] : this.valueAt(values, at);
      return swatch(colour, `${lines.length > 1 ? `${label} ` : ""}${isShare ? percent(number) : short(number)}`, dash);
    }), at === null ? null : element("span", { class: "muted" }, this.axis.place(steps[at])));
    tell(null);
    const chart = (/** @type {number} */ width) => lineChart(root, { height: 136, width, x: steps, lines, log, percent: isShare, sync: "run", points: steps.length < 3, range: shown, unit: this.axis.text ? undefined : "step", onHover: tell,
      label: `${title} over ${this.axis.name}`, axis: this.axis.text && { text: this.axis.text, ticks: this.axis.ticks },
      onClick: (x) => this.openAt(x),
      onBrush: (low, high) => this.show(low, high),
      onReset: shown ? () => this.showAll() : undefined });
    return { root, chart };
  }
}
