// The page as a whole: what is loaded, where we are, what keys and buttons do. Views ask it for what they share.

import { METRICS, valuesOf } from "./data/metrics.js";
import { Abandoned, Run } from "./data/run.js";
import { recordAsJson, saveFile } from "./data/save.js";
import { parseFilter, testOf } from "./data/select.js";
import { openSource } from "./data/source.js";
import { byId, element, notice, prose } from "./draw/dom.js";
import { currentTheme, domainOf, followSystemTheme } from "./draw/scale.js";
import { BINDINGS, Store, listenForKeys } from "./state.js";
import { AcrossView } from "./views/across.js";
import { CompareView } from "./views/compare.js";
import { turnOfToken } from "./views/conversation.js";
import { GroupView } from "./views/group.js";
import { RecordView } from "./views/record.js";
import { RolloutsView } from "./views/rollouts.js";
import { RunView } from "./views/run.js";
import { RunsView, savedList } from "./views/runs.js";
import { occurrences, parseQuery } from "./views/search.js";
import { StepView } from "./views/step.js";
import { TimelineView } from "./views/timeline.js";
import { TopBar } from "./views/top_bar.js";
import { WhatIfView } from "./views/what_if.js";
import { WorstView } from "./views/worst.js";

/** @type {Record<string, any>} */
const VIEWS = { run: RunView, timeline: TimelineView, rollouts: RolloutsView, step: StepView, record: RecordView, group: GroupView, across: AcrossView, worst: WorstView, whatif: WhatIfView, runs: RunsView, compare: CompareView };

const PULSE_MS = 1500;
const WITHOUT_TOKENS = new Set(["run", "timeline", "rollouts", "runs", "compare"]);
const OVER_TOKENS = new Set(["step", "worst", "whatif"]); // views that read all tokens of a step

export class App {
  /** @type {Run} */
  run;

  /** @type {TopBar | null} */
  topBar = null;

  /** @type {{step: number, records: number[]} | null} the order of a step's records in its table, which j and k follow */
  order = null;

  /** @type {any} */
  view = null;

  viewName = "";

  store = new Store();

  source = openSource();

  main = byId("main");

  async start() {
    listenForKeys(this);
    followSystemTheme(() => { if (this.run) this.update(new Set(["theme"])); });
    this.main.replaceChildren(notice("loading", "Reading the run …"));
    let head;
    try {
      head = await this.source.run();
    } catch (error) {
      this.main.replaceChildren(notice("error", "The run could not be read", /** @type {Error} */ (error).message));
      return;
    }
    this.run = new Run(this.source, head);
    this.run.wantsTokens = (step) => OVER_TOKENS.has(this.viewName) && (this.state.step === step || this.state.within === "run");
    document.title = `${head.name} · pellucid`;
    byId("name").textContent = head.name;
    if (head.home) byId("brand").replaceWith(element("a", { id: "brand", href: head.home + savedList(), title: "all runs of the folder" }, "pellucid"));
    this.topBar = new TopBar(this);
    this.showNotes();
    this.store.subscribe((_, changed) => this.update(changed));
    if (!location.hash && head.start_record) this.store.set({ view: "record", record: head.start_record }, { replace: true });
    if (!location.hash && head.lacks && !head.held.length) this.store.set({ view: "rollouts" }, { replace: true });
    await this.update(new Set(["view"]));
    if (head.live) this.listen();
  }

  /** The state, with what it leaves open filled in. */
  get state() {
    const { state } = this.store;
    const steps = this.run.steps;
    const step = !steps.length ? state.step : state.step < 0 ? steps[steps.length - 1] : steps.includes(state.step) ? state.step : this.run.nearestStep(state.step);
    return { ...state, step, view: this.views.includes(state.view) ? state.view : this.views[0] };
  }

  /** Views that there are: of one run, or of several. */
  get views() {
    const ofSeveral = ["runs", "compare"];
    return this.run.head.runs ? ofSeveral : Object.keys(VIEWS).filter((name) => !ofSeveral.includes(name));
  }

  /** @param {Set<string>} changed */
  async update(changed) {
    const { state } = this;
    if (!this.run.steps.length && !WITHOUT_TOKENS.has(state.view)) {
      this.topBar?.update(state);
      this.view = null;
      const [view, label] = this.run.numRollouts() ? ["rollouts", "look at the rollouts"] : ["run", "look at the run"];
      this.main.replaceChildren(notice("empty", "No tokens are exported", this.withoutTokens(), element("button", { type: "button", onclick: () => this.go({ view }) }, label)));
      return;
    }
    if (state.view !== this.viewName || !this.view) {
      const isFirst = !this.view;
      this.viewName = state.view;
      this.view = new VIEWS[state.view](this);
      this.main.dataset.view = state.view;
      this.main.replaceChildren(this.view.root);
      if (!isFirst) this.main.scrollTop = 0; // it takes a layout
      changed = new Set(Object.keys(state));
    }
    this.topBar?.update(state);
    const { view } = this;
    try {
      await view.update(state, changed);
      if (view === this.view && !view.root.isConnected) this.main.replaceChildren(view.root);
    } catch (error) {
      if (view !== this.view || error instanceof Abandoned) return;
      console.error(error);
      this.main.replaceChildren(notice("error", "This cannot be shown", /** @type {Error} */ (error).message,
        element("button", { type: "button", onclick: () => this.again() }, "try again")));
    }
  }

