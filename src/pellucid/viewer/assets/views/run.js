// The whole run: what happened over its steps, and where its tokens went. A click on a step opens it; a brush
// over steps looks closer.

import { lineChart } from "../draw/chart.js";
import { element, notice, refill } from "../draw/dom.js";
import { compact, count, percent, plural, short } from "../draw/format.js";
import { sankey } from "../draw/sankey.js";

/**
 * @typedef {{title: string, about: string, log?: boolean, percent?: boolean, lines: (context: any) => any[]}} Strip
 */

/** @type {Strip[]} */
const STRIPS = [
  { title: "Reward", about: "mean over rollouts", lines: ({ series, points, envs, env }) => (series(`reward/${env || "all"}`)
    ? [{ label: env || "all", values: series(`reward/${env || "all"}`), colour: "series-1", width: 2 },
      ...(env || envs.length < 2 ? [] : envs.map((/** @type {string} */ name, /** @type {number} */ i) => ({ label: name, values: series(`reward/${name}`), colour: `series-${(i % 5) + 2}`, width: 1 })))]
    : [{ label: "exported records", values: points("reward"), colour: "series-1", width: 2 }]) },
  { title: "Mismatch KL", about: "trainer against inference, trainable tokens", log: true, lines: ({ points }) => [
    { label: "max", values: points("kl_max"), colour: "series-6", width: 1 }, { label: "p99", values: points("kl_p99"), colour: "series-2", width: 1.25 },
    { label: "mean", values: points("kl_mean"), colour: "series-1", width: 2 }] },
  { title: "Entropy", about: "mean, trainable tokens", lines: ({ points }) => [{ label: "entropy", values: points("entropy"), colour: "series-1" }] },
  { title: "Masked", percent: true, about: "share of trainable tokens outside the trust region", lines: ({ points }) => [
    { label: "high", values: points("masked_high"), colour: "series-2" }, { label: "low", values: points("masked_low"), colour: "series-3" }] },
  { title: "Cut by length", percent: true, about: "share of exported records", lines: ({ points }) => [{ label: "cut", values: points("truncated"), colour: "series-1" }] },
  { title: "Groups without signal", about: "all rewards equal: advantage 0, not trained", lines: ({ series }) => [{ label: "groups", values: series("zero_advantage_groups/all"), colour: "series-5" }] },
  { title: "Staleness", about: "steps between sampling and training", lines: ({ series, env }) => [
    { label: "max", values: series(`off_policy_level/${env || "all"}/max`), colour: "series-6", width: 1 }, { label: "mean", values: series(`off_policy_level/${env || "all"}/mean`), colour: "series-1" }] },
  { title: "Loss", about: "as optimised", lines: ({ series }) => [{ label: "loss", values: series("loss"), colour: "series-4" }] },
];

