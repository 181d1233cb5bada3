// One record: who says what, every token coloured, the whole sequence at a glance, one token explained.

import { METRICS, metricOf, valuesOf } from "../data/metrics.js";
import { recordColumns } from "../data/save.js";
import { extremes, lineChart } from "../draw/chart.js";
import { afterPaint, choice, element, facts, notice, refill, toggle } from "../draw/dom.js";
import { count, plural, short, signed } from "../draw/format.js";
import { Minimap } from "../draw/minimap.js";
import { saveBar } from "../draw/saving.js";
import { ColourScale, colouring, legend } from "../draw/scale.js";
import { TokenText } from "../draw/tokens.js";
import { TokenTable, maskSide, spokenToken, tokenDetails } from "./token.js";

const CHART_HEIGHT = 118;
const CHART_POINTS = 4000; // more than there are pixels
const STAYS_MS = 100; // on a record, before the numbers of its step are asked for
const LOOKS = ["fill", "scope", "masks", "table", "filter", "search", "theme", "env"];

export class RecordView {
  /** @type {import("../data/run.js").TokenRecord} */
  record;

  /** Whether only the first tokens of the record are here yet. */
  isLead = false;

  /** @type {import("../data/metrics.js").Metric} */
  metric;

  /** @type {ArrayLike<number> | null} of the metric, by token */
  values = null;

  /** @type {ColourScale} */
  scale;

  /** @type {number[] | null} */
  outliers = null;

  /** The one that is explained; -1: none. */
  token = -1;

  /** What the controls of the colouring tell: as long as it is the same, they stay. */
  shownLook = "";

  /** @type {any} */
  chart = null;