  /** Why no token can be shown, and what would change that. */
  withoutTokens() {
    const { kind, writing, lacks } = this.run.head;
    if (lacks) return lacks;
    const more = writing ? " A step of an export appears here as soon as it is written." : "";
    return `This run has no token export, so single tokens cannot be shown. \`pellucid ${kind} @ FILE.toml --export\`, or \`export = true\` in the file, writes every token of every step.${more}`;
  }

  /** A step's tokens, or its rollouts where no tokens are exported. @param {number} step */
  openStep(step) {
    if (this.run.steps.length) this.go({ view: "step", step: this.run.nearestStep(step) });
    else this.go({ view: "rollouts", talk: false, outcome: "", search: "", filter: `step = ${step}` });
  }

  /** What a band of the ledger holds, over the whole run: tokens of the export, or rollouts that were saved. @param {string} state */
  openState(state) {
    const kind = /** @type {Record<string, string>} */ ({ masked: "masked", trained: "all", untrainable: "untrainable", skipped: "skipped" })[state];
    if (kind && this.run.steps.length) this.go({ view: "worst", kind, within: "run" });
    else this.go({ view: "rollouts", talk: false, outcome: kind ? "sent" : state, within: "run", search: "", filter: "", rollout: "" });
  }

  /** Draws the view anew. */
  again() {
    this.view = null;
    this.update(new Set(["view"]));
  }

  /** @param {Partial<import("./state.js").State>} changes */
  go(changes) {
    const fixed = changes.view && changes.view !== "run" && changes.step === undefined ? { step: this.state.step } : {};
    const moved = changes.step !== undefined && changes.record === undefined && changes.step !== this.state.step ? { record: 0, token: -1 } : {};
    const other = changes.record !== undefined && changes.token === undefined && changes.record !== this.state.record ? { token: -1 } : {};
    this.store.set({ ...fixed, ...moved, ...other, ...changes });
  }

  /** @param {number} change */
  async moveRecord(change) {
    const { state } = this;
    if (this.viewName === "rollouts") { this.view.move(change); return; }
    if (!this.run.steps.length) return;
    const index = await this.run.index(state.step);
    const order = this.order?.step === state.step ? this.order.records : null;
    const place = order ? order.indexOf(state.record) : state.record;
    const next = Math.min((order ? order.length : index.length) - 1, Math.max(0, place + change));
    this.go({ record: order ? order[next] : next });
  }

  /** @param {number} change */
  async moveStep(change) {
    const { steps } = this.run;
    const place = steps.indexOf(this.state.step) + change;
    if (place < 0 || place >= steps.length) return;
    const index = await this.run.index(steps[place]);
    this.go({ step: steps[place], record: Math.min(this.state.record, index.length - 1), token: -1 });
  }

  /** @param {number} change */
  moveToken(change) {
    const record = this.view?.record;
    if (this.viewName !== "record" || !record) return;
    const from = this.state.token < 0 && change < 0 ? record.length : this.state.token;
    this.store.set({ token: Math.min(record.length - 1, Math.max(0, from + change)) });
  }

  /** @param {number} change */
  moveOutlier(change) {
    if (this.viewName === "rollouts") { this.view.moveTurn(change); return; }
    const outliers = this.viewName === "record" ? this.view.outlierTokens() : [];
    const { token } = this.state;
    const next = change > 0 ? outliers.find((/** @type {number} */ i) => i > token) : outliers.findLast((/** @type {number} */ i) => i < token || token < 0);
    if (next === undefined) this.say("No further outlier in this record");
    else this.store.set({ token: next });
  }

  /** The conversation of the rollout that is chosen, or of a record, at the turn of its token. @param {number} [record] */
  async openConversation(record = this.state.record) {
    const { step, token, talk } = this.state;
    if (this.viewName === "rollouts") { this.go({ talk: !talk }); return; }
    if (!this.run.steps.length) return;
    const index = await this.run.indexWith(step, record);
    const rollout = index.value("rollout", record);
    const one = rollout === null || !this.run.numRollouts(undefined, step) ? null : (await this.run.rollouts(step)).find((each) => each.rollout === rollout);
    if (!one) { this.flash("No saved rollout is the one of this record"); return; }
    const sample = Number(String(index.value("sample", record) ?? "-0").split("-").at(-1));
    this.go({ view: "rollouts", outcome: "", search: "", filter: "", rollout: `${step}/${rollout}`, talk: true, turn: token < 0 || this.viewName !== "record" ? -1 : turnOfToken(one, sample, token) });
  }

  /** @param {number} place */
  colourBy(place) { this.go({ fill: METRICS[place].key }); }

  switchTheme() {
    document.documentElement.dataset.theme = currentTheme() === "dark" ? "light" : "dark";
    this.update(new Set(["theme"]));
  }

