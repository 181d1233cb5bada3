// The list of several runs: how each went, what sets it apart, and which of them to compare.

import { MOST_COMPARED, differing, joined, lastSetting, lookOf, namesOf, passes, settingText, shortKey } from "../data/several.js";
import { canvasOf, element, facts, notice, refill, swatch, themeColour } from "../draw/dom.js";
import { compact, count, duration, plural, short } from "../draw/format.js";
import { saveBar } from "../draw/saving.js";
import { VirtualTable } from "../draw/table.js";
import { sorted } from "./step_tables.js";

/** @typedef {import("../data/several.js").ListedRun} ListedRun */

const STATES = /** @type {Record<string, string>} */ ({ running: "●", finished: "✓", failed: "✕", interrupted: "‖" });
const MOST_KEYS = 8; // settings with a column of their own, if a window is wide enough
const FEWEST_KEYS = 2;
const NARROW = 700; // pixels of a window
const FIXED_WIDTH = 950; // pixels of the other columns and around the table
const OTHERS_WIDTH = 140; // pixels of the column of settings that have none of their own
const KEPT_AS = "pellucid-runs";

/** The address of the list as it was left, for the way back. */
export function savedList() {
  try { return sessionStorage.getItem(KEPT_AS) ?? ""; } catch { return ""; } // a sandboxed frame has none
}

