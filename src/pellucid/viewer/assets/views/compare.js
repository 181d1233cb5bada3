// Several runs laid over each other: what sets them apart, their curves on one axis, and the same examples side by side.

import { MOST_COMPARED, exampleKey, joined, lookOf, namesOf, nearestPlace, overlay, sharedExamples } from "../data/several.js";
import { parseRange } from "../data/curves.js";
import { readable } from "../data/texts.js";
import { choice, element, notice, refill } from "../draw/dom.js";
import { compact, count, duration, fixed, plural, short, signed } from "../draw/format.js";
import { saveBar } from "../draw/saving.js";
import { VirtualTable } from "../draw/table.js";
import { markChanges } from "./across.js";
import { RunView } from "./run.js";
import { legendEntry, settingsTable } from "./runs.js";
import { sorted } from "./step_tables.js";

/** @typedef {import("../data/several.js").ListedRun} ListedRun @typedef {import("../data/several.js").SharedExample} SharedExample */

const FEW_SETTINGS = 6;
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

const AXES = /** @type {Record<string, RunView["axis"]>} */ ({
  step: { name: "steps", place: (step) => `step ${step}` },
  time: { name: "time", place: (ms) => duration(ms / 1000), text: (ms) => duration(ms / 1000), ticks: timeTicks },
  tokens: { name: "tokens trained", place: (tokens) => `${count(tokens)} tokens`, text: compact },
});

/** Replaces what an element holds; a field of the same name keeps the keyboard. @param {Element} node @param {...import("../draw/dom.js").Child} children */
function refillFocused(node, ...children) {
  const name = node.contains(document.activeElement) ? document.activeElement?.getAttribute("aria-label") : null;
  refill(node, ...children);
  if (name) [...node.querySelectorAll("select")].find((field) => field.getAttribute("aria-label") === name)?.focus();
}

/** @param {number} low @param {number} high milliseconds */
function timeTicks(low, high) {
  const stride = 1000 * (SECONDS.find((seconds) => (high - low) / (1000 * seconds) <= 5) ?? SECONDS[SECONDS.length - 1]);
  const ticks = [];
  for (let at = Math.ceil(low / stride) * stride; at <= high; at += stride) ticks.push(at);
  return ticks;
}

export class CompareView extends RunView {
  /** @param {any} app */
  constructor(app) {
    super(app);
    /** @type {ListedRun[]} */
    this.runs = [];
    /** @type {Map<string, Promise<any>>} what was asked for, by name and what the run looked like then */
    this.asked = new Map();
    this.legend = element("div", { class: "run-legend", role: "list", "aria-label": "Runs" });
    this.over = element("span");
    this.head = element("header", { class: "step-head" }, element("h2", {}, "Compare"), this.tools = element("span", { class: "view-tools" }, this.range,
      saveBar("these curves", () => app.fileName("compared"), { columns: () => this.columns(), shown: () => this.root })));
    this.settings = element("section", { class: "card", "aria-label": "Settings that differ" });
    this.isWide = false;
    this.examples = new ExamplesCard(this);
    this.body = element("div", { class: "compare-body" }, element("div", { class: "legend-bar-top" }, this.legend, this.over), this.settings, this.chooser, this.strips, this.examples.root);
    this.empty = element("div");
    this.root = element("section", { class: "view run-view compare-view", "aria-label": "Compare" }, this.head, this.empty, this.body);
  }

  /** @param {import("../state.js").State} state @param {Set<string>} [changed] */
  async update(state, changed) {
    if (this.isDragging && changed?.has("head")) return;
    const turn = (this.turn += 1);
    const { head } = this.app.run;
    const names = namesOf(state.runs).slice(0, MOST_COMPARED);
    this.runs = /** @type {ListedRun[]} */ (names.map((name) => head.runs.find((/** @type {ListedRun} */ run) => run.name === name)).filter(Boolean));
    if (!names.length && head.runs.length === 2 && head.runs.every((/** @type {ListedRun} */ run) => run.curve.length)) this.runs = head.runs; // two were given: no need to choose
    const isFew = this.runs.length < 2;
    this.body.hidden = isFew;
    this.tools.hidden = isFew;
    refill(this.empty, isFew ? notice("empty", "Select two or more runs", this.runs.length ? `Only ${this.runs[0].name} is selected.` : "None is selected.", element("button", { type: "button", onclick: () => this.app.go({ view: "runs" }) }, "choose runs")) : null);
    if (isFew) return;
    this.state = state;
    this.looks = this.runs.map(({ name }, i) => lookOf(name, i));
    const onlyExample = changed && [...changed].every((name) => ["example", "attempt", "step", "sort", "up"].includes(name));
    if (!onlyExample || !this.curves) {
      const curves = await Promise.all(this.runs.map((run) => this.ask(`curves/${run.number}`, run)));
      if (turn !== this.turn) return;
      this.curves = curves;
      this.drawCurves(state);
    }
    await this.examples.update(state);
  }

