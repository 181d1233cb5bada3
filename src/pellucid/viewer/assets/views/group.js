// All rollouts of one example side by side: what each was worth, how long it is, where it goes its own way.

import { METRICS, metricOf, valuesOf } from "../data/metrics.js";
import { recordsColumns } from "../data/save.js";
import { choice, element, facts, notice, painted, refill } from "../draw/dom.js";
import { count, fixed, plural, short, signed } from "../draw/format.js";
import { drawStrip } from "../draw/minimap.js";
import { saveBar } from "../draw/saving.js";
import { ColourScale, colouring, legend } from "../draw/scale.js";
import { commonPrefix } from "./across.js";

const SHOWN = 360; // tokens of a member after the fold; the rest is in its record
const BEFORE = 6; // of the common beginning, after the fold

export class GroupView {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.head = element("header", { class: "step-head" });
    this.look = element("div", { class: "look plain" });
    this.members = element("div", { class: "members" });
    this.root = element("section", { class: "view group-view", "aria-label": "Group" }, this.head, this.look, this.members);
    this.turn = 0;
  }

  /** @param {import("../state.js").State} state */
  async update(state) {
    const turn = (this.turn += 1);
    const { run } = this.app;
    await run.indexWith(state.step, state.record);
    const index = await run.measured(state.step);
    const [name, word] = index.value("group", state.record) !== null ? ["group", index.value("group", state.record)] : ["example", index.value("example", state.record)];
    if (word === null) {
      refill(this.head, element("h2", {}, "Group"));
      this.look.replaceChildren();
      refill(this.members, notice("empty", "This record belongs to no group", "The export has neither a group nor an example id.", element("button", { type: "button", onclick: () => this.app.go({ view: "record" }) }, "back to the record")));
      return;
    }
    const numbers = index.withWords({ [name]: word, env: index.value("env", state.record) });
    const records = await Promise.all(numbers.map((/** @type {number} */ record) => run.record(state.step, record)));
    const metric = metricOf(state.fill);
    const domain = await this.app.domain(metric, state.scope === "record" ? "step" : state.scope, records[0]);
    if (turn !== this.turn) return;
    this.draw(state, index, records, new ColourScale(metric, domain), `${name} ${word}`);
  }

  /** @param {import("../state.js").State} state @param {any} index @param {import("../data/run.js").TokenRecord[]} records @param {ColourScale} scale @param {string} title */
  draw(state, index, records, scale, title) {
    const ids = records.map((record) => record.ids);
    const shared = records.length > 1 ? commonPrefix(ids) : 0;
    const rewards = records.map((record) => record.field("reward"));
    const known = rewards.filter((reward) => reward !== null);
    const mean = known.length ? known.reduce((sum, reward) => sum + reward, 0) / known.length : null;
    const best = rewards.indexOf(Math.max(...known));
    refill(this.head, element("div", { class: "about" }, element("h2", {}, `${title[0].toUpperCase()}${title.slice(1)}`),
      facts([["step", String(state.step)], ["environment", index.value("env", state.record) ?? "–"], ["rollouts here", count(records.length)],
        ["mean reward", short(mean)], ["common beginning", plural(shared, "token")], ["example", index.value("example", state.record) ?? "–"]])),
    element("span", { class: "view-tools" }, saveBar("the tokens of this group", () => this.app.fileName(`step_${state.step}_${title}`),
      { columns: () => recordsColumns(records, this.app.run.vocabulary), shown: () => this.root })));
    refill(this.look, choice("Colour", METRICS.map(({ key, label }) => [key, label]), state.fill, (fill) => this.app.go({ fill })), legend(scale, state.scope),
      element("span", { class: "muted" }, "a bar before a token: where the rollout leaves the best one's text"));
    const longest = Math.max(...records.map(({ length }) => length));
    const order = records.map((_, i) => i).sort((a, b) => (rewards[b] ?? -Infinity) - (rewards[a] ?? -Infinity) || a - b);
    const largest = (/** @type {string} */ name) => Math.max(1e-9, ...records.map((record) => Math.abs(record.field(name) ?? 0)));
    const ends = { reward: largest("reward"), advantage: largest("advantage") };
    refill(this.members, ...order.map((i) => this.member(records[i], ids[i], { shared, scale, longest, ends, best: best === i ? null : ids[best], isChosen: records[i].record === state.record })));
  }

  /** @param {import("../data/run.js").TokenRecord} record @param {ArrayLike<number>} ids @param {any} context */
  member(record, ids, { shared, scale, longest, ends, best, isChosen }) {
    const colour = colouring(record, scale);
    const leaves = best ? commonPrefix([best, ids]) : -1;
    const way = leaves < 0 ? " · the best" : leaves === record.length ? " · the best one's text" : ` · own way from token ${leaves}`;
    const from = Math.max(0, shared - BEFORE);
    const to = Math.min(record.length, Math.max(shared, from) + SHOWN);
    const tokens = [];
    for (let i = from; i < to; i += 1) {
      const side = ["is_masked_high", "is_masked_low"].map((name, k) => (record.value(name, i) === 1 ? ` masked-${["high", "low"][k]}` : "")).join("");
      const node = element("span", { class: `token${record.isTrainable(i) ? "" : " context"}${side}${i === leaves ? " leaves" : ""}`,
        title: i === leaves ? "leaves the best rollout's text here" : null }, this.app.run.vocabulary.show(ids, i));
      node.addEventListener("click", () => this.app.go({ view: "record", record: record.record, token: i }));
      tokens.push(painted(node, colour(i)));
    }
    const strip = element("canvas", { "aria-hidden": "true" });
    const root = element("article", { class: "card member", "aria-current": isChosen ? "true" : null },
      element("header", {}, element("button", { type: "button", class: "link", onclick: () => this.app.go({ view: "record", record: record.record, token: -1 }) }, `record ${record.record}`),
        record.field("rollout") === null || !this.app.run.numRollouts(undefined, record.step) ? null : element("button", { type: "button", class: "link", onclick: () => this.app.openConversation(record.record) }, "conversation"),
        element("small", {}, `${plural(record.length, "token")}${record.field("stop") ? ` · ${record.field("stop")}` : ""}${way}`)),
      element("div", { class: "bars" }, bar("reward", record.field("reward"), ends.reward, fixed(record.field("reward"), 3)), bar("advantage", record.field("advantage"), ends.advantage, signed(record.field("advantage"), 3))),
      element("div", { class: "strip-frame" }, strip),
      element("p", { class: "member-text" }, shared > BEFORE ? element("span", { class: "fold" }, `⋯ ${shared - BEFORE} common `) : null, ...tokens, to < record.length ? element("span", { class: "fold" }, ` ⋯ ${count(record.length - to)} more`) : null));
    queueMicrotask(() => drawStrip(strip, record, valuesOf(record, scale.metric), colour, Math.max(40, (root.clientWidth - 30) * (record.length / longest)), 26));
    return root;
  }
}

/** A bar to the right of the middle for what is above 0, to the left for what is below.
 * @param {string} name @param {number | null} value @param {number} most @param {string} text */
function bar(name, value, most, text) {
  const fill = element("i", { class: (value ?? 0) < 0 ? "below" : "above" });
  const share = (Math.abs(value ?? 0) / most) * 50;
  fill.style.width = `${share}%`;
  fill.style.left = (value ?? 0) < 0 ? `${50 - share}%` : "50%";
  return element("div", { class: "bar" }, element("span", {}, name), element("span", { class: "bar-track" }, fill), element("b", {}, text));
}
