// One step: its records as a table, how every metric is distributed, two metrics against each other, the mean
// per position, and the same per environment. Ranges that are brushed select tokens, and with them records.

import { METRICS, metricOf, valuesOf } from "../data/metrics.js";
import { versionIn } from "../data/run.js";
import { chosenTokens, selectionColumns } from "../data/save.js";
import { parseBrushes, select, serialiseBrushes } from "../data/select.js";
import { lineChart } from "../draw/chart.js";
import { Histogram, Scatter, binned } from "../draw/distribution.js";
import { choice, element, facts, notice, refill, toggle } from "../draw/dom.js";
import { compact, count, percent, plural, short, signed } from "../draw/format.js";
import { saveBar, saveChart } from "../draw/saving.js";
import { domainOf } from "../draw/scale.js";
import { IdsTable, RecordsTable } from "./step_tables.js";

const HISTOGRAMS = ["kl", "ratio", "entropy", "surprise", "delta", "adv", "loss"];
const MORE = ["logratio", "reward", "stale"];
const POSITIONS = 160;

export class StepView {
  /** @type {import("../data/run.js").StepTokens} */
  all;

  /** @type {Uint8Array} 1 for each token that filters and brushes select */
  chosen;

  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.head = element("header", { class: "step-head" });
    this.histograms = new Map([...HISTOGRAMS, ...MORE].map((key) => [key, new Histogram(metricOf(key),
      (low, high) => this.brush(key, low, high), () => this.brush(key))]));
    for (const { title, metric } of this.histograms.values()) title.append(saveChart(metric.label, () => this.fileName(metric.key)));
    this.rowOfHistograms = element("div", { class: "histograms" }, ...[...this.histograms.values()].map(({ root }) => root));
    this.records = new RecordsTable(app);
    this.ids = new IdsTable(app);
    this.scatter = new Scatter((token) => app.go({ view: "record", record: this.all.owners[token], token: this.all.position(token) }));
    this.scatterBar = element("header");
    this.positionRoot = element("div", { class: "per-position" });
    this.positionBar = element("header");
    this.envs = element("div", { class: "card envs" });
    this.tableBar = element("header");
    this.root = element("section", { class: "view step-view", "aria-label": "Step" }, this.head, this.rowOfHistograms,
      element("div", { class: "step-body" },
        element("div", { class: "card table-card" }, this.tableBar, this.records.root, this.ids.root),
        element("div", { class: "step-side" },
          element("div", { class: "card" }, this.scatterBar, this.scatter.root),
          element("div", { class: "card" }, this.positionBar, this.positionRoot), this.envs)));
    this.turn = 0;
  }

  /** @param {string} what */
  fileName(what) { return this.app.fileName(`step_${this.app.state.step}_${what}`); }

  /** @param {string} key @param {number} [low] @param {number} [high] */
  brush(key, low, high) {
    const others = parseBrushes(this.app.state.brush).filter(({ metric }) => metric !== key);
    this.app.go({ brush: serialiseBrushes(low === undefined || high === undefined ? others : [...others, { metric: key, low, high }]) });
  }

  /** @param {import("../state.js").State} state */
  async update(state) {
    const turn = (this.turn += 1);
    const { run } = this.app;
    const index = await run.index(state.step);
    if (turn !== this.turn) return;
    this.drawHead(index, this.all?.step === state.step);
    if (this.all?.step !== state.step) {
      this.drawFirst(index, state);
      await run.measured(state.step);
      if (turn !== this.turn) return;
      this.drawFirst(index, state);
    }
    const all = await run.stepTokens(state.step);
    if (turn !== this.turn) return;
    this.all = all;
    this.draw(state);
    this.drawHead(index, true);
  }

  /** What the index alone tells: at once, before any token is read. @param {any} index @param {import("../state.js").State} state */
  drawFirst(index, state) {
    for (const [key, histogram] of this.histograms) {
      const bins = key === "stale" || !isShown(key, state) ? null : index.summary.histograms[metricOf(key).column];
      histogram.root.hidden = !bins;
      if (bins) histogram.show(key === "surprise" ? mirrored(bins) : bins);
    }
    const records = Array.from({ length: index.length }, (_, i) => i).filter((i) => isMeant(index, i, state));
    this.ids.root.hidden = true;
    this.records.show(index, records, null, state);
  }

  /** @param {any} index @param {boolean} isRead whether the tokens are there, and can be saved */
  drawHead(index, isRead) {
    const point = index.summary.points.all;
    const metrics = this.app.run.head.metrics;
    const at = (/** @type {string} */ name) => metrics[name]?.find((/** @type {number[]} */ [step]) => step === index.step)?.[1];
    this.head.replaceChildren(element("div", { class: "about" }, element("h2", {}, `Step ${index.step}`),
      facts([["records", count(point.records)], ["tokens", `${count(point.tokens)}, ${count(point.trainable)} trainable`],
      ["reward", (at("reward/all") ?? point.reward) === null ? null : `${short(at("reward/all") ?? point.reward, 4)}${at("reward/all") === undefined ? "" : " over all rollouts"}`],
      ["mismatch KL", point.kl_mean === null ? null : `mean ${short(point.kl_mean)}, p99 ${short(point.kl_p99, 2)}, max ${short(point.kl_max)}`],
      ["entropy", point.entropy === null ? null : short(point.entropy)],
      ["masked", point.masked_high === null ? null : `${percent(point.masked_high)} high, ${percent(point.masked_low)} low`],
      ["cut by length", point.truncated === null ? null : percent(point.truncated)],
      ["loss", at("loss") === undefined ? null : signed(at("loss"), 6)],
      ["skipped", this.app.run.isSkipped(index.step) ? "loss or gradient not finite: no weights moved" : null]])),
    element("span", { class: "view-tools", hidden: !isRead }, toggle("all histograms", this.app.state.more, (more) => this.app.go({ more }), `also ${MORE.map((key) => metricOf(key).label).join(", ")}`), saveBar("the selected tokens", () => this.fileName("selection"), {
      columns: () => selectionColumns(this.all, chosenTokens(this.chosen), this.app.run.vocabulary), shown: () => this.root })));
  }

  /** @param {import("../state.js").State} state */
  draw(state) {
    const { all, app } = this;
    const vocabulary = app.run.vocabulary;
    const chosen = select(all, vocabulary, state);
    this.chosen = chosen.tokens;
    const brushes = new Map(parseBrushes(state.brush).map(({ metric, low, high }) => [metric, /** @type {[number, number]} */ ([low, high])]));
    for (const [key, histogram] of this.histograms) {
      const metric = metricOf(key);
      const values = isShown(key, state) ? valuesOf(all, metric) : null;
      histogram.root.hidden = !values;
      if (!values) continue;
      const bins = binned(values, (i) => all.isTrainable(i), metric.kind === "log");
      const rest = brushes.has(key) ? select(all, vocabulary, state, key) : chosen;
      histogram.show(bins, rest.isAll ? null : binned(values, (i) => rest.tokens[i] === 1, bins.log, bins).counts, brushes.get(key) ?? null);
    }
    const records = [];
    for (let i = 0; i < all.index.length; i += 1) if (chosen.isAll || chosen.records[i]) records.push(i);
    refill(this.tableBar, element("h3", {}, state.ids ? "Tokens by id" : "Records"),
      element("small", {}, chosen.isAll ? plural(records.length, "record") : `${plural(chosen.count, "token")} in ${count(records.length)} of ${plural(all.index.length, "record")}`),
      toggle("by token id", state.ids, (ids) => app.go({ ids, sort: "" })),
      chosen.isAll ? null : element("button", { type: "button", onclick: () => app.go({ brush: "", filter: "", env: "", rank: -1, weights: "" }) }, "clear selection"));
    this.records.root.hidden = state.ids;
    this.ids.root.hidden = !state.ids;
    if (state.ids) this.ids.show(all, chosen.tokens, state);
    else this.records.show(all.index, records, chosen.isAll ? null : chosen.records, state, all);
    this.drawEnvs(chosen); // first: whether it is there decides how wide the others are
    this.drawScatter(state, chosen.tokens);
    this.drawPositions(state, chosen.tokens);
  }

  /** @param {import("../state.js").State} state @param {Uint8Array} chosen */
  drawScatter(state, chosen) {
    const choices = /** @type {[string, string][]} */ (METRICS.map(({ key, label }) => [key, label]));
    this.scatterBar.replaceChildren(element("h3", {}, "Scatter"), choice("y", choices, state.y, (y) => this.app.go({ y })),
      choice("x", choices, state.x, (x) => this.app.go({ x })), saveChart("the scatter", () => this.fileName(`${state.y}_over_${state.x}`)));
    const tokens = chosenTokens(chosen);
    const axis = (/** @type {string} */ key) => {
      const metric = metricOf(key);
      const values = valuesOf(this.all, metric);
      return { metric, values, ...(values ? domainOf(values, (i) => chosen[i] === 1, metric) : { low: 0, high: 1 }) };
    };
    this.scatter.show(axis(state.x), axis(state.y), tokens);
  }

  /** @param {import("../state.js").State} state @param {Uint8Array} chosen */
  drawPositions(state, chosen) {
    const metric = metricOf(state.fill);
    const values = valuesOf(this.all, metric);
    this.positionBar.replaceChildren(element("h3", {}, "Mean per position"),
      choice("of", METRICS.map(({ key, label }) => [key, label]), state.fill, (fill) => this.app.go({ fill })), saveChart("the mean per position", () => this.fileName(`${metric.key}_per_position`)));
    this.positionRoot.replaceChildren();
    if (!values) { this.positionRoot.append(notice("empty", `${metric.label} is not recorded`, "", element("button", { type: "button", onclick: () => this.app.go({ fill: "entropy" }) }, "show the entropy"))); return; }
    const { x, means } = meanPerPosition(this.all, values, chosen);
    lineChart(this.positionRoot, { height: 150, x, log: metric.kind === "log", lines: [{ label: metric.label, values: means, colour: "line" }], points: x.length < 40, unit: "position", label: `${metric.label} per position` });
  }

  /** @param {import("../data/select.js").Selection} chosen */
  drawEnvs(chosen) {
    const { all } = this;
    const points = all.index.summary.points;
    const names = Object.keys(points).filter((name) => name !== "all");
    this.envs.hidden = names.length < 2;
    if (names.length < 2) return;
    const metric = valuesOf(all, metricOf("kl"));
    const envs = all.index.column("env");
    this.envs.replaceChildren(element("header", {}, element("h3", {}, "Per environment"), saveChart("the environments", () => this.fileName("environments"))), element("div", { class: "small-multiples" }, ...names.map((name) => {
      const code = all.index.words.env.indexOf(name);
      const histogram = new Histogram(metricOf("kl"), (low, high) => this.brush("kl", low, high), () => this.brush("kl"));
      histogram.title.replaceChildren(element("h3", {}, name || "no name"), element("small", {}, `${compact(points[name].trainable)} trainable · reward ${short(points[name].reward)}`));
      histogram.root.addEventListener("dblclick", () => this.app.go({ env: name }));
      if (metric) queueMicrotask(() => histogram.show(binned(metric, (i) => chosen.tokens[i] === 1 && envs[all.owners[i]] === code, true)));
      return histogram.root;
    })));
  }
}

