// One rollout as a conversation: who said what, the calls and answers of tools, where history was rewritten, how long each turn
// took, what the reward is made of. A turn leads to its tokens, and a token of a record back to its turn.

import { readable } from "../data/texts.js";
import { element, facts, refill } from "../draw/dom.js";
import { count, fixed, plural, short, signed } from "../draw/format.js";
import { markChanges } from "./across.js";

const FOLD = 1200; // characters of a message that stand open
const FOLD_LINES = 16;
const LINE = 88; // characters of JSON that stay on one line
const THOUGHT = /^\s*(?:<think>)?([\s\S]*?)<\/think>/;

/** @typedef {{role: string, text: string, name?: string, id?: string, calls?: [string, string, string][]}} Message calls: name, arguments, id
 * @typedef {{first: number, reply: number, after: number, keeps: number | null, prompt: number, tokens: number, stop: string, versions: [number, number][],
 *   sample: number | null, trains: boolean, start: number | null, wait: number | null}} Turn as `viewer/rollouts.py` describes it
 * @typedef {{step: number, number: number, extra: Record<string, string>, rollout: string, group: string, example: string, env: string, outcome: string, reason: string, error: string, stop: string,
 *   reward: number | null, advantage: number | null, tokens: number | null, time: number | null, truncated: number, version: number | null, messages: Message[],
 *   turns: Turn[], isConversation: boolean, cut: boolean, metrics: Record<string, number>, weights: Record<string, number>}} Rollout */

/** The messages that a turn's model saw, and its reply, as places in `messages`. @param {Rollout} one @param {number} turn @returns {number[]} */
export function conversationOf(one, turn) {
  if (turn < 0) return Array.from({ length: one.turns[0]?.first ?? one.messages.length }, (_, i) => i);
  const { after, keeps, first, reply } = one.turns[turn];
  const before = conversationOf(one, after);
  return [...before.slice(0, keeps ?? before.length), ...Array.from({ length: reply - first + 1 }, (_, i) => first + i)];
}

/** Where a turn does not simply go on from the one before: what it leaves out, and in words. Null where it does.
 * @param {Rollout} one @param {number} turn @returns {{title: string, text: string, left: number[]} | null} */
export function branchAt(one, turn) {
  const { after, keeps, sample } = one.turns[turn];
  const before = conversationOf(one, after);
  const left = keeps === null ? [] : before.slice(keeps);
  const whose = after < 0 ? "the example" : `turn ${after + 1}`;
  const isNew = sample !== null && sample !== one.turns[turn - 1]?.sample && one.turns.findIndex((other) => other.sample === sample) === turn;
  const trains = isNew && turn > 0 ? ` Its tokens are a sample of their own, number ${sample}.` : "";
  if (keeps === 0) return turn || before.length ? { title: turn ? "Another conversation" : "Another opening", text: `It shares no message with ${turn ? "those before" : "the example"}.${trains}`, left: turn ? [] : left } : null;
  if (left.length) return { title: "History rewritten", text: `Of ${plural(before.length, "message")} of ${whose}, the first ${keeps === 1 ? "stays" : `${count(Number(keeps))} stay`}; ${plural(left.length, "message")} ${left.length === 1 ? "is" : "are"} replaced.${trains}`, left };
  if (after !== turn - 1) return { title: "Branch", text: after < 0 ? `It starts again from the messages of the example.${trains}` : `It goes on from turn ${after + 1}, not from turn ${turn}.${trains}`, left };
  if (isNew && turn > 0) return { title: "Rendered anew", text: `The messages go on, but the chat template writes the earlier ones differently now.${trains}`, left };
  return null;
}

/** Seconds of a rollout: in all, waiting for the engine, and outside of it. Null where they are not recorded. @param {Rollout} one */
export function timesOf(one) {
  const turns = one.turns.map(({ start, wait }) => ({ start: start ?? 0, end: (start ?? 0) + (wait ?? 0) }));
  if (one.turns.some(({ wait }) => wait === null) || (!turns.length && one.time === null)) return null;
  const total = one.time ?? Math.max(0, ...turns.map(({ end }) => end));
  const gaps = [...turns.map(({ start }, i) => start - Math.max(0, ...turns.slice(0, i).map(({ end }) => end))), total - Math.max(0, ...turns.map(({ end }) => end))]
    .map((gap) => Math.max(0, gap));
  const outside = gaps.reduce((sum, gap) => sum + gap, 0);
  return { total, engine: Math.max(0, total - outside), outside, gaps };
}

/** The turn that a token of a sample belongs to: the first that reaches beyond it. @param {Rollout} one @param {number} sample @param {number} token */
export function turnOfToken(one, sample, token) {
  return one.turns.findIndex((turn) => turn.sample === sample && turn.prompt + turn.tokens > token);
}