  /** @param {import("../state.js").State} state */
  drawCurves(state) {
    const { runs, looks = [], curves = [] } = this;
    this.axis = AXES[state.over] ?? AXES.step;
    const { x, strips, metrics } = overlay(looks.map((look, i) => ({ look, curves: curves[i] })), state.over, state);
    this.steps = x;
    this.drawn = strips;
    this.metrics = metrics;
    const asked = parseRange(state.steps);
    this.shown = asked && x.some((place) => place >= asked[0] && place <= asked[1]) ? asked : null;
    this.drawLegend(state);
    const { keys, common } = this.app.run.head;
    refill(this.settings, element("header", {}, element("h3", {}, "Settings that differ")), settingsTable(runs, keys, common, this.isWide ? keys.length : FEW_SETTINGS, () => { this.isWide = true; this.drawCurves(this.state); }));
    this.drawChooser();
    this.drawStrips();
  }

  /** @param {import("../state.js").State} state */
  drawLegend(state) {
    const { app, steps, shown } = this;
    refill(this.legend, ...this.runs.map((run, i) => element("span", { role: "listitem", class: "legend-run" }, legendEntry(lookOf(run.name, i)),
      app.run.head.live ? element("a", { href: `${run.number}/`, title: `open ${run.name}` }, "open") : null,
      element("button", { type: "button", class: "quiet", "aria-label": `take ${run.name} out`, title: "take it out", onclick: () => app.go({ runs: joined(this.runs.filter((other) => other !== run).map(({ name }) => name)) }) }, "×"))),
    element("span", { role: "listitem" }, element("button", { type: "button", onclick: () => app.go({ view: "runs" }) }, "choose runs")));
    refillFocused(this.over, choice("over", [["step", "steps"], ["time", "wall time"], ["tokens", "tokens trained"]], state.over, (over) => app.go({ over, steps: "" })));
    const isStep = this.axis === AXES.step;
    const ends = shown ?? [steps[0], steps[steps.length - 1]];
    for (const [input, value] of /** @type {[HTMLInputElement, number][]} */ ([[this.low, ends[0]], [this.high, ends[1]]])) {
      input.hidden = !isStep;
      [input.min, input.max, input.value] = [steps[0], steps[steps.length - 1], value].map(String);
    }
    this.range.hidden = steps.length < 2 || (!isStep && !shown);
    this.range.firstChild.textContent = isStep ? "steps" : `${this.axis.place(ends[0])} – ${this.axis.place(ends[1])}`;
    this.range.childNodes[2].textContent = isStep ? "to" : "";
    this.allSteps.hidden = !shown;
    this.allSteps.textContent = isStep ? "all steps" : "all";
  }

  /** A run has no value of its own at most places of a shared axis: the one before counts, until its last. @param {(number | null)[]} values @param {number} at */
  valueAt(values, at) {
    const before = values.findLastIndex((value, i) => value !== null && i <= at);
    return values.findLastIndex((value) => value !== null) < at ? null : values[before] ?? null;
  }

  /** A step is opened in one run only: the examples below go there. @param {number} x */
  openAt(x) {
    if (this.axis === AXES.step) this.app.go({ step: x });
    this.app.say(this.axis.place(x));
  }

  /** A row per place of the x axis. */
  columns() {
    const [{ values }, ...others] = super.columns();
    return [{ name: this.axis.name, values: this.axis === AXES.time ? values.map((ms) => Number(ms) / 1000) : values }, ...others];
  }