export class RunView {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.head = element("header", { class: "step-head" });
    this.ledger = element("div", { class: "card ledger" });
    this.strips = element("div", { class: "strips" });
    this.root = element("section", { class: "view run-view", "aria-label": "Run" }, this.head, this.ledger, this.strips);
    new ResizeObserver(() => this.drawLedger()).observe(this.ledger);
  }

  /** @param {import("../state/store.js").State} state */
  async update(state) {
    this.env = state.env;
    this.drawHead();
    this.drawLedger();
    this.drawStrips();
  }

  drawHead() {
    const { head } = this.app.run;
    const points = head.steps.map((/** @type {any} */ summary) => summary.points[this.env || "all"]).filter(Boolean);
    const sum = (/** @type {string} */ name) => points.reduce((/** @type {number} */ total, /** @type {any} */ point) => total + point[name], 0);
    const facts = [["steps", `${count(head.steps.length)}${head.held.length < head.steps.length ? `, ${count(head.held.length)} with tokens` : ""}`],
      ["records", count(sum("records"))], ["tokens", `${compact(sum("tokens"))}, ${compact(sum("trainable"))} trainable`],
      ["environments", this.env || this.app.run.envs.join(", ")]];
    if (head.loss) facts.push(["loss", head.loss.type]);
    refill(this.head, element("h2", {}, head.name), element("dl", { class: "facts" }, ...facts.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text)))),
      head.pending ? element("span", { class: "muted", role: "status" }, `reading ${plural(head.pending, "more step")} …`) : null);
  }

  drawLedger() {
    const { ledger } = this.app.run.head;
    this.ledger.hidden = !ledger;
    if (!ledger) return;
    if (ledger.error) { refill(this.ledger, notice("error", "The ledger cannot be read", ledger.error)); return; }
    const accounts = ledger.accounts.filter((/** @type {any} */ account) => !this.env || account.env === this.env);
    /** @type {Record<string, number>} */
    const states = {};
    let sampled = 0;
    let context = 0;
    for (const account of accounts) {
      sampled += account.sampled;
      context += account.beside.context ?? 0;
      for (const [state, tokens] of Object.entries(account.states)) states[state] = (states[state] ?? 0) + Number(tokens);
    }
    const width = Math.max(560, this.ledger.clientWidth - 30);
    if (this.drawnFor === `${width} ${sampled} ${JSON.stringify(states)} ${document.documentElement.dataset.theme}`) return;
    this.drawnFor = `${width} ${sampled} ${JSON.stringify(states)} ${document.documentElement.dataset.theme}`;
    refill(this.ledger, element("header", {}, element("h3", {}, "Where every sampled token went"),
      element("small", { class: ledger.balanced ? "good" : "bad" }, ...ledger.verdict.map((/** @type {string} */ line) => element("span", {}, `${ledger.balanced ? "✓ " : "✗ "}${line}`))),
      context ? element("small", {}, `${compact(context)} context tokens beside them`) : null),
    element("div", { class: "flow-frame", tabindex: 0, role: "region", "aria-label": "ledger" }, sankey(states, sampled, width, (state) => this.app.go({ view: "worst", kind: state === "masked" ? "masked" : "all" }))));
  }

  drawStrips() {
    const { head } = this.app.run;
    const steps = head.steps.map((/** @type {any} */ summary) => summary.step);
    const metrics = head.metrics;
    const names = Object.keys(metrics);
    const all = [...new Set([...steps, ...names.flatMap((name) => (name.startsWith("reward/") ? metrics[name].map((/** @type {number[]} */ [step]) => step) : []))])].sort((a, b) => a - b);
    const place = new Map(all.map((step, i) => [step, i]));
    const series = (/** @type {string} */ name) => {
      if (!metrics[name]) return null;
      const values = new Array(all.length).fill(null);
      for (const [step, value] of metrics[name]) if (place.has(step)) values[/** @type {number} */ (place.get(step))] = value;
      return values;
    };
    const points = (/** @type {string} */ name) => {
      const values = new Array(all.length).fill(null);
      for (const summary of head.steps) values[/** @type {number} */ (place.get(summary.step))] = summary.points[this.env || "all"]?.[name] ?? null;
      return values;
    };
    const context = { series, points, envs: this.app.run.envs, env: this.env };
    this.strips.replaceChildren();
    if (!all.length) { this.strips.append(notice("empty", "No step has been read yet")); return; }
    for (const strip of STRIPS) {
      const lines = strip.lines(context).filter(({ values }) => values && values.some((/** @type {any} */ value) => value !== null));
      if (!lines.length) continue;
      const value = element("span", { class: "strip-value" });
      const root = element("div", { class: "strip-chart" });
      this.strips.append(element("div", { class: "card strip" }, element("header", {}, element("h3", {}, strip.title), element("small", {}, strip.about), value), root));
      const last = lines.map(({ values }) => values.findLastIndex((/** @type {any} */ v) => v !== null));
      const tell = (/** @type {number | null} */ at) => refill(value, ...lines.map((line, i) => {
        const index = at ?? last[i];
        const swatch = element("i", { class: "swatch" });
        swatch.style.background = `var(--${line.colour})`;
        const text = strip.percent ? percent(line.values[index]) : short(line.values[index]);
        return element("span", {}, swatch, `${lines.length > 1 ? `${line.label} ` : ""}${text}`);
      }), at === null ? null : element("span", { class: "muted" }, `step ${all[at]}`));
      tell(null);
      lineChart(root, { height: 136, x: all, lines, log: strip.log, percent: strip.percent, sync: "run", points: all.length < 3, onHover: tell,
        onClick: (step) => this.app.go({ view: "step", step: this.app.run.nearestStep(step) }),
        onBrush: (low, high) => this.app.go({ view: "step", step: this.app.run.nearestStep(Math.round((low + high) / 2)) }) });
    }
  }
}
