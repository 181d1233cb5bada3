// The tokens that stand out, each with what stands around it. A row leads to its token.

import { METRICS, RATIO, metricOf, valuesOf } from "../data/metrics.js";
import { joined, selectionColumns } from "../data/save.js";
import { select } from "../data/select.js";
import { KINDS, cut, worstTokens } from "../data/worst.js";
import { contextLine } from "../draw/context.js";
import { choice, element, notice, refill } from "../draw/dom.js";
import { count, plural, short, signed } from "../draw/format.js";
import { legend } from "../draw/legend.js";
import { saveBar } from "../draw/saving.js";
import { ColourScale, domainOf } from "../draw/scale.js";
import { VirtualTable } from "../draw/table.js";

const LIMIT = 200;
const CONTEXT = 12;

export class WorstView {
  /** @type {ColourScale} */
  scale;

  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.bar = element("header", { class: "look plain" });
    this.note = element("p", { class: "muted", role: "status" });
    /** @type {import("../data/worst.js").Found[]} */
    this.found = [];
    /** @type {Map<number, import("../data/run.js").StepTokens>} */
    this.steps = new Map();
    this.table = new VirtualTable({
      label: "Worst tokens",
      rowHeight: 32,
      onChoose: (row) => this.open(this.found[row]),
      columns: [
        { key: "value", label: "value", width: "92px", cell: (row) => short(this.found[row].value, 4) },
        { key: "context", label: "token and ± 12 around it", width: "auto", text: true, cell: (row) => this.context(this.found[row]) },
        { key: "state", label: "state", width: "108px", text: true, cell: (row) => this.state(this.found[row]) },
        { key: "kl", label: "KL", width: "78px", cell: (row) => short(this.read("mismatch_kl", this.found[row])) },
        { key: "delta", label: "Δ", width: "78px", cell: (row) => signed(this.read("prob_delta", this.found[row]), 3) },
        { key: "adv", label: "A", width: "72px", cell: (row) => signed(this.read("advantages", this.found[row]), 3) },
        { key: "entropy", label: "entropy", width: "72px", cell: (row) => short(this.read("entropy", this.found[row])) },
        { key: "env", label: "environment", width: "110px", text: true, cell: (row) => this.owner("env", this.found[row]) ?? "–" },
        { key: "where", label: "step / record / token", width: "168px", cell: (row) => this.where(this.found[row]) },
      ],
    });
    this.root = element("section", { class: "view worst-view", "aria-label": "Worst tokens" }, element("header", { class: "step-head" }, element("h2", {}, "Worst tokens"),
      element("span", { class: "view-tools" }, saveBar("these tokens", () => this.fileName(), { columns: () => this.columns(), shown: () => this.root }))), this.bar, this.note,
      element("div", { class: "card table-card" }, this.table.root));
    this.turn = 0;
  }

  fileName() {
    const { step, within, kind, top } = this.app.state;
    return this.app.fileName(`${within === "run" ? "run" : `step_${step}`}_worst_${kind}_by_${top}`);
  }

  /** Worst first. */
  columns() {
    return joined(this.found.map((found) => selectionColumns(this.all(found), [found.token], this.app.run.vocabulary)));
  }

  /** @param {import("../data/worst.js").Found} found @returns {any} */
  all(found) { return this.steps.get(found.step); }

  /** @param {string} name @param {import("../data/worst.js").Found} found */
  read(name, found) { return this.all(found).column(name)?.[found.token]; }

  /** @param {string} name @param {import("../data/worst.js").Found} found */
  owner(name, found) { const all = this.all(found); return all.index.value(name, all.owners[found.token]); }

  /** @param {import("../data/worst.js").Found} found */
  where(found) { const all = this.all(found); return `${found.step} / ${all.owners[found.token]} / ${all.position(found.token)}`; }

  /** @param {import("../data/worst.js").Found} found */
  state(found) {
    if (this.read("is_masked_high", found) === 1) return "masked high";
    if (this.read("is_masked_low", found) === 1) return "masked low";
    return this.read("is_masked", found) === 1 ? "masked" : "trained";
  }

  /** @param {import("../data/worst.js").Found} found */
  open(found) {
    const all = this.all(found);
    this.app.go({ view: "record", step: found.step, record: all.owners[found.token], token: all.position(found.token), fill: metricOf(this.app.state.top).key === "ratio" ? "logratio" : this.app.state.top });
  }

  /** @param {import("../data/worst.js").Found} found */
  context(found) {
    const all = this.all(found);
    const record = all.owners[found.token];
    const [from, to] = [Math.max(all.starts[record], found.token - CONTEXT), Math.min(all.starts[record + 1], found.token + CONTEXT + 1)];
    const values = valuesOf(all, metricOf(this.app.state.top));
    return contextLine(this.app.run.vocabulary, all.column("token_ids") ?? [], from, to, found.token,
      (at) => (all.isTrainable(at) && values ? this.scale.colour(values[at]) : null));
  }

  /** @param {import("../state/store.js").State} state */
  async update(state) {
    const turn = (this.turn += 1);
    const { run } = this.app;
    const metric = metricOf(state.top);
    const steps = state.within === "run" ? run.steps : [state.step];
    /** @type {import("../data/worst.js").Found[]} */
    let found = [];
    this.steps.clear();
    for (const [place, step] of steps.entries()) {
      const all = await run.stepTokens(step);
      if (turn !== this.turn) return;
      const chosen = select(all, run.vocabulary, { ...state, brush: "" });
      found = [...found, ...worstTokens(all, state.kind, state.top, chosen.tokens, LIMIT)];
      cut(found, LIMIT);
      this.steps.set(step, all);
      if (place === 0 || place === steps.length - 1) {
        const values = valuesOf(all, metric);
        this.scale = new ColourScale(metric, values ? domainOf(values, (i) => chosen.tokens[i] === 1, metric) : { low: 0, high: 1 });
      }
      if (place % 10 === 0 || place === steps.length - 1) {
        this.found = [...found];
        const kept = new Set(found.map((one) => one.step));
        for (const known of this.steps.keys()) if (!kept.has(known)) this.steps.delete(known);
        this.draw(state, steps.length > 1 ? `${count(place + 1)} of ${plural(steps.length, "step")} looked through` : `step ${step}`);
      }
    }
  }

  /** @param {import("../state/store.js").State} state @param {string} where */
  draw(state, where) {
    const { app } = this;
    refill(this.bar,
      choice("Class", Object.entries(KINDS).map(([key, { title }]) => [key, title]), state.kind, (kind) => app.go({ kind })),
      choice("by", [...METRICS, RATIO].map(({ key, label }) => [key, label]), state.top, (top) => app.go({ top })),
      choice("in", [["step", "this step"], ["run", "the run"]], state.within === "run" ? "run" : "step", (within) => app.go({ within })),
      legend(this.scale, "step"));
    this.note.textContent = `${KINDS[state.kind]?.about ?? ""} · ${plural(this.found.length, "token")}${this.found.length === LIMIT ? " (the first)" : ""} · ${where}`;
    this.table.root.hidden = !this.found.length;
    this.empty?.remove();
    if (!this.found.length) {
      this.empty = notice("empty", "No such token", state.filter ? "No token of this class passes the filter." : "No token of this step is of this class.");
      this.root.append(this.empty);
    }
    this.table.show(Array.from({ length: this.found.length }, (_, i) => i));
  }
}