  /** @param {string} name @param {ListedRun} run asked for again once it has changed */
  ask(name, { steps, written_at: at }) {
    const key = `${name} ${steps} ${at}`;
    const found = this.asked.get(key) ?? this.app.source.json(name);
    this.asked.set(key, found);
    return found;
  }
}

// The same example in several runs. The first run is what the others are compared with.

class ExamplesCard {
  /** @param {CompareView} view */
  constructor(view) {
    this.view = view;
    this.app = view.app;
    /** @type {SharedExample[]} */
    this.found = [];
    this.status = element("p", { class: "muted", role: "status" });
    this.list = element("div", { class: "example-list" });
    this.tools = element("div", { class: "look plain" });
    this.sides = element("div", { class: "members sides" });
    this.root = element("section", { class: "card examples", "aria-label": "The same example" }, element("header", {}, element("h3", {}, "The same example")), this.status, this.list, this.tools, this.sides);
    this.turn = 0;
    this.askedFor = "";
  }

  /** @param {import("../state.js").State} state */
  async update(state) {
    const turn = (this.turn += 1);
    const { runs } = this.view;
    const asked = runs.map((run) => `${run.name} ${run.steps}`).join("\u0000");
    if (this.askedFor !== asked) {
      this.status.textContent = "looking through the saved rollouts …";
      const indexes = await Promise.all(runs.map((run) => this.view.ask(`examples/${run.number}`, run).catch(() => [])));
      if (turn !== this.turn) return;
      this.askedFor = asked;
      this.found = sharedExamples(indexes);
      this.lacking = runs.filter((_, i) => !indexes[i].length).map(({ name }) => name);
      this.makeTable();
    }
    const none = !this.found.length;
    for (const part of [this.list, this.tools, this.sides]) part.hidden = none;
    if (none) {
      const why = this.lacking?.length ? `${this.lacking.join(", ")} ${this.lacking.length > 1 ? "have" : "has"} no saved rollouts.` : "No example of one run was tried by another: examples are matched by environment and example id.";
      refill(this.status, notice("empty", "No example in common", why, element("button", { type: "button", onclick: () => this.app.go({ view: "runs" }) }, "choose other runs")));
      return;
    }
    this.status.textContent = `${plural(this.found.length, "example")} that at least two of the runs tried, matched by environment and id; rewards are means over the attempts at the last time.`;
    const order = this.found.map((_, i) => i);
    const isSorted = this.table?.options.columns.some(({ key: name }) => name === state.sort);
    const rows = sorted(order, Boolean(isSorted && state.up), (row) => this.value(this.found[row], isSorted ? state.sort : "apart"));
    this.table?.show(rows, { key: isSorted ? state.sort : "apart", up: Boolean(isSorted && state.up) });
    const chosen = Math.max(-1, this.found.findIndex(({ env, example }) => exampleKey(env, example) === state.example));
    const at = chosen < 0 ? rows[0] : chosen;
    this.table?.choose(at);
    await this.show(this.found[at], state, turn);
  }

  makeTable() {
    const { runs } = this.view;
    const isOneEnv = this.found.every(({ env }) => env === this.found[0].env);
    this.table?.show([]); // it may draw once more, and its rows are gone
    this.table = new VirtualTable({
      label: "Examples", rowHeight: 28,
      onChoose: (row) => this.app.go({ example: exampleKey(this.found[row].env, this.found[row].example), step: -1, attempt: 0 }),
      onSort: (sort, up) => this.app.go({ sort, up }),
      columns: [
        ...(isOneEnv ? [] : [{ key: "env", label: "environment", width: "140px", text: true, cell: (/** @type {number} */ row) => this.found[row].env || "–" }]),
        { key: "example", label: "example", width: "120px", text: true, cell: (row) => this.found[row].example },
        ...runs.map(({ name }, i) => ({ key: `reward ${i}`, label: name, title: `mean reward of ${name}`, width: "110px", cell: (/** @type {number} */ row) => fixed(this.reward(this.found[row], i), 3) })),
        { key: "apart", label: "apart", title: "between the lowest and the highest", width: "80px", cell: (row) => fixed(this.value(this.found[row], "apart"), 3) },
        { key: "times", label: "steps", title: "steps in which the runs tried it", width: "auto", text: true, sortable: false, cell: (row) => this.found[row].places.map((places) => (places ? steps(places) : "–")).join(" · ") },
      ],
    });
    this.list.replaceChildren(this.table.root);
  }