/** What the index knows of the filters: the weights only once the records are measured. @param {any} index @param {number} record
 * @param {import("../state.js").State} state */
function isMeant(index, record, { env, rank, weights }) {
  const version = versionIn(weights, index.step);
  return (!env || index.value("env", record) === env) && (rank < 0 || index.value("rank", record) === rank)
    && (version === null || !index.measures || index.value("version_low", record) === version);
}

/** Also one whose brush is set. @param {string} key @param {import("../state.js").State} state */
const isShown = (key, { more, brush }) => more || HISTOGRAMS.includes(key) || parseBrushes(brush).some(({ metric }) => metric === key);

/** @param {any} bins of log π, as bins of −log π */
const mirrored = (bins) => ({ ...bins, low: -bins.high, high: -bins.low, counts: [...bins.counts].reverse() });

/** @param {import("../data/run.js").StepTokens} all @param {ArrayLike<number>} values @param {Uint8Array} chosen */
export function meanPerPosition(all, values, chosen) {
  let longest = 0;
  for (let record = 0; record < all.index.length; record += 1) longest = Math.max(longest, all.starts[record + 1] - all.starts[record]);
  const block = Math.max(1, Math.ceil(longest / POSITIONS));
  const size = Math.ceil(longest / block);
  const sums = new Float64Array(size);
  const counts = new Float64Array(size);
  for (let i = 0; i < all.length; i += 1) {
    if (!chosen[i] || Number.isNaN(values[i])) continue;
    const place = Math.floor(all.position(i) / block);
    sums[place] += values[i];
    counts[place] += 1;
  }
  const x = [];
  const means = [];
  for (let place = 0; place < size; place += 1) {
    if (!counts[place]) continue;
    x.push(place * block);
    means.push(sums[place] / counts[place]);
  }
  return { x, means };
}
