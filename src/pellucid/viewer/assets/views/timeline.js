// The time line: who worked, who waited for whom, and in one sentence why the run is not faster.

import { parseRange } from "../data/curves.js";
import { element, facts, notice, painted, perFrame, prose, refill } from "../draw/dom.js";
import { count, duration, percent, short } from "../draw/format.js";
import { AXIS, COLOURS, LANE, clock, drawGantt, firstEndingAfter, spanAt } from "../draw/gantt.js";
import { saveBar } from "../draw/saving.js";

/** Lanes whose numbers are policy versions; the others' are steps. @param {string} name */
const isVersioned = (name) => ["versions", "weights", "evaluations"].includes(name) || name.startsWith("engine") || name === "teacher";

const CLOSEST_MS = 5;
const TRIFLE = 5e-4; // share of unrecorded time that is not worth a row

/** @param {number} seconds */
const spanned = (seconds) => (seconds < 1 ? `${short(1000 * seconds)} ms` : seconds < 60 ? `${short(seconds)} s` : duration(seconds));

export class TimelineView {
  /** @type {any} */
  data = null;

  /** @type {{lane: number, at: number} | null} by pointer or keyboard */
  focus = null;

  /** @type {{lane: number, at: number} | null} as it was drawn last */
  drawn = null;

  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.about = element("div", { class: "about" });
    const button = (/** @type {string} */ text, /** @type {string} */ title, /** @type {() => void} */ act) => element("button", { type: "button", title, "aria-label": title, onclick: act }, text);
    this.all = button("all", "the whole run (0, Esc)", () => this.showAll());
    this.tools = element("span", { class: "view-tools no-picture" },
      element("span", { class: "save-bar" }, button("‹", "earlier (Page Up)", () => this.pan(-0.5)), button("−", "zoom out (−)", () => this.zoom(2)), button("+", "zoom in (+)", () => this.zoom(0.5)), button("›", "later (Page Down)", () => this.pan(0.5)), this.all),
      saveBar("the spans", () => app.fileName("timeline"), { columns: () => this.columns(), shown: () => this.root }));
    this.verdict = element("section", { class: "card verdict", "aria-label": "Verdict" });
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.picked = element("div", { class: "gantt-select", hidden: true });
    this.chart = element("div", { class: "gantt", tabindex: 0, role: "group" }, this.canvas, this.picked);
    this.spanText = element("p", { class: "gantt-span muted" });
    this.legend = element("div", { class: "gantt-legend muted" });
    this.table = element("div", { class: "card timeline-table" });
    this.body = element("div", { class: "step-body" }, element("div", { class: "card" }, this.legend, this.chart, this.spanText), this.table);
    this.head = element("header", { class: "step-head" }, this.about, this.tools);
    this.empty = element("div");
    this.root = element("section", { class: "view timeline-view", "aria-label": "Timeline" }, this.head, this.empty, this.verdict, this.body);
    this.redraw = perFrame(() => this.draw());
    new ResizeObserver(this.redraw).observe(this.chart);
    this.listen();
    this.turn = 0;
  }

  /** @param {import("../state.js").State} state */
  async update(state) {
    const turn = (this.turn += 1);
    const data = await this.app.run.timeline();
    if (turn !== this.turn) return;
    this.state = state;
    const isNew = data !== this.data;
    this.data = data;
    const isEmpty = !data.lanes.length;
    for (const part of [this.head, this.verdict, this.body]) part.hidden = isEmpty;
    this.empty.hidden = !isEmpty;
    if (isEmpty) {
      refill(this.empty, this.nothing());
      return;
    }
    if (isNew) {
      this.focus = null;
      this.waits = new Set(Object.entries(data.phases).filter(([, phase]) => phase.kind === "wait").map(([name]) => name));
      this.drawAbout();
      this.drawLegend();
      this.drawTable();
    }
    this.draw();
  }

  nothing() {
    const { lacks, in_run: inRun } = this.app.run.head;
    const why = lacks ? "Dumps of other systems do not hold when each part of the run worked and waited." : inRun ? "The run has neither a folder `spans` nor times among its metrics." : "Timings are found beside an export only in a run folder.";
    return notice("empty", "No timings are recorded", why, element("button", { type: "button", onclick: () => this.app.go({ view: "run" }) }, "look at the run"));
  }

  /** Times in sight, milliseconds. @returns {[number, number]} */
  get sight() { return parseRange(this.state?.window ?? "") ?? [this.data.since, Math.max(this.data.end, this.data.since + 1)]; }

  drawAbout() {
    const { data } = this;
    const starts = Math.max(...data.lanes.map((/** @type {any} */ { lives }) => lives.length));
    refill(this.about, element("h2", {}, "Timeline"), facts([["from start to end", duration(data.end / 1000)], ["starts", starts > 1 ? count(starts) : null]]),
      data.approximate ? element("span", { class: "muted" }, "Approximate: this run recorded how long things took in each step, not when; sums are right, the order within a step is assumed, and engines are missing. Runs of this version record both.") : null,
      data.since > 0 ? element("span", { class: "muted" }, ...prose(`Shows the last ${duration((data.end - data.since) / 1000)}; \`pellucid trace\` writes all of it, and the numbers below are of all of it.`)) : null);
    const { verdict } = data;
    this.verdict.hidden = !verdict;
    if (!verdict) return;
    const shown = Object.entries(data.parts).filter(([, share]) => Number(share) >= 0.005);
    const total = shown.reduce((sum, [, share]) => sum + Number(share), 0); // below 1, a row of boxes leaves room at its end
    const words = verdict.text.split(new RegExp(`(${verdict.keys.map((/** @type {string} */ key) => key.replaceAll(".", "\\.")).join("|")})`));
    refill(this.verdict, element("p", {}, ...words.map((/** @type {string} */ word) => (verdict.keys.includes(word) ? element("code", {}, word) : word))),
      element("div", { class: "parts", role: "img", "aria-label": `The critical path: ${Object.entries(data.parts).map(([part, share]) => `${part} ${percent(Number(share))}`).join(", ")}` },
        ...shown.map(([part, share]) => {
          const width = Number(share);
          const box = painted(element("span", { title: `${part}: ${percent(width)} of the critical path` }, width > 0.09 ? `${part} ${percent(width)}` : ""), [`var(--${partColour(data, part)})`, "var(--paper)"]);
          box.style.flexGrow = String(width / total);
          return box;
        })));
  }

  drawLegend() {
    const used = new Set(this.data.lanes.flatMap((/** @type {any} */ lane) => Object.keys(lane.seconds)));
    const shown = Object.entries(this.data.phases).filter(([name]) => used.has(name) && name !== "other");
    refill(this.legend, ...shown.map(([name, phase]) => {
      const mark = element("i", { class: this.waits?.has(name) ? "mark mark-wait" : "mark" });
      return element("span", { title: phase.about }, COLOURS[name] ? painted(mark, [`var(--${COLOURS[name]})`, ""]) : mark, phase.label);
    }), element("span", { title: "what the run could not have ended earlier without" }, element("i", { class: "mark mark-path" }), "critical path"));
  }

  /** The same in numbers. */
  drawTable() {
    const { lanes, phases } = this.data;
    const rows = lanes.flatMap((/** @type {any} */ lane) => [...Object.entries(lane.seconds), ["other", lane.rest_s]]
      .filter(([name, seconds]) => Number(seconds) > (name === "other" ? TRIFLE * lane.lived_s : 0) && (name !== "other" || lane.name === "trainer" || lane.capacity))
      .sort(([, a], [, b]) => Number(b) - Number(a))
      .map(([name, seconds], place) => element("tr", {}, element("th", { scope: "row", class: "text" }, place ? "" : lane.name),
        element("td", { class: "text", title: phases[name].about }, name === "other" && lane.capacity ? "idle" : phases[name].label), element("td", {}, spanned(Number(seconds))),
        element("td", {}, lane.lived_s ? percent(Number(seconds) / lane.lived_s) : ""), element("td", {}, lane.on_path[name] ? percent(lane.on_path[name]) : ""))));
    refill(this.table, element("header", {}, element("h3", {}, "What each part did with its time"), element("small", {}, "share of the time that its process was there, and of the critical path")),
      element("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "shares" }, element("table", { class: "plain-table" },
        element("thead", {}, element("tr", {}, ...["part", "phase", "time", "share", "critical path"].map((text, i) => element("th", { scope: "col", class: i < 2 ? "text" : "" }, text)))),
        element("tbody", {}, ...rows))));
  }

  draw() {
    if (!this.data?.lanes.length || !this.root.isConnected) return;
    const [from, to] = this.sight;
    const width = Math.max(200, this.chart.clientWidth);
    const started = performance.now();
    drawGantt({ lanes: this.data.lanes, path: this.data.path, from, to, width, canvas: this.canvas, focus: this.focus, waits: this.waits ?? new Set() });
    this.drawnIn = performance.now() - started;
    this.drawn = this.focus;
    this.all.hidden = !this.state?.window;
    this.chart.setAttribute("aria-label", `Spans of ${this.data.lanes.length} lanes from ${clock(from, to - from)} to ${clock(to, to - from)}: arrows move, Enter opens the step, + and − zoom`);
    this.spanText.textContent = this.focus ? this.describe(this.focus) : "Point at a span, or move with the arrows. Drag to look closer; a click opens the step.";
  }

  /** @param {{lane: number, at: number}} place */
  describe({ lane: row, at }) {
    const lane = this.data.lanes[row];
    const { path, phases } = this.data;
    const [start, end, step] = [lane.start[at], lane.end[at], lane.step[at]];
    const on = spanAt(path, (start + end) / 2);
    const load = lane.load[at];
    return [lane.name, lane.named[at]?.slice(5) ?? phases[lane.phase[at]].label, spanned((end - start) / 1000),
      step < 0 ? "" : `${isVersioned(lane.name) ? "policy version" : "step"} ${count(step)}`, `at ${clock(start, this.sight[1] - this.sight[0])}`,
      load === null || !load ? "" : lane.capacity ? `${short(load)} of ${count(lane.capacity)} sequences at a time` : `${short(load)} rollouts in flight`,
      on >= 0 && path.lane[on] === lane.name ? "on the critical path" : ""].filter(Boolean).join(" · ");
  }

  /** @param {number} from @param {number} to */
  show(from, to) {
    const { since, end } = this.data;
    const size = Math.min(Math.max(CLOSEST_MS, to - from), end - since);
    const low = Math.max(since, Math.min(from, end - size));
    this.app.store.set({ window: low <= since && size >= end - since ? "" : `${Math.floor(low)}:${Math.ceil(low + size)}` }, { replace: true });
  }

  /** @returns {boolean} whether there was anything to go back from */
  showAll() {
    if (!this.app.store.state.window) return false;
    this.app.store.set({ window: "" }, { replace: true });
    return true;
  }

  /** @param {number} factor @param {number} [share] what stays where it is: 0 left, 1 right */
  zoom(factor, share) {
    const [from, to] = this.sight;
    const lane = this.focus && this.data.lanes[this.focus.lane];
    const middle = lane ? (Math.max(from, lane.start[this.focus?.at ?? 0]) + Math.min(to, lane.end[this.focus?.at ?? 0])) / 2 : (from + to) / 2;
    const at = share === undefined ? Math.min(to, Math.max(from, middle)) : from + share * (to - from);
    this.show(at - (at - from) * factor, at + (to - at) * factor);
  }

  /** @param {number} share */
  pan(share) {
    const [from, to] = this.sight;
    this.show(from + share * (to - from), to + share * (to - from));
  }

  /** @param {MouseEvent} event @returns {{lane: number, at: number} | null} */
  pointed(event) {
    const box = this.canvas.getBoundingClientRect();
    const lane = Math.floor((event.clientY - box.top - AXIS) / LANE);
    if (!this.data?.lanes[lane]) return null;
    const [from, to] = this.sight;
    const scale = (to - from) / box.width;
    const at = spanAt(this.data.lanes[lane], from + (event.clientX - box.left) * scale, scale);
    return at < 0 ? null : { lane, at };
  }

  /** @param {{lane: number, at: number} | null} place */
  open(place) {
    const step = place ? this.data.lanes[place.lane].step[place.at] : -1;
    if (step >= 0) this.app.openStep(step);
  }

  listen() {
    let pressed = -1;
    const share = (/** @type {MouseEvent} */ event) => { const box = this.canvas.getBoundingClientRect(); return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)); };
    this.chart.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => { if (event.button === 0) { pressed = share(event); this.chart.setPointerCapture(event.pointerId); } });
    this.chart.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
      if (pressed < 0) { this.focus = this.pointed(event); this.redraw(); return; }
      const [low, high] = [pressed, share(event)].sort((a, b) => a - b);
      this.picked.hidden = false;
      [this.picked.style.left, this.picked.style.width] = [`${100 * low}%`, `${100 * (high - low)}%`];
    });
    this.chart.addEventListener("pointerup", (/** @type {PointerEvent} */ event) => {
      const [low, high] = [pressed, share(event)].sort((a, b) => a - b);
      this.picked.hidden = true;
      if (pressed < 0) return;
      pressed = -1;
      const [from, to] = this.sight;
      if ((high - low) * this.canvas.clientWidth >= 5) this.show(from + low * (to - from), from + high * (to - from));
      else this.open(this.pointed(event));
    });
    this.chart.addEventListener("pointercancel", () => { pressed = -1; this.picked.hidden = true; });
    this.chart.addEventListener("pointerleave", () => { if (pressed < 0) { this.focus = null; this.redraw(); } });
    this.chart.addEventListener("wheel", (/** @type {WheelEvent} */ event) => {
      if (!event.ctrlKey && !(event.deltaX && this.state?.window)) return; // the page scrolls
      event.preventDefault();
      if (event.ctrlKey) this.zoom(event.deltaY > 0 ? 1.25 : 0.8, share(event));
      else this.pan(event.deltaX / 600);
    }, { passive: false });
    this.chart.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !this.act(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  /** @param {string} key @returns {boolean} whether it means something here */
  act(key) {
    const steps = /** @type {Record<string, [number, number]>} */ ({ ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] })[key];
    if (steps) this.move(...steps);
    else if (key === "Enter") this.open(this.focus);
    else if (key === "+" || key === "=") this.zoom(0.5);
    else if (key === "-") this.zoom(2);
    else if (key === "0") this.showAll();
    else if (key === "PageDown" || key === "PageUp") this.pan(key === "PageDown" ? 0.5 : -0.5);
    else return false;
    return true;
  }

  /** @param {number} rows @param {number} spans */
  move(rows, spans) {
    const { lanes } = this.data;
    const [from, to] = this.sight;
    const before = this.focus;
    const row = before ? Math.min(lanes.length - 1, Math.max(0, before.lane + rows)) : 0;
    const lane = lanes[row];
    if (!lane.start.length) return;
    const first = firstEndingAfter(lane.end, before && rows ? lanes[before.lane].start[before.at] : from);
    const at = before && !rows ? before.at + spans : first;
    this.focus = { lane: row, at: Math.min(lane.start.length - 1, Math.max(0, at)) };
    const [start, end] = [lane.start[this.focus.at], lane.end[this.focus.at]];
    if (start < from || end > to) this.show(start - (to - from) / 3, start + (2 * (to - from)) / 3);
    this.redraw();
    this.app.say(this.describe(this.focus));
  }

  /** Every span in sight, a row each. */
  columns() {
    const [from, to] = this.sight;
    const found = this.data.lanes.flatMap((/** @type {any} */ lane) => lane.start.map((/** @type {number} */ start, /** @type {number} */ i) => ({ lane, i, start }))
      .filter((/** @type {any} */ one) => one.start < to && lane.end[one.i] > from));
    const column = (/** @type {string} */ name, /** @type {(one: any) => any} */ value) => ({ name, values: found.map(value) });
    return [column("lane", ({ lane }) => lane.name), column("phase", ({ lane, i }) => lane.phase[i]), column("start_s", ({ start }) => start / 1000),
      column("end_s", ({ lane, i }) => lane.end[i] / 1000), column("step", ({ lane, i }) => lane.step[i]), column("load", ({ lane, i }) => lane.load[i])];
  }
}

/** @param {any} data @param {string} part */
function partColour(data, part) {
  const name = Object.keys(data.phases).find((one) => data.phases[one].part === part && COLOURS[one] && (part !== "training" || one === "compute"));
  return name ? COLOURS[name] : "muted";
}