  /** @type {TokenTable | null} */
  table = null;

  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.head = element("header", { class: "record-head" });
    this.minimap = new Minimap({ onSeek: (token) => { this.text.reveal(token, true); this.hover(token); } });
    this.chartRoot = element("div", { class: "position-chart" });
    this.look = element("div", { class: "look" });
    this.text = new TokenText({
      onPin: (token) => app.go({ token }),
      onHover: (token) => this.hover(token),
      onScroll: () => this.minimap.mark(...this.text.window()),
    });
    this.tableRoot = element("div", { class: "token-table" });
    this.details = element("aside", { class: "details", "aria-label": "Token", tabindex: 0 });
    this.body = element("div", { class: "record-body" },
      element("div", { class: "record-main" }, this.text.root, this.tableRoot), this.details);
    this.overview = element("div", { class: "overview" }, this.minimap.root, this.chartRoot);
    this.root = element("section", { class: "view record-view", "aria-label": "Record" }, this.head, this.overview, this.look, this.body);
    this.turn = 0;
  }

  /** @param {import("../state.js").State} state @param {Set<string>} changed */
  async update(state, changed) {
    const turn = (this.turn += 1);
    if (this.isLead || this.record?.step !== state.step || this.record.record !== state.record) {
      if (!await this.open(state, turn)) return;
    } else {
      if (LOOKS.some((name) => changed.has(name))) await this.colour(state);
      if (turn !== this.turn) return;
      if (changed.has("token") && state.token !== this.token) this.pin(state);
    }
  }

  /** Shows another record: of a long one the beginning first. @param {import("../state.js").State} state @param {number} turn */
  async open(state, turn) {
    const { run } = this.app;
    const isPlain = !state.table && !state.search && !state.filter && state.scope !== "record" && state.token < 0;
    const lead = isPlain ? await run.lead(state.step, state.record) : null;
    if (turn !== this.turn) return false;
    if (lead) {
      if (!await this.present(lead, state, turn)) return false;
      await afterPaint();
    }
    const record = await run.record(state.step, state.record);
    if (turn !== this.turn) return false;
    const token = state.token < 0 ? worstToken(record, metricOf(state.fill)) : state.token;
    if (!await this.present(record, { ...state, token }, turn, state.token >= 0)) return false;
    this.app.store.set({ token });
    if (!record.index.measures) setTimeout(() => this.measure(record), STAYS_MS);
    return true;
  }

  /** The server reads the whole step for these numbers: only if one still looks at the record. @param {import("../data/run.js").TokenRecord} record */
  async measure(record) {
    if (this.record !== record || !this.root.isConnected) return;
    await this.app.run.measured(record.step);
    if (this.record === record) this.drawHead();
  }

  /** @param {import("../data/run.js").TokenRecord} record @param {import("../state.js").State} state @param {number} turn
   * @param {boolean} [middle] where its token is put */
  async present(record, state, turn, middle = false) {
    const takesFocus = this.hasFocus();
    this.record = record;
    this.isLead = record.length < record.field("tokens");
    this.drawHead();
    await this.colour(state, takesFocus, middle);
    return turn === this.turn;
  }

  drawHead() {
    const { record, app } = this;
    const { index } = record;
    const value = (/** @type {string} */ name) => index.value(name, record.record);
    const trainable = value("trainable");
    const numbers = [
      ["reward", short(value("reward"), 4)],
      ["advantage", signed(value("advantage"), 3)],
      ["tokens", `${count(value("tokens"))}${trainable === null ? "" : `, ${count(trainable)} trainable`}`],
      ["mismatch KL", value("kl_mean") === null ? null : `mean ${short(value("kl_mean"))}, max ${short(value("kl_max"))}`],
      ["entropy", value("entropy") === null ? null : `mean ${short(value("entropy"))}`],
      ["masked", value("masked") === null ? null : `${count(value("masked_high") ?? 0)} high, ${count(value("masked_low") ?? 0)} low`],
      ["share of loss", value("loss") === null || !value("denominator") ? null : signed(value("loss") / value("denominator"), 6)],
      ["weights", value("version_low") === null ? null
        : `version ${value("version_low")}${value("version_high") === value("version_low") ? "" : `–${value("version_high")}`}, ${plural(Math.max(0, record.step - value("version_low")), "step")} old`],
      ["ended by", value("stop")],
    ].filter(([, text]) => text !== "–");
    const ids = [["rollout", value("rollout")], ["group", value("group")], ["example", value("example")], ["rank", value("rank")],
      ["micro batch", value("micro_step")], ["mode", value("mode")]].filter(([, text]) => text !== null);
    refill(this.head,
      element("div", { class: "record-title" },
        element("h2", {}, `Record ${record.record}`, element("small", {}, ` of ${count(index.length)} in step ${record.step}${value("env") ? ` · ${value("env")}` : ""}`)),
        element("span", { class: "record-buttons no-picture" },
          element("button", { type: "button", title: "previous record (k)", "aria-label": "previous record", onclick: () => app.moveRecord(-1) }, "‹"),
          element("button", { type: "button", title: "next record (j)", "aria-label": "next record", onclick: () => app.moveRecord(1) }, "›"),
          value("group") === null ? null : element("button", { type: "button", title: "all rollouts of this example (g)", onclick: () => app.go({ view: "group" }) }, "group"),
          value("rollout") === null || !app.run.numRollouts(undefined, record.step) ? null : element("button", { type: "button", title: "the conversation that this token is part of, at its turn (v)", onclick: () => app.openConversation() }, "conversation"),
          value("example") === null ? null : element("button", { type: "button", title: "the same example in other steps", onclick: () => app.go({ view: "across" }) }, "across steps"),
          saveBar("this record", () => app.fileName(`step_${record.step}_record_${record.record}`), { columns: async () => recordColumns(await app.run.record(record.step, record.record), app.run.vocabulary), shown: () => this.root },
            element("button", { type: "button", title: "copy as JSON (c)", onclick: () => app.copyRecord() }, "copy JSON")))),
      facts(numbers),
      element("p", { class: "ids" }, ...ids.map(([name, text]) => element("span", {}, `${name} `, element("code", {}, String(text))))));
  }

  /** @param {import("../state.js").State} state @param {boolean} [takesFocus] @param {boolean} [middle] */
  async colour(state, takesFocus = this.text.root.contains(document.activeElement), middle = false) {
    const { record, app } = this;
    const metric = metricOf(state.fill);
    const values = valuesOf(record, metric);
    const domain = await app.domain(metric, state.scope, record);
    if (this.record !== record) return;
    Object.assign(this, { metric, values, scale: new ColourScale(metric, domain), outliers: null });
    const marks = app.matches(record);
    const { ids } = record;
    const look = {
      colour: colouring(record, this.scale),
      classes: (/** @type {number} */ i) => classesOf(app.run, record, ids, i, state.masks) + (marks?.[i] ? " match" : ""),
    };
    this.text.root.hidden = state.table;
    this.tableRoot.hidden = !state.table;
    this.drawLook(state);
    const token = this.explain(state.token);
    if (state.table) {
      this.table ??= new TokenTable(app, this.tableRoot);
      this.table.show(record, look, token);
      this.table.reveal(token);
    } else {
      this.text.show(record, app.run.vocabulary, look, token, middle);
      this.text.settle(takesFocus);
    }
    // The text first: what stands above it waits for the next frame.
    if (!this.isLead) afterPaint().then(() => { if (this.record === record) this.drawOverview(look); });
  }

  /** @param {import("../state.js").State} state */
  drawLook(state) {
    const { app } = this;
    const none = this.values ? "" : `${this.metric.label} is ${this.record.column(this.metric.column) === null ? "without meaning here" : "not recorded"}`;
    const shown = JSON.stringify([state.fill, state.scope, state.masks, state.table, this.scale.low, this.scale.high, this.scale.colours[0], none]);
    if (shown === this.shownLook) return;
    this.shownLook = shown;
    refill(this.look,
      choice("Colour", METRICS.map(({ key, label, shortcut }) => [key, `${shortcut ?? ""}  ${label}`]), state.fill, (fill) => app.go({ fill })),
      element("span", { class: "formula" }, this.metric.formula),
      none ? element("span", { class: "look-none" }, none) : legend(this.scale, state.scope),
      choice("over", [["record", "this record"], ["step", "this step"], ["run", "the run"]], state.scope, (scope) => app.go({ scope })),
      toggle("masks", state.masks, (masks) => app.go({ masks }), "a rule above: masked high; below: masked low (m)"),
      toggle("table", state.table, (table) => app.go({ table }), "tokens as a table (t)"),
      element("span", { class: "mask-key" }, element("i", { class: "key-high" }, "masked high"), element("i", { class: "key-low" }, "masked low"),
        element("i", { class: "key-untrainable" }, "sampled, not trainable")));
  }

  /** @param {any} look */
  drawOverview(look) {
    const { record, values } = this;
    this.minimap.show(record, values, look.colour);
    if (!this.text.root.hidden) this.minimap.mark(...this.text.window());
    this.chart?.destroy();
    this.chartRoot.replaceChildren();
    this.chart = null;
    if (!values || record.length < 2) return;
    const places = extremes(values, (i) => record.isTrainable(i), CHART_POINTS);
    this.chart = lineChart(this.chartRoot, {
      height: CHART_HEIGHT, x: places, log: this.metric.kind === "log",
      lines: [{ label: this.metric.label, values: places.map((i) => (record.isTrainable(i) ? values[i] : NaN)), colour: "line", width: 1.25 }],
      spans: trainableSpans(record),
      points: record.length < 200, unit: "token", label: `${this.metric.label} over the positions`, marker: () => this.app.store.state.token,
      onClick: (token) => this.app.go({ token }),
      onHover: (index) => { if (index !== null) this.hover(places[index]); },
    });
  }

  /** Whether the keyboard is here, or nowhere. */
  hasFocus() { return document.activeElement === document.body || this.root.contains(document.activeElement); }

  /** @param {import("../state.js").State} state */
  pin(state) {
    const token = this.explain(state.token);
    if (state.table) this.table?.reveal(token);
    else this.text.pin(token, this.hasFocus());
    this.chart?.redraw(false);
  }

  /** Tells all of a token; the others are none. @param {number} wanted */
  explain(wanted) {
    const { app, record } = this;
    const token = (this.token = wanted < record.length ? wanted : -1);
    if (token < 0) {
      const choose = () => app.store.set({ token: worstToken(record, this.metric) });
      this.details.replaceChildren(notice("empty", "No token chosen", "Point at a token to read it, click to keep it here. Arrows move; n jumps to the next outlier.", element("button", { type: "button", onclick: choose }, "the one that stands out most")));
    } else {
      this.details.replaceChildren(tokenDetails(app.run, record, token));
      app.say(spokenToken(app.run, record, token, this.metric, this.values ? this.values[token] : null));
    }
    return token;
  }

  /** @param {number} token */
  hover(token) {
    if (this.app.store.state.token >= 0 || !this.record) return;
    this.details.replaceChildren(tokenDetails(this.app.run, this.record, token));
  }

  /** Tokens beyond the p98 of the colouring, by distance from its middle. */
  outlierTokens() {
    if (!this.outliers) {
      const { record, values } = this;
      const trainable = Array.from({ length: record.length }, (_, i) => i)
        .filter((i) => record.isTrainable(i) && values && Number.isFinite(values[i]));
      const size = (/** @type {number} */ i) => Math.abs(/** @type {any} */ (values)[i]);
      const sorted = trainable.map(size).sort((a, b) => b - a);
      const limit = sorted[Math.min(sorted.length - 1, Math.max(0, Math.ceil(sorted.length * 0.02) - 1))];
      this.outliers = trainable.filter((i) => size(i) >= limit || record.value("is_masked", i) === 1);
    }
    return this.outliers;
  }
}

