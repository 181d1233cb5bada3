// The same example over the steps: its reward and length each time, and how what was said has changed.

import { readable } from "../data/texts.js";
import { lineChart } from "../draw/chart.js";
import { choice, element, facts, notice, refill } from "../draw/dom.js";
import { count, fixed, plural, short } from "../draw/format.js";
import { saveBar, saveChart } from "../draw/saving.js";

const FOLD = 24; // common tokens in a row that are shown at most

/** @typedef {{step: number, record: number, reward: number | null, tokens: number, trainable: number | null}} Occurrence */

export class AcrossView {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.head = element("header", { class: "step-head" });
    this.status = element("p", { class: "muted", role: "status" });
    this.charts = element("div", { class: "strips" });
    this.compare = element("div", { class: "card compare" });
    this.root = element("section", { class: "view across-view", "aria-label": "Across steps" }, this.head, this.status, this.charts, this.compare);
    /** @type {Occurrence[]} */
    this.found = [];
    this.turn = 0;
  }

  /** @param {import("../state.js").State} state @param {Set<string>} changed */
  async update(state, changed) {
    const turn = (this.turn += 1);
    const { run } = this.app;
    const index = await run.indexWith(state.step, state.record);
    const [env, example] = [index.value("env", state.record), index.value("example", state.record)];
    if (example === null) {
      refill(this.head, element("h2", {}, "Across steps"));
      for (const part of [this.charts, this.compare]) part.replaceChildren();
      refill(this.status, notice("empty", "This record has no example id", "Without one, the same example cannot be found in other steps.", element("button", { type: "button", onclick: () => this.app.go({ view: "record" }) }, "back to the record")));
      return;
    }
    if (this.key !== `${env} ${example}` || changed.has("head")) {
      this.key = `${env} ${example}`;
      this.found = [];
      refill(this.head, element("div", { class: "about" }, element("h2", {}, `Example ${example}`), facts([["environment", env ?? "–"]])),
        element("span", { class: "view-tools" }, saveBar("its rollouts", () => this.app.fileName(`example_${example}`), { columns: () => this.columns(), shown: () => this.root })));
      for (const [place, step] of run.steps.entries()) {
        const other = await run.index(step);
        const records = other.withWords({ example, env });
        if (records.length) await run.measured(step);
        if (turn !== this.turn) { this.key = ""; return; }
        for (const record of records) {
          this.found.push({ step, record, reward: other.value("reward", record), tokens: other.value("tokens", record), trainable: other.value("trainable", record) });
        }
        if (place % 20 === 0) this.status.textContent = `${count(place + 1)} of ${plural(run.steps.length, "step")} looked through …`;
      }
      this.drawCharts();
    }
    await this.drawCompare(state);
  }

  /** A row per rollout. */
  columns() {
    return ["step", "record", "reward", "tokens", "trainable"].map((name) => ({ name, values: this.found.map((one) => /** @type {any} */ (one)[name]) }));
  }

  drawCharts() {
    const steps = [...new Set(this.found.map(({ step }) => step))];
    this.status.textContent = steps.length > 1 ? `${plural(this.found.length, "rollout")} in ${plural(steps.length, "step")}`
      : `This example was trained on in this step only: ${plural(this.found.length, "rollout")}. Compare two of them below.`;
    this.charts.replaceChildren();
    if (steps.length < 2) return;
    const mean = (/** @type {"reward" | "trainable"} */ name) => steps.map((step) => {
      const values = this.found.filter((one) => one.step === step && one[name] !== null).map((one) => Number(one[name]));
      return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : NaN;
    });
    for (const [title, about, values, colour] of /** @type {[string, string, number[], string][]} */ ([["Reward", "mean of its rollouts", mean("reward"), "series-1"], ["Length", "trainable tokens, mean of its rollouts", mean("trainable"), "series-2"]])) {
      const root = element("div", { class: "strip-chart" });
      this.charts.append(element("div", { class: "card strip" }, element("header", {}, element("h3", {}, title), element("small", {}, about), saveChart(title, () => this.app.fileName(`${this.key}_${title}`))), root));
      lineChart(root, { height: 150, x: steps, lines: [{ label: title, values, colour }], points: true, unit: "step", sync: "across", label: `${title} over steps`,
        onClick: (step) => { const one = this.found.find((other) => other.step === step); if (one) this.app.go({ step, record: one.record }); } });
    }
  }

  /** @param {import("../state.js").State} state */
  async drawCompare(state) {
    const { run } = this.app;
    const { turn } = this;
    const here = this.found.findIndex(({ step, record }) => step === state.step && record === state.record);
    if (here < 0) { this.compare.replaceChildren(); return; }
    const fallback = here > 0 ? 0 : Math.min(1, this.found.length - 1);
    const there = state.other >= 0 && state.other < this.found.length ? state.other : fallback;
    const [before, after] = [this.found[there], this.found[here]];
    const [first, second] = await Promise.all([run.record(before.step, before.record), run.record(after.step, after.record)]);
    if (turn !== this.turn) return;
    const choices = /** @type {[string, string][]} */ (this.found.map(({ step, record, reward }, i) => [String(i), `step ${step}, record ${record}, reward ${fixed(reward, 2)}`]));
    const [a, b] = [first.ids, second.ids];
    const parts = diff(a, b);
    const changedTokens = parts.filter(({ kind }) => kind !== "same").reduce((sum, { start, end }) => sum + end - start, 0);
    refill(this.compare, element("header", {}, element("h3", {}, "Text"), choice("from", choices, String(there), (other) => this.app.go({ other: Number(other) })),
      choice("to", choices, String(here), (place) => { const one = this.found[Number(place)]; this.app.go({ step: one.step, record: one.record, other: there }); }),
      element("small", {}, `reward ${short(before.reward)} → ${short(after.reward)} · ${plural(changedTokens, "token differs", "tokens differ")}`)),
    element("p", { class: "diff" }, ...parts.flatMap((part) => this.part(part, a, b))),
    element("p", { class: "muted" }, element("del", {}, "only before"), " ", element("ins", {}, "only after")));
  }

  /** @param {Part} part @param {ArrayLike<number>} a @param {ArrayLike<number>} b */
  part({ kind, start, end }, a, b) {
    const ids = kind === "first" ? a : b;
    const show = (/** @type {number} */ from, /** @type {number} */ to) => Array.from({ length: to - from }, (_, i) => this.app.run.vocabulary.show(ids, from + i)).join("").replaceAll("⏎", "⏎\n");
    if (kind !== "same") return [element(kind === "first" ? "del" : "ins", {}, show(start, end))];
    if (end - start <= 2 * FOLD) return [show(start, end)];
    return [show(start, start + FOLD), element("span", { class: "fold" }, ` ⋯ ${end - start - 2 * FOLD} common ⋯ `), show(end - FOLD, end)];
  }
}

