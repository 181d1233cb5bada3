// The saved rollouts of the run, dropped ones included: what became of each and why, its reward and its texts.

import { parseFilter, testBy } from "../data/select.js";
import { saveBar } from "../draw/saving.js";
import { choice, element, facts, notice, refill } from "../draw/dom.js";
import { count, fixed, plural, short, signed } from "../draw/format.js";
import { MEANING } from "../draw/sankey.js";
import { readable } from "../data/texts.js";
import { VirtualTable } from "../draw/table.js";
import { Conversation } from "./conversation.js";
import { parseQuery } from "./search.js";
import { sorted } from "./step_tables.js";

const LIMIT = 2000;
const SHOWN_END = 160; // characters of a text in the table

/** @typedef {import("./conversation.js").Rollout} Rollout */

export class RolloutsView {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    /** @type {Rollout[]} */
    this.found = [];
    this.bar = element("header", { class: "look plain" });
    this.note = element("p", { class: "muted", role: "status" });
    this.empty = element("div");
    const word = (/** @type {"env" | "stop"} */ name) => (/** @type {number} */ row) => this.found[row][name] || "–";
    this.table = new VirtualTable({
      label: "Rollouts",
      onChoose: (row) => app.go({ rollout: keyOf(this.found[row]) }),
      onSort: (sort, up) => app.go({ sort, up }),
      columns: [
        { key: "step", label: "step", width: "52px", cell: (row) => String(this.found[row].step) },
        { key: "outcome", label: "outcome", width: "126px", text: true, cell: (row) => this.found[row].outcome.replaceAll("_", " ") },
        { key: "reward", label: "reward", width: "66px", cell: (row) => fixed(this.found[row].reward, 3) },
        { key: "advantage", label: "adv.", width: "66px", cell: (row) => signed(this.found[row].advantage, 3) },
        { key: "tokens", label: "tokens", width: "62px", cell: (row) => count(this.found[row].tokens) },
        { key: "turns", label: "turns", width: "56px", cell: (row) => count(this.found[row].turns.length) },
        { key: "env", label: "environment", width: "110px", text: true, cell: word("env") },
        { key: "stop", label: "ended by", width: "82px", text: true, cell: word("stop") },
        { key: "prompt", label: "end of the prompt", width: "auto", text: true, cell: (row) => ending(promptOf(this.found[row])) },
        { key: "reply", label: "end of the reply", width: "auto", text: true, cell: (row) => ending(replyOf(this.found[row])) },
        { key: "reason", label: "reason", width: "252px", text: true, cell: (row) => this.found[row].reason || this.found[row].error || "" },
      ],
    });
    this.details = element("aside", { class: "details", "aria-label": "Rollout", tabindex: 0 });
    this.conversation = new Conversation(app, { onTokens: (one, turn) => this.openTokens(one, turn), onClose: () => app.go({ talk: false }), onMove: (change) => this.move(change), onOpen: (one) => app.go({ rollout: keyOf(one), turn: -1 }) });
    this.body = element("div", { class: "record-body" }, element("div", { class: "card table-card" }, this.table.root), this.details);
    this.listHead = element("header", { class: "step-head" }, element("h2", {}, "Rollouts"),
      element("span", { class: "view-tools" }, saveBar("these rollouts", () => app.fileName(`rollouts${app.state.outcome ? `_${app.state.outcome}` : ""}`), { columns: () => this.columns(), shown: () => this.root })));
    this.root = element("section", { class: "view rollouts-view", "aria-label": "Rollouts" }, this.listHead, this.bar, this.note, this.empty, this.body);
    this.turn = 0;
  }

  /** @param {import("../state.js").State} state @param {Set<string>} changed */
  async update(state, changed) {
    const turn = (this.turn += 1);
    const { run } = this.app;
    for (const part of [this.listHead, this.bar, this.note]) part.hidden = state.talk;
    if (state.talk) this.root.prepend(this.conversation.root); else this.conversation.root.remove();
    if (state.talk && await this.talk(state) && turn !== this.turn) return;
    if ([...changed].every((name) => ["rollout", "talk", "turn"].includes(name)) && this.isRead) { this.pin(state); return; }
    this.isRead = false;
    this.drawBar(state);
    const query = parseQuery(state.search);
    const pattern = query?.kind === "text" ? query.pattern : null;
    /** @type {(rollout: Rollout) => boolean} */
    let passes = () => true;
    try {
      if (state.filter.trim()) passes = rolloutTest(parseFilter(state.filter));
    } catch { /* the top bar says what is wrong with it */ }
    const isMeant = (/** @type {Rollout} */ one) => (!state.outcome || one.outcome === state.outcome || (state.outcome === "truncated" && one.truncated > 0))
      && (!state.env || one.env === state.env) && passes(one) && (!pattern || textsOf(one).some((text) => { pattern.lastIndex = 0; return pattern.test(text); }));
    const steps = Object.keys(run.head.rollouts).map(Number).sort((a, b) => b - a)
      .filter((step) => (!state.outcome || run.numRollouts(state.outcome, step)) && (state.within !== "step" || step === state.step || run.steps.length === 0));
    /** @type {Rollout[]} */
    const found = [];
    let looked = 0;
    for (const step of steps) {
      for (const one of await run.rollouts(step)) if (isMeant(one) && found.length < LIMIT) found.push(one);
      looked += 1;
      if (turn !== this.turn) return;
      if (looked % 20 === 1) this.show(state, [...found], looked, steps.length);
      if (found.length >= LIMIT) break;
    }
    this.isRead = true;
    this.show(state, found, looked, steps.length, true);
  }

  /** Shows the open rollout as a conversation; false where it is not there. @param {import("../state.js").State} state */
  async talk(state) {
    const { run } = this.app;
    const [step] = state.rollout.split("/");
    const saved = step && run.numRollouts(undefined, Number(step)) ? await run.rollouts(Number(step)) : [];
    const row = saved.find((/** @type {Rollout} */ one) => keyOf(one) === state.rollout) ?? this.found[0];
    if (!row) return false;
    const one = await run.rollout(row);
    if (this.app.state.rollout !== state.rollout) return true;
    const place = this.order().findIndex((at) => keyOf(this.found[at]) === keyOf(row));
    this.conversation.show(one, step ? saved : [row], place < 0 ? "" : `${count(place + 1)} of ${count(this.found.length)}`, state.turn);
    return true;
  }

  /** Rows as the table shows them. @returns {number[]} */
  order() { return Array.from(this.table.order); }

  /** To the next or the previous rollout of the list. @param {number} change */
  move(change) {
    const order = this.order();
    if (!order.length) return;
    const place = order.findIndex((row) => keyOf(this.found[row]) === this.app.state.rollout);
    const next = this.found[order[Math.min(order.length - 1, Math.max(0, Math.max(0, place) + change))]];
    this.app.go({ rollout: keyOf(next), turn: -1 });
  }

  /** @param {number} change */
  moveTurn(change) {
    const { talk, turn } = this.app.state;
    const last = (this.conversation.one?.turns.length ?? 0) - 1;
    if (talk && last >= 0) this.app.go({ turn: Math.min(last, Math.max(0, turn + change)) });
  }

  /** @param {import("../state.js").State} state */
  drawBar(state) {
    const { app } = this;
    const { run } = app;
    /** @type {Map<string, number>} */
    const counts = new Map();
    for (const states of Object.values(run.head.rollouts)) for (const [name, number] of Object.entries(states)) counts.set(name, (counts.get(name) ?? 0) + Number(number));
    if (state.outcome && !counts.has(state.outcome)) counts.set(state.outcome, 0);
    refill(this.bar, choice("Outcome", [["", `all ${count(run.numRollouts())}`], ...[...counts].sort(([, a], [, b]) => b - a).map(([name, number]) => /** @type {[string, string]} */ ([name, `${name.replaceAll("_", " ")} ${count(number)}`]))],
      state.outcome, (outcome) => app.go({ outcome })),
    run.steps.length ? choice("in", [["run", "the run"], ["step", `step ${state.step}`]], state.within === "step" ? "step" : "run", (within) => app.go({ within })) : null,
    state.outcome ? element("span", { class: "muted" }, MEANING[state.outcome] ?? (state.outcome === "sent" ? "sent to the trainer" : "")) : null);
  }

  /** @param {import("../state.js").State} state @param {Rollout[]} found @param {number} looked @param {number} steps @param {boolean} [isAll] */
  show(state, found, looked, steps, isAll = false) {
    this.found = found;
    const order = found.map((_, i) => i);
    const read = (/** @type {number} */ row) => {
      const one = /** @type {any} */ (found[row]);
      if (state.sort === "turns") return one.turns.length;
      return state.sort === "prompt" ? promptOf(one) : state.sort === "reply" ? replyOf(one) : one[state.sort] ?? null;
    };
    const isColumn = this.table.options.columns.some(({ key }) => key === state.sort);
    const same = (/** @type {(one: Rollout) => any} */ of) => found.length > 1 && found.every((one) => of(one) === of(found[0]));
    this.table.hide(new Set([...["env", "stop", "outcome"].filter((name) => same((one) => /** @type {any} */ (one)[name])), ...(found.every(({ turns }) => turns.length < 2) ? ["turns"] : []),
      ...["reason", "reward", "advantage", "tokens"].filter((name) => found.every((one) => !one.error && (/** @type {any} */ (one)[name] ?? "") === ""))]));
    this.table.show(isColumn ? sorted(order, state.up, read) : order, { key: isColumn ? state.sort : "", up: state.up });
    this.note.textContent = isAll && !found.length ? "" : `${plural(found.length, "rollout")}${found.length >= LIMIT ? ", the newest" : ""}${looked < steps ? ` · ${count(looked)} of ${plural(steps, "step")} looked through` : ""}`;
    this.body.hidden = !found.length || state.talk;
    refill(this.empty, found.length || !isAll ? null : this.nothing(state));
    this.pin(state);
    if (state.talk) this.talk(state);
  }

  /** Nothing was found: where there is something. @param {import("../state.js").State} state */
  nothing(state) {
    const { app } = this;
    const { run } = app;
    const action = (/** @type {string} */ label, /** @type {any} */ changes) => element("button", { type: "button", onclick: () => app.go(changes) }, label);
    const all = run.numRollouts();
    if (!all && run.head.counting) return notice("loading", "Counting the saved rollouts …");
    if (!all) {
      const text = run.head.in_run ? "The run has no `rollouts/step_N/train_rollouts.jsonl`: rollouts are saved by `pellucid rl`, not by sft." : "Saved rollouts are found beside an export only in a run folder.";
      return notice("empty", "No saved rollouts", text, action("look at the run", { view: "run" }));
    }
    const here = run.numRollouts(state.outcome || undefined);
    if (state.search || state.filter || state.env) return notice("empty", "No such rollout", `None of ${count(here)} passes the search and the filter.`, action("clear them", { search: "", filter: "", env: "" }));
    if (here) {
      const near = Object.keys(run.head.rollouts).map(Number).filter((step) => run.numRollouts(state.outcome, step)).sort((a, b) => Math.abs(a - state.step) - Math.abs(b - state.step))[0];
      return notice("empty", `None in step ${state.step}`, `Step ${near} is the nearest one that has some.`, action(`${count(here)} in the whole run`, { within: "run" }));
    }
    const counted = (run.head.ledger?.accounts ?? []).reduce((/** @type {number} */ sum, /** @type {any} */ account) => sum + (account.states[state.outcome] ?? 0), 0);
    const why = !counted ? "The ledger counts no such token." : state.outcome === "in_flight" ? "They are running or wait for a batch; a rollout is saved once it is settled." : `The ledger counts ${plural(counted, "such token")}, but no saved rollout has this outcome.`;
    return notice("empty", `No saved rollout is ${state.outcome.replaceAll("_", " ")}`, why, action(`all ${plural(all, "rollout")}`, { outcome: "" }));
  }

  /** @param {import("../state.js").State} state */
  pin(state) {
    const row = Math.max(0, this.found.findIndex((one) => keyOf(one) === state.rollout));
    this.body.hidden = !this.found.length || state.talk;
    if (!this.found.length) return;
    this.table.choose(row);
    const one = this.found[row];
    const { app } = this;
    const link = (/** @type {string} */ label, /** @type {() => void} */ onclick) => element("button", { type: "button", onclick }, label);
    refill(this.details, element("div", { class: "details-body" },
      element("p", { class: "details-state" }, element("span", { class: `badge badge-${one.outcome === "sent" ? "trained" : "masked"}` }, one.outcome.replaceAll("_", " ") || "unknown"), element("span", { class: "details-place" }, `step ${one.step}`)),
      one.reason || one.error ? element("p", { class: "details-rule" }, one.reason || one.error) : null,
      one.truncated ? element("p", { class: "details-rule" }, `${plural(one.truncated, "token")} beyond seq_len were cut`) : null,
      facts([["reward", one.reward === null ? null : fixed(one.reward, 4)], ["advantage", one.advantage === null ? null : signed(one.advantage, 4)], ["tokens", one.tokens === null ? null : count(one.tokens)], ["weights", one.version === null ? null : `version ${one.version}`], ["ended by", one.stop], ["environment", one.env],
        ...Object.entries(one.metrics).map(([name, value]) => [name, short(value)]), ...Object.entries(one.extra)]),
      element("p", { class: "record-buttons" }, one.turns.length ? link(one.turns.length > 1 ? `conversation, ${one.turns.length} turns` : "conversation", () => app.go({ rollout: keyOf(one), talk: true, turn: -1 })) : null,
        one.outcome === "sent" && app.run.steps.includes(one.step) ? link("its tokens", () => this.openTokens(one)) : null,
        one.group ? link("its group", () => app.go({ filter: `group = "${one.group}"`, outcome: "", search: "" })) : null),
      ...one.messages.map(({ role, text }) => element("div", { class: "message" }, element("b", { class: `role role-${role}` }, role || "–"), element("pre", {}, readable(text)))),
      element("p", { class: "ids" }, ...[["rollout", one.rollout], ["group", one.group], ["example", one.example]].map(([name, text]) => element("span", {}, `${name} `, element("code", {}, text || "–"))))));
  }

  /** The record of a rollout, or that of one of its turns at the turn's first token. @param {Rollout} one @param {number} [number] */
  async openTokens({ step, rollout, outcome, turns }, number) {
    const { app } = this;
    if (!app.run.steps.length) { app.go({ view: "record" }); return; } // it says how to have tokens exported
    if (outcome !== "sent" || !app.run.steps.includes(step)) {
      app.flash(outcome !== "sent" ? `Only tokens that were sent to the trainer are exported, and this rollout is: ${outcome.replaceAll("_", " ")}` : `The tokens of step ${step} are not here`);
      return;
    }
    const index = await app.run.index(step);
    const turn = number === undefined ? null : turns[number];
    const [record] = turn ? index.withWords({ sample: `${rollout}-${turn.sample}` }).concat(turn.sample ? [] : index.withWords({ rollout })) : index.withWords({ rollout });
    if (record === undefined) app.flash(turn?.trains === false ? "No token of this turn trains: such samples are not exported" : "No record of the export is of this rollout");
    else if (turn && turn.prompt >= index.value("tokens", record)) app.flash("This turn lies beyond seq_len: its tokens were cut");
    else app.go({ view: "record", step, record, token: turn ? turn.prompt : -1 });
  }

  /** A row per rollout. */
  columns() {
    const names = /** @type {(keyof Rollout)[]} */ (["step", "rollout", "group", "example", "env", "outcome", "reason", "error", "reward", "advantage", "tokens", "stop"]);
    return [...names.map((name) => ({ name, values: this.found.map((one) => /** @type {any} */ (one)[name]) })),
      { name: "prompt", values: this.found.map(promptOf) }, { name: "reply", values: this.found.map(replyOf) }];
  }
}