  /** @param {SharedExample} example @param {number} run */
  reward({ places }, run) { return places[run]?.at(-1)?.[2] ?? null; }

  /** @param {SharedExample} one @param {string} key */
  value(one, key) {
    const rewards = one.places.map((_, i) => this.reward(one, i));
    if (key.startsWith("reward ")) return rewards[Number(key.slice(7))] ?? null;
    const known = /** @type {number[]} */ (rewards.filter((reward) => reward !== null));
    if (key === "apart") return known.length > 1 ? Math.max(...known) - Math.min(...known) : null;
    return /** @type {any} */ (one)[key] ?? null;
  }

  /** @param {SharedExample} one @param {import("../state.js").State} state @param {number} turn */
  async show(one, state, turn) {
    const { runs, looks = [] } = this.view;
    const having = runs.map((_, i) => i).filter((i) => one.places[i]);
    const own = /** @type {[number, number, number | null][]} */ (one.places[having[0]]);
    const step = nearestPlace(own, state.step < 0 ? own[own.length - 1][0] : state.step)[0];
    const places = having.map((i) => nearestPlace(/** @type {[number, number, number | null][]} */ (one.places[i]), step));
    const found = await Promise.all(having.map((i, at) => this.view.ask(`attempts/${runs[i].number}/${places[at][0]}`, runs[i])));
    if (turn !== this.turn) return;
    const attempts = found.map((rows) => rows.filter((/** @type {any} */ row) => row.env === one.env && row.example === one.example));
    const most = Math.max(...attempts.map(({ length }) => length));
    const number = Math.min(state.attempt, most - 1);
    refillFocused(this.tools, element("b", {}, `Example ${one.example}`),
      own.length > 1 ? choice(`step of ${runs[having[0]].name}`, own.map(([at]) => /** @type {[string, string]} */ ([String(at), String(at)])), String(step), (text) => this.app.go({ step: Number(text) })) : null,
      choice("attempt", Array.from({ length: most }, (_, i) => /** @type {[string, string]} */ ([String(i), `${i + 1} of ${most}`])), String(number), (text) => this.app.go({ attempt: Number(text) })),
      element("span", { class: "muted" }, element("del", {}, `only in ${runs[having[0]].name}`), " ", element("ins", {}, "only here")));
    const reference = attempts[0][Math.min(number, attempts[0].length - 1)];
    refill(this.sides, ...having.map((i, at) => {
      const row = attempts[at][Math.min(number, attempts[at].length - 1)];
      const [place, , mean] = places[at];
      const apart = row && reference && row !== reference && row.reward !== null && reference.reward !== null ? ` (${signed(row.reward - reference.reward, 3)})` : "";
      return element("article", { class: "member" }, element("header", {}, legendEntry(looks[i])),
        element("p", { class: "muted" }, `step ${place}${place === step ? "" : `, the nearest to ${step}`} · reward ${row ? short(row.reward) : "–"}${apart} · mean ${short(mean)} of ${plural(attempts[at].length, "attempt")}${row?.outcome ? ` · ${row.outcome.replaceAll("_", " ")}` : ""}`),
        ...(row ? messages(row.messages, at ? reference?.messages ?? [] : null) : [element("p", {}, "Its texts are not in this page.")]));
    }));
  }
}

/** Steps in a few words. @param {[number, number, number | null][]} places */
const steps = (places) => (places.length > 3 ? `${places[0][0]}, ${places[1][0]}, … ${places[places.length - 1][0]}` : places.map(([step]) => step).join(", "));

/** @typedef {{ role: string, text: string }} Message */
const SHORT = 400; // characters up to which texts are compared letter by letter, beyond it word by word

/** @param {Message[]} own @param {Message[] | null} others what they are compared with; null: nothing */
function messages(own, others) {
  return own.map(({ role, text }, i) => element("div", { class: "message" }, element("b", { class: `role role-${role}` }, role || "–"),
    element("pre", {}, ...(others && others[i]?.role === role ? markChanges(others[i].text, text, Math.max(others[i].text.length, text.length) <= SHORT) : [readable(text)]))));
}