/** The other attempts at a rollout: `g5-r1`, `g5-r1~1`, … @param {Rollout[]} all @param {Rollout} one */
export function attemptsOf(all, one) {
  const [base] = one.rollout.split("~");
  const number = (/** @type {Rollout} */ { rollout }) => Number(rollout.split("~")[1] ?? 0);
  return all.filter(({ rollout, group }) => group === one.group && rollout.split("~")[0] === base).sort((a, b) => number(a) - number(b));
}

/** @param {number} seconds */
const seconds = (seconds) => (seconds < 0.0005 ? "0 s" : seconds < 1 ? `${Math.round(seconds * 1000)} ms` : seconds < 100 ? `${seconds.toFixed(1)} s` : `${count(Math.round(seconds))} s`);

/** @param {[number, number][]} versions */
function versionsText(versions) {
  const own = versions.filter(([version]) => version >= 0);
  return own.length > 1 ? `versions ${own.map(([version, tokens]) => `${version} (${count(tokens)})`).join(", ")}` : own.length ? `version ${own[0][0]}` : versions.length ? "another model" : "";
}

export class Conversation {
  /** @param {any} app @param {{onTokens: (one: Rollout, turn: number) => void, onClose: () => void, onMove: (change: number) => void, onOpen: (one: Rollout) => void}} does */
  constructor(app, does) {
    this.app = app;
    this.does = does;
    this.head = element("header", { class: "record-head" });
    this.list = element("ol", { class: "talk", "aria-label": "Conversation" });
    this.side = element("aside", { class: "details talk-side", "aria-label": "Reward and times", tabindex: 0 });
    this.root = element("div", { class: "talk-view" }, this.head, element("div", { class: "talk-body" }, this.list, this.side));
    /** @type {Rollout | null} */
    this.one = null;
  }

  /** @param {Rollout} one @param {Rollout[]} all of its step @param {string} place `3 of 128` @param {number} turn */
  show(one, all, place, turn) {
    if (this.one !== one) {
      this.one = one;
      this.drawSide(one);
      refill(this.list, ...this.items(one));
    }
    this.drawHead(one, attemptsOf(all, one), place);
    this.mark(turn);
  }

  /** @param {number} turn */
  mark(turn) {
    for (const item of this.list.children) item.removeAttribute("aria-current");
    const item = this.list.querySelector(`[data-turn="${turn}"]`);
    item?.setAttribute("aria-current", "true");
    item?.scrollIntoView({ block: "nearest" });
  }

  /** @param {Rollout} one @param {Rollout[]} attempts @param {string} place */
  drawHead(one, attempts, place) {
    const { does, app } = this;
    const button = (/** @type {string} */ label, /** @type {() => void} */ onclick, /** @type {any} */ more = {}) => element("button", { type: "button", onclick, ...more }, label);
    const times = timesOf(one);
    const here = attempts.findIndex(({ rollout }) => rollout === one.rollout);
    const failed = attempts.filter(({ error }) => error).length;
    refill(this.head,
      element("div", { class: "record-title" },
        element("h2", {}, `Rollout ${one.rollout || "–"}`, element("small", {}, ` ${[place, `step ${one.step}`, one.env].filter(Boolean).join(" · ")}`)),
        element("span", { class: "record-buttons no-picture" },
          button("‹", () => does.onMove(-1), { title: "previous rollout (k)", "aria-label": "previous rollout" }), button("›", () => does.onMove(1), { title: "next rollout (j)", "aria-label": "next rollout" }),
          button("list", does.onClose, { title: "back to the list (v)" }),
          one.group ? button("its group", () => app.go({ talk: false, filter: `group = "${one.group}"`, outcome: "", search: "" }), { title: "all rollouts of this example" }) : null)),
      facts([["outcome", one.outcome.replaceAll("_", " ")], ["reward", one.reward === null ? null : fixed(one.reward, 4)], ["advantage", one.advantage === null ? null : signed(one.advantage, 4)], ["turns", one.turns.length ? count(one.turns.length) : null], ["sampled", one.tokens === null ? null : plural(one.tokens, "token")],
        ["time", times && `${seconds(times.total)}: ${seconds(times.engine)} engine, ${seconds(times.outside)} environment`], ["ended by", one.stop]]),
      one.reason || one.error ? element("p", { class: "details-rule" }, readable(one.reason || one.error)) : null,
      attempts.length > 1 ? element("p", { class: "attempts" }, element("span", { class: "muted" }, `Attempt ${here + 1} of ${attempts.length}, ${failed} failed: `),
        ...attempts.map((other, i) => button(`${i + 1}${other.error ? " failed" : ""}`, () => does.onOpen(other), { class: "link", title: other.error || other.outcome, "aria-current": i === here ? "true" : null }))) : null,
      one.isConversation || one.turns.length < 2 ? null : element("p", { class: "muted" }, "This run saved replies only: what tools and users said between them is not recorded."));
  }