export class RunsView {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    /** @type {ListedRun[]} */
    this.found = [];
    this.find = element("input", { type: "search", placeholder: "find: lr=1e-3 failed", "aria-label": "Find runs", spellcheck: "false", autocomplete: "off", oninput: () => app.store.set({ filter: this.find.value }) });
    this.about = element("div", { class: "about" });
    this.compare = element("button", { type: "button", class: "primary", onclick: () => app.go({ view: "compare" }) });
    this.clear = element("button", { type: "button", onclick: () => app.go({ runs: "" }) }, "select none");
    this.card = element("div", { class: "card table-card" });
    this.empty = element("div");
    this.status = element("p", { class: "muted", role: "status" });
    this.root = element("section", { class: "view runs-view", "aria-label": "Runs" },
      element("header", { class: "step-head" }, this.about, element("span", { class: "view-tools" }, saveBar("this list", () => app.fileName("runs"), { columns: () => this.columns(), shown: () => this.root }))),
      element("div", { class: "look plain" }, this.find, this.compare, this.clear, this.status), this.card, this.empty);
  }

  /** @param {import("../state.js").State} state @param {Set<string>} changed */
  async update(state, changed) {
    const { head } = this.app.run;
    const key = head.keys.join("\u0000");
    if (!this.table || this.drawnFor !== key) {
      this.drawnFor = key;
      this.table?.show([]); // it may draw once more, and its rows are others
      this.table = this.makeTable(head.keys);
      this.card.replaceChildren(this.table.root);
    }
    try { sessionStorage.setItem(KEPT_AS, location.hash); } catch { /* a sandboxed frame has none */ }
    if (document.activeElement !== this.find) this.find.value = state.filter;
    /** @type {ListedRun[]} */
    const runs = head.runs;
    this.chosen = namesOf(state.runs).filter((name) => runs.some((run) => run.name === name));
    this.found = runs.filter((run) => passes(run, state.filter, head.common[run.kind] ?? {}));
    const order = this.found.map((_, i) => i);
    const isSorted = this.table.options.columns.some((column) => column.key === state.sort);
    this.table.hide(this.silent());
    this.table.show(isSorted ? sorted(order, state.up, (row) => this.value(this.found[row], state.sort)) : order, { key: isSorted ? state.sort : "", up: state.up });
    const running = runs.filter((run) => run.state === "running").length;
    refill(this.about, element("h2", {}, head.name), facts([["runs", count(runs.length)], ["running", running ? count(running) : null],
      ["settings that differ", head.keys.length ? count(head.keys.length) : null]]));
    const number = this.chosen.length;
    this.compare.textContent = number > 1 ? `compare ${plural(number, "run")}` : "compare";
    this.compare.disabled = number < 2;
    this.clear.hidden = !number;
    this.status.textContent = number > 1 ? "" : number ? "Select another run to compare it with." : "Select two or more runs to lay them over each other.";
    if (state.filter) this.status.textContent += ` ${count(this.found.length)} of ${plural(runs.length, "run")} found.`;
    this.card.hidden = !this.found.length;
    refill(this.empty, this.found.length ? null : this.nothing(runs.length));
    if (changed.has("theme")) this.table.draw();
  }

  /** @param {number} all */
  nothing(all) {
    return all ? notice("empty", "No such run", `None of ${plural(all, "run")} has all of these words in its name, state or settings.`, element("button", { type: "button", onclick: () => { this.find.value = ""; this.app.go({ filter: "" }); } }, "all runs"))
      : notice("empty", "The runs are gone", "None of the folders is there any more.", element("button", { type: "button", onclick: () => location.reload() }, "look again"));
  }

  /** Columns that say nothing here. */
  silent() {
    const { found } = this;
    const isSaid = (/** @type {string} */ key) => found.some((run) => this.value(run, key) !== null);
    return new Set(["reward", "loss", "tokens", "duration"].filter((key) => !isSaid(key)));
  }

  /** What a run is sorted by. @param {ListedRun} run @param {string} key */
  value(run, key) {
    const last = run.curve[run.curve.length - 1]?.[1] ?? null;
    if (key.startsWith("setting ")) {
      const text = lastSetting(run, key.slice(8));
      return text === null || text.trim() === "" || Number.isNaN(Number(text)) ? text : Number(text);
    }
    return /** @type {Record<string, any>} */ ({ chosen: this.chosen?.includes(run.name) ? 1 : 0, name: run.name, state: run.state, reward: run.kind === "rl" ? last : null, curve: last,
      steps: run.steps, loss: run.loss, tokens: run.tokens, duration: run.duration_s, changed: run.written_at })[key] ?? null;
  }

  /** @param {string[]} keys */
  makeTable(keys) {
    const { app } = this;
    const widthOf = (/** @type {string} */ key) => Math.min(190, Math.max(80, 30 + 7 * shortKey(key, keys).length));
    const room = innerWidth - FIXED_WIDTH;
    const fits = (/** @type {number} */ number) => keys.slice(0, number).reduce((sum, key) => sum + widthOf(key), number < keys.length ? OTHERS_WIDTH : 0) <= room;
    let number = Math.min(keys.length, MOST_KEYS);
    while (number > FEWEST_KEYS && !fits(number)) number -= 1;
    const own = keys.slice(0, number);
    const of = (/** @type {number} */ row) => this.found[row];
    const settings = own.map((key) => ({ key: `setting ${key}`, label: shortKey(key, keys), title: key, width: `${widthOf(key)}px`, text: true,
      cell: (/** @type {number} */ row) => element("span", { class: "setting", title: `${key} = ${settingText(of(row).settings[key])}` }, key in of(row).settings ? settingText(of(row).settings[key]) : element("span", { class: "muted" }, "–")) }));
    const others = keys.slice(number);
    const [nameWidth, stateWidth] = innerWidth < NARROW ? ["104px", "96px"] : ["190px", "104px"];
    return new VirtualTable({
      label: "Runs", rowHeight: 34,
      onChoose: (row) => this.open(of(row)),
      onMark: (row) => this.mark(of(row)),
      onSort: (sort, up) => app.go({ sort, up }),
      columns: [
        { key: "chosen", label: "✓", title: "selected", width: "38px", text: true, cell: (row) => this.box(of(row)) },
        { key: "name", label: "run", width: nameWidth, text: true, cell: (row) => this.name(of(row)) },
        { key: "state", label: "state", width: stateWidth, text: true, cell: (row) => element("span", { class: `run-state run-${of(row).state}`, title: of(row).reason || undefined }, element("i", { "aria-hidden": "true" }, STATES[of(row).state]), of(row).state) },
        { key: "reward", label: "reward", width: "130px", title: "mean over rollouts, first → last step", cell: (row) => ends(of(row)) },
        { key: "curve", label: "over steps", width: "104px", title: "reward, or the loss of sft", text: true, cell: (row) => sparkline(of(row)) },
        { key: "steps", label: "steps", width: "92px", cell: (row) => `${count(of(row).steps)}${of(row).max_steps && of(row).max_steps !== of(row).steps ? ` / ${count(of(row).max_steps)}` : ""}` },
        { key: "loss", label: "loss", width: "84px", title: "of the last step", cell: (row) => short(of(row).loss) },
        { key: "tokens", label: "trained", width: "72px", title: "tokens trained", cell: (row) => (of(row).tokens === null ? "–" : compact(Number(of(row).tokens))) },
        { key: "duration", label: "ran for", width: "96px", cell: (row) => duration(of(row).duration_s) },
        ...settings,
        ...(others.length ? [{ key: "others", label: plural(others.length, "more setting"), width: "auto", text: true, sortable: false,
          cell: (/** @type {number} */ row) => { const text = others.filter((key) => key in of(row).settings).map((key) => `${shortKey(key, keys)}=${settingText(of(row).settings[key])}`).join("  "); return element("span", { class: "setting", title: text }, text); } }] : []),
      ],
    });
  }

  /** @param {ListedRun} run */
  box(run) {
    const isOn = this.chosen?.includes(run.name) ?? false;
    const box = element("input", { type: "checkbox", tabindex: -1, "aria-label": `compare ${run.name}`, onclick: (/** @type {Event} */ event) => { event.stopPropagation(); this.mark(run); } });
    box.checked = isOn;
    return box;
  }

  /** @param {ListedRun} run */
  name(run) {
    const kind = run.kind === "sft" ? element("small", { class: "tag" }, "sft") : null;
    const label = this.app.run.head.live ? element("a", { href: `${run.number}/`, tabindex: -1, title: `open ${run.name}`, onclick: (/** @type {Event} */ event) => event.stopPropagation() }, run.name) : element("b", { title: run.name }, run.name);
    return element("span", { class: "run-name" }, label, kind);
  }

  /** @param {ListedRun} run */
  open(run) {
    if (this.app.run.head.live) location.assign(`${run.number}/`);
    else this.app.flash(`This page lists the run; \`pellucid view\` on its folder opens it`);
  }

  /** Selects a run, or takes it out. @param {ListedRun} run */
  mark({ name, number }) {
    const names = namesOf(this.app.store.state.runs);
    const { with_curves: held } = this.app.run.head;
    const isOn = names.includes(name);
    if (!isOn && held && !held.includes(number)) this.app.flash(`This page has no curves of ${name}`);
    else if (!isOn && names.length >= MOST_COMPARED) this.app.flash(`At most ${MOST_COMPARED} runs are compared at a time`);
    else {
      this.app.go({ runs: joined(isOn ? names.filter((other) => other !== name) : [...names, name]) });
      this.app.say(`${name} ${isOn ? "taken out" : "selected"}, ${plural(this.chosen?.length ?? 0, "run")} selected`);
    }
    this.table?.draw();
  }

  /** A row per run. */
  columns() {
    const { found } = this;
    const { keys } = this.app.run.head;
    return [...["name", "kind", "state", "steps", "max_steps", "loss", "tokens", "duration_s"].map((name) => ({ name, values: found.map((run) => /** @type {any} */ (run)[name]) })),
      { name: "reward", values: found.map((run) => this.value(run, "reward")) },
      ...keys.map((/** @type {string} */ key) => ({ name: key, values: found.map((run) => (key in run.settings ? settingText(run.settings[key]) : null)) }))];
  }
}