/** @param {Rollout} one */
const keyOf = ({ step, rollout }) => `${step}/${rollout}`;

/** @param {Rollout} one */
const replyOf = ({ messages }) => messages.filter(({ role }) => role === "assistant").at(-1)?.text ?? "";

/** @param {Rollout} one */
const promptOf = ({ messages }) => messages.filter(({ role }) => role !== "assistant").at(-1)?.text ?? "";

/** @param {Rollout} one */
const textsOf = (one) => [one.reason, one.error, one.rollout, ...one.messages.flatMap(({ text, calls = [] }) => [text, ...calls.map(([name, args]) => `${name} ${args}`)])];

/** @param {string} text */
const ending = (text) => element("span", { class: "ending" }, element("bdi", {}, text.slice(-SHOWN_END).replaceAll("\n", "⏎")));

/** Fields of a filter as a rollout has them. @param {import("../data/select.js").Tree} tree @returns {(rollout: Rollout) => boolean} */
function rolloutTest(tree) {
  const others = /** @type {Record<string, (one: Rollout) => any>} */ ({ adv: (one) => one.advantage, text: (one) => textsOf(one).join("\n"), stale: (one) => (one.version === null ? null : one.step - one.version) });
  let current = /** @type {Rollout} */ ({});
  const test = testBy(tree, (field) => () => { const value = field in others ? others[field](current) : /** @type {any} */ (current)[field]; return value === "" ? null : value ?? null; });
  return (one) => { current = one; return test(0); };
}