  /** @param {Rollout} one */
  items(one) {
    const samples = new Set(one.turns.map(({ sample }) => sample)).size;
    const times = timesOf(one);
    const opening = one.messages.slice(0, one.turns[0]?.first ?? one.messages.length);
    return [
      opening.length ? element("li", { class: "talk-opening" }, ...opening.map((message) => this.message(message))) : null,
      ...one.turns.map((turn, i) => this.turn(one, turn, i, samples > 1, times?.gaps[i] ?? null)),
    ].filter((item) => item !== null);
  }

  /** @param {Rollout} one @param {Turn} turn @param {number} number @param {boolean} hasSamples @param {number | null} gap */
  turn(one, turn, number, hasSamples, gap) {
    const branch = branchAt(one, number);
    const added = one.messages.slice(turn.first, turn.reply);
    const summary = [
      `${count(turn.prompt)} in, ${count(turn.tokens)} out`,
      turn.wait === null ? "" : `engine ${seconds(turn.wait)}`,
      gap === null || gap < 0.0005 ? "" : `environment before ${seconds(gap)}`,
      versionsText(turn.versions), turn.stop, hasSamples && turn.sample !== null ? `sample ${turn.sample}` : "", turn.trains ? "" : "not trained",
    ].filter(Boolean).join(" · ");
    return element("li", { "data-turn": number, class: turn.trains ? null : "untrained" },
      branch ? this.branch(one, branch, added) : null,
      ...added.map((message, i) => this.message(message, branch ? one.messages[branch.left[i]] : undefined)),
      element("div", { class: "talk-turn" }, element("b", {}, `turn ${number + 1}`), element("span", {}, summary),
        element("button", { type: "button", class: "link", title: "this turn in the record view, from its first token on", "aria-label": `tokens of turn ${number + 1}`, onclick: () => this.does.onTokens(one, number) }, "tokens")),
      this.message(one.messages[turn.reply]));
  }

  /** @param {Rollout} one @param {{title: string, text: string, left: number[]}} branch @param {Message[]} added */
  branch(one, { title, text, left }, added) {
    const gone = left.map((place, i) => [one.messages[place], added[i]]).filter(([before, after]) => !after || after.role !== before.role);
    return element("div", { class: "talk-branch" }, element("b", {}, title), element("span", {}, text),
      gone.length ? element("details", {}, element("summary", {}, `${plural(gone.length, "message")} left out`), ...gone.map(([message]) => this.message(message, undefined, "gone"))) : null);
  }

  /** @param {Message} message @param {Message} [before] what it replaces, if that is of the same role @param {string} [kind] */
  message(message, before, kind = "") {
    const calls = message.calls ?? [];
    const whole = calls.length ? withoutCalls(message.text).trim() : message.text;
    const thought = message.role === "assistant" ? THOUGHT.exec(whole) : null;
    const text = thought ? whole.slice(thought[0].length).trim() : whole;
    const isCompared = before && before.role === message.role && !calls.length;
    return element("div", { class: `talk-message talk-${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other"} ${kind}` },
      element("div", { class: "talk-role" }, element("b", { class: `role role-${message.role}` }, readable(message.role) || "–"), message.name ? element("small", {}, readable(message.name)) : null),
      element("div", { class: "talk-text" },
        thought && thought[1].trim() ? element("details", { class: "thought" }, element("summary", {}, `thinking, ${plural(thought[1].trim().length, "character")}`), element("pre", {}, readable(thought[1].trim()))) : null,
        isCompared ? element("pre", { class: "diff" }, ...markChanges(before.text, text)) : text || !calls.length ? foldable(message.role === "tool" ? pretty(text) : text) : null,
        ...calls.map(([name, args]) => element("div", { class: "talk-call" }, element("code", {}, readable(name) || "–"), foldable(pretty(args))))));
  }