  escape() {
    const help = byId("help");
    if (help.open) help.close();
    else if (this.topBar?.results.close()) return;
    else if (this.view?.showAll?.()) return;
    else if (this.viewName === "rollouts" && this.state.talk) this.go({ talk: false });
    else if (this.state.token >= 0) this.store.set({ token: -1 });
    /** @type {HTMLElement} */ (document.activeElement)?.blur?.();
  }

  toggleHelp() {
    const help = byId("help");
    if (help.open) { help.close(); return; }
    help.replaceChildren(
      element("h2", {}, "Keys"),
      element("dl", { class: "keys" }, ...BINDINGS.filter(({ inList }) => inList || !this.run.head.runs).flatMap(({ shown, what }) => [element("dt", {}, element("kbd", {}, shown)), element("dd", {}, what)])),
      element("p", {}, "The address of this page holds everything you see: copy it to return here, down to the token."),
      element("form", { method: "dialog" }, element("button", {}, "close")));
    help.showModal();
  }

  /** Spoken by screen readers. @param {string} text */
  say(text) { byId("spoken").textContent = text; }

  async copyId() {
    const { step, record, token } = this.state;
    const rollout = (await this.run.index(step)).value("rollout", record);
    const [place, name] = rollout === null ? [" token ", `step ${step} record ${record}`] : [":", rollout];
    await this.copy(token >= 0 ? `${name}${place}${token}` : name);
  }

  async copyRecord() { await this.copy(recordAsJson(await this.run.record(this.state.step, this.state.record))); }

  /** @param {string} text */
  async copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      this.flash(`Copied ${text.length > 60 ? "the record" : text}`);
    } catch {
      saveFile("copied.txt", "text/plain", text);
      this.flash("The browser does not allow copying here: saved as a file instead");
    }
  }

  /** Of what is saved: the run, then what it is, without an ending. @param {string} what */
  fileName(what) { return `${this.run.head.name}_${what}`.replace(/[^\w.-]+/g, "_"); }

  /** @param {string} text */
  flash(text) {
    this.say(text);
    const note = element("div", { class: "flash" }, ...prose(text));
    document.body.append(note);
    setTimeout(() => note.remove(), 2200);
  }

  /** The span of the colours. @param {import("./data/metrics.js").Metric} metric @param {string} scope
   * @param {import("./data/run.js").TokenRecord} record @returns {Promise<import("./draw/scale.js").Domain>} */
  async domain(metric, scope, record) {
    if (scope === "record") return domainOf(valuesOf(record, metric) ?? [], (i) => record.isTrainable(i), metric);
    if (metric.key === "kl" && scope === "run") return { low: this.run.head.kl_limits[0], high: this.run.head.kl_limits[1] };
    const summaries = scope === "run" ? this.run.head.steps : [(await this.run.index(record.step)).summary];
    const limits = summaries.map((/** @type {any} */ summary) => summary.limits[metric.key]).filter(Boolean);
    if (!limits.length) return { low: 0, high: 1 };
    const low = Math.min(...limits.map((/** @type {number[]} */ [first]) => first));
    const high = Math.max(...limits.map((/** @type {number[]} */ [, last]) => last));
    return high > low ? { low, high } : { low: Math.min(0, low), high: Math.max(high, low === 0 ? 1 : 0) };
  }

  /** Which tokens of a record the search or the filter finds; null where neither is in use.
   * @param {import("./data/run.js").TokenRecord} record */
  matches(record) {
    const { search, filter } = this.state;
    const { vocabulary } = this.run;
    const marks = new Uint8Array(record.length);
    try {
      const query = parseQuery(search);
      const test = filter.trim() ? testOf(parseFilter(filter), record, vocabulary) : null;
      for (const [from, to] of query ? occurrences(query, record.ids, vocabulary) : []) marks.fill(1, from, to);
      for (let i = 0; test && i < record.length; i += 1) if (test(i)) marks[i] = 1;
      return query || test ? marks : null;
    } catch { return null; } // the top bar says what is wrong with it
  }

  showNotes() {
    const notes = byId("notes");
    notes.replaceChildren(...this.run.head.notes.map((/** @type {string} */ text) => element("p", {}, ...prose(text))));
    notes.hidden = !this.run.head.notes.length;
  }

  /** Follows a running job: asks for a pulse, one request at a time, and reads what is new. */
  async listen() {
    let isUp = true;
    for (;;) {
      await new Promise((resolve) => { setTimeout(resolve, PULSE_MS); });
      if (document.hidden) continue;
      try {
        const { state, writing } = await this.source.json("pulse");
        const isBack = !isUp;
        this.run.head.writing = writing;
        if (isBack || state !== this.run.head.state) {
          this.run.head = await this.source.run();
          this.showNotes();
          await this.update(new Set(["head"]));
        }
        isUp = true;
        if (isBack && !this.view?.root.isConnected) this.again();
      } catch { isUp = false; }
      this.topBar?.connected(isUp);
    }
  }
}

export const app = new App();
app.start();