// What two token sequences share: the parts in order, each common, only in the first, or only in the second.

/** @typedef {{kind: "same" | "first" | "second", start: number, end: number}} Part `start`, `end`: in the sequence it is of; "same": in the second */

const LONGEST = 3000; // beyond it, only common beginnings and ends are found

/** @param {ArrayLike<number>} first @param {ArrayLike<number>} second @returns {Part[]} */
export function diff(first, second) {
  const start = commonPrefix([first, second]);
  let [a, b] = [first.length, second.length];
  while (a > start && b > start && first[a - 1] === second[b - 1]) { a -= 1; b -= 1; }
  /** @type {Part[]} */
  const parts = [];
  push(parts, "same", 0, start);
  if (a - start > LONGEST || b - start > LONGEST) {
    push(parts, "first", start, a);
    push(parts, "second", start, b);
  } else middle(first, second, start, a, b, parts);
  push(parts, "same", b, second.length);
  return parts;
}

/** Two texts as one: what they share as text, what only the first has as <del>, what only the second has as <ins>.
 * @param {string} first @param {string} second @param {boolean} byLetter else word by word @returns {(Node | string)[]} */
export function markChanges(first, second, byLetter = false) {
  const [a, b] = [first, second].map((text) => (byLetter ? [...text] : text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? []));
  /** @type {Map<string, number>} */
  const ids = new Map();
  const numbered = (/** @type {string[]} */ pieces) => pieces.map((piece) => { if (!ids.has(piece)) ids.set(piece, ids.size); return /** @type {number} */ (ids.get(piece)); });
  return diff(numbered(a), numbered(b)).map(({ kind, start, end }) => {
    const text = readable((kind === "first" ? a : b).slice(start, end).join(""));
    return kind === "same" ? text : element(kind === "first" ? "del" : "ins", {}, text);
  });
}

/** @param {ArrayLike<number>[]} sequences */
export function commonPrefix(sequences) {
  const shortest = Math.min(...sequences.map(({ length }) => length));
  let at = 0;
  while (at < shortest && sequences.every((sequence) => sequence[at] === sequences[0][at])) at += 1;
  return at;
}

/** The longest common subsequence of what differs. @param {ArrayLike<number>} first @param {ArrayLike<number>} second
 * @param {number} start @param {number} a @param {number} b @param {Part[]} parts */
function middle(first, second, start, a, b, parts) {
  const [rows, columns] = [a - start, b - start];
  const table = new Uint16Array((rows + 1) * (columns + 1));
  for (let i = rows - 1; i >= 0; i -= 1) {
    for (let j = columns - 1; j >= 0; j -= 1) {
      const at = i * (columns + 1) + j;
      table[at] = first[start + i] === second[start + j] ? table[at + columns + 2] + 1 : Math.max(table[at + columns + 1], table[at + 1]);
    }
  }
  let [i, j] = [0, 0];
  while (i < rows || j < columns) {
    const at = i * (columns + 1) + j;
    if (i < rows && j < columns && first[start + i] === second[start + j]) { push(parts, "same", start + j, start + j + 1); i += 1; j += 1; }
    else if (i < rows && (j === columns || table[at + columns + 1] >= table[at + 1])) { push(parts, "first", start + i, start + i + 1); i += 1; }
    else { push(parts, "second", start + j, start + j + 1); j += 1; }
  }
}

/** @param {Part[]} parts @param {Part["kind"]} kind @param {number} start @param {number} end */
function push(parts, kind, start, end) {
  if (start >= end) return;
  const last = parts[parts.length - 1];
  if (last?.kind === kind && last.end === start) last.end = end; else parts.push({ kind, start, end });
}