  /** @param {Rollout} one */
  drawSide(one) {
    const parts = Object.entries(one.weights);
    const others = Object.entries(one.metrics).filter(([name]) => !(name in one.weights));
    const sum = parts.reduce((total, [name, weight]) => total + weight * (one.metrics[name] ?? NaN), 0);
    const isWhole = one.reward !== null && Math.abs(sum - one.reward) <= 1e-6 * Math.max(1, Math.abs(one.reward));
    const cells = (/** @type {string[]} */ texts, /** @type {string} */ tag = "td") => texts.map((text, i) => element(i ? tag : "th", i ? {} : { scope: tag === "th" ? "col" : "row" }, text));
    const times = timesOf(one);
    refill(this.side,
      parts.length ? element("section", {}, element("h3", {}, "Reward"), element("table", { class: "plain-table" },
        element("thead", {}, element("tr", {}, ...cells(["part", "value", "weight", "adds"], "th"))),
        element("tbody", {}, ...parts.map(([name, weight]) => element("tr", {}, ...cells([readable(name), short(one.metrics[name]), `× ${short(weight)}`, signed(weight * one.metrics[name], 3)]))),
          element("tr", { class: "talk-sum" }, ...cells(["reward", "", "", fixed(one.reward, 3)])))),
      isWhole || one.reward === null ? null : element("p", { class: "details-rule" }, `The parts add up to ${fixed(sum, 4)}, not to the reward.`)) : null,
      others.length ? element("section", {}, element("h3", {}, "Metrics"), element("dl", {}, ...others.flatMap(([name, value]) => [element("dt", {}, readable(name)), element("dd", {}, short(value))]))) : null,
      times ? element("section", {}, element("h3", {}, "Time"), this.timeLine(one, times), element("dl", {}, ...[["waiting for the engine", times.engine], ["tools and environment", times.outside - (times.gaps.at(-1) ?? 0)], ["after the last turn", times.gaps.at(-1) ?? 0]]
        .flatMap(([name, value]) => [element("dt", {}, String(name)), element("dd", {}, seconds(Number(value)))]))) : null,
      element("p", { class: "ids" }, ...[["rollout", one.rollout], ["group", one.group], ["example", one.example]].map(([name, text]) => element("span", {}, `${name} `, element("code", {}, readable(text) || "–")))));
  }

  /** When the engine was at work, turn by turn. @param {Rollout} one @param {{total: number}} times */
  timeLine(one, { total }) {
    const bars = one.turns.map((turn, i) => {
      const bar = element("button", { type: "button", title: `turn ${i + 1}: ${seconds(turn.wait ?? 0)} from ${seconds(turn.start ?? 0)} on`, "aria-label": `turn ${i + 1}, ${seconds(turn.wait ?? 0)}`, onclick: () => this.app.go({ turn: i }) });
      bar.style.left = `${(100 * (turn.start ?? 0)) / (total || 1)}%`;
      bar.style.width = `max(3px, ${(100 * (turn.wait ?? 0)) / (total || 1)}%)`;
      return bar;
    });
    return element("div", { class: "talk-time" }, ...bars);
  }
}

/** A reply without the calls that are shown beside it, as Qwen, Hermes and others write them. @param {string} text */
function withoutCalls(text) {
  const [first, ...others] = text.split("<tool_call>");
  return first + others.map((part) => { const [call, ...rest] = part.split("</tool_call>"); return rest.length ? rest.join("</tool_call>") : `<tool_call>${call}`; }).join("");
}

/** JSON as people read it: what fits into a line stays on it. Other text stays as it is. @param {string} text */
export function pretty(text) {
  if (!/^\s*[[{]/.test(text)) return text;
  try {
    return written(JSON.parse(text), "");
  } catch { return text; }
}

/** @param {any} value @param {string} indent @returns {string} */
function written(value, indent) {
  if (typeof value !== "object" || value === null) return JSON.stringify(value);
  const inner = `${indent}  `;
  const parts = Array.isArray(value) ? value.map((each) => written(each, inner)) : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${written(each, inner)}`);
  const [opening, closing] = Array.isArray(value) ? "[]" : "{}";
  const line = opening + parts.join(", ") + closing;
  return indent.length + line.length <= LINE && !line.includes("\n") ? line : `${opening}\n${parts.map((part) => inner + part).join(",\n")}\n${indent}${closing}`;
}

/** A text whose end is folded away if it is long. @param {string} text */
function foldable(text) {
  const lines = text.split("\n", FOLD_LINES + 1);
  const end = Math.min(FOLD, lines.length > FOLD_LINES ? lines.slice(0, FOLD_LINES).join("\n").length : FOLD);
  const pre = element("pre", {}, readable(text.slice(0, end)));
  if (text.length <= end + 80) { pre.textContent = readable(text); return pre; }
  const button = element("button", { type: "button", class: "link", "aria-expanded": "false", onclick: () => {
    const opens = button.getAttribute("aria-expanded") === "false";
    button.setAttribute("aria-expanded", String(opens));
    button.textContent = opens ? "less" : more;
    pre.textContent = readable(opens ? text : text.slice(0, end));
  } });
  const more = `${count(text.length - end)} more characters`;
  button.textContent = more;
  return element("div", {}, pre, button);
}