/** The token that stands out most by a metric: what one most likely came for. @param {import("../data/run.js").TokenRecord} record
 * @param {import("../data/metrics.js").Metric} metric */
function worstToken(record, metric) {
  const values = valuesOf(record, metric) ?? valuesOf(record, metricOf("surprise"));
  let worst = -1;
  for (let i = 0; values && i < record.length; i += 1) {
    if (record.isTrainable(i) && Number.isFinite(values[i]) && (worst < 0 || Math.abs(values[i]) > Math.abs(values[worst]))) worst = i;
  }
  return worst;
}

/** @param {any} run @param {import("../data/run.js").TokenRecord} record @param {ArrayLike<number>} ids @param {number} i @param {boolean} masks */
function classesOf(run, record, ids, i, masks) {
  const names = [];
  if (run.vocabulary.isSpecial(ids[i])) names.push("special");
  if (!record.isTrainable(i)) names.push(record.value("sampled", i) ? "untrainable" : "context");
  else if (masks) {
    const side = maskSide(record, i);
    if (side === "high" || side === "neither") names.push("masked-high");
    if (side === "low" || side === "neither") names.push("masked-low");
  }
  return names.join(" ");
}

/** @param {import("../data/run.js").TokenRecord} record @returns {[number, number][]} */
function trainableSpans(record) {
  const spans = /** @type {[number, number][]} */ ([]);
  let start = -1;
  for (let i = 0; i <= record.length; i += 1) {
    const inside = i < record.length && record.isTrainable(i);
    if (inside && start < 0) start = i;
    if (!inside && start >= 0) { spans.push([start, i]); start = -1; }
  }
  return spans;
}