/** @param {ListedRun} run */
function ends({ kind, curve }) {
  if (kind !== "rl" || !curve.length) return "–";
  const [first, last] = [curve[0][1], curve[curve.length - 1][1]];
  return element("span", {}, element("span", { class: "muted" }, `${short(first)} → `), short(last));
}

const SPARK = { width: 88, height: 24 };

/** @param {ListedRun} run */
function sparkline({ kind, curve }) {
  const { canvas, context } = canvasOf(SPARK.width, SPARK.height);
  canvas.setAttribute("aria-hidden", "true");
  if (curve.length < 2) return element("span", { class: "muted" }, "–");
  const values = curve.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [first, last] = [curve[0][0], curve[curve.length - 1][0]];
  context.strokeStyle = themeColour(kind === "sft" ? "series-6" : "series-1");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  for (const [step, value] of curve) context.lineTo(2 + ((SPARK.width - 6) * (step - first)) / (last - first || 1), SPARK.height - 4 - ((SPARK.height - 8) * (value - low)) / (high - low || 1));
  context.stroke();
  context.fillStyle = context.strokeStyle;
  context.beginPath();
  context.arc(SPARK.width - 4, SPARK.height - 4 - ((SPARK.height - 8) * (values[values.length - 1] - low)) / (high - low || 1), 2.2, 0, 7);
  context.fill();
  return canvas;
}

/** The settings that set runs apart, a column per run. @param {ListedRun[]} runs @param {string[]} keys @param {Record<string, object>} common @param {number} most rows
 * @param {() => void} showAll */
export function settingsTable(runs, keys, common, most, showAll) {
  const own = differing(runs, keys, common);
  if (!own.length) return element("p", { class: "muted" }, "Their settings are the same.");
  const isOdd = (/** @type {ListedRun} */ run, /** @type {string} */ key) => JSON.stringify(run.settings[key]) !== JSON.stringify(runs[0].settings[key]);
  return element("div", { class: "flow-frame", tabindex: 0, role: "region", "aria-label": "settings that differ" },
    element("table", { class: "plain-table settings-table" },
      element("thead", {}, element("tr", {}, element("th", { class: "text", scope: "col" }, "key"), ...runs.map(({ name }, i) => element("th", { class: "text", scope: "col" }, legendEntry(lookOf(name, i)))))),
      element("tbody", {}, ...own.slice(0, most).map((key) => element("tr", {}, element("th", { class: "text", scope: "row" }, element("code", {}, key)),
        ...runs.map((run) => element("td", { class: `text${isOdd(run, key) ? " changed-cell" : ""}${key in run.settings ? "" : " muted"}` }, settingText(run.settings[key]))))))),
    own.length > most ? element("button", { type: "button", onclick: showAll }, `all ${count(own.length)} settings`) : null);
}

/** @param {import("../data/several.js").Look} look */
export const legendEntry = ({ name, colour, dash }) => swatch(colour, name, dash);
