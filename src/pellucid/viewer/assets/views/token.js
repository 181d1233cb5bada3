// One token: every field, the derived ones with their formula, why it did or did not train, and what was
// recorded against what the formulas give.

import { FIELDS, METRICS, fieldOf, valuesOf } from "../data/metrics.js";
import { DERIVED, agrees } from "../data/run.js";
import { element, painted } from "../draw/dom.js";
import { precise, short, signed } from "../draw/format.js";
import { VirtualTable } from "../draw/table.js";

/** @typedef {import("../data/run.js").Run} Run @typedef {import("../data/run.js").TokenRecord} TokenRecord */

/** @param {Run} run @param {TokenRecord} record @param {number} token */
export function tokenDetails(run, record, token) {
  const { ids } = record;
  const { state, badge, why, rule } = explained(run, record, token);
  const id = ids[token];
  const [role] = record.segments.find(([, start, end]) => token >= start && token < end) ?? [""];
  return element("div", { class: "details-body" },
    element("p", { class: "details-token" }, element("span", { class: "token-sample" }, run.vocabulary.show(ids, token)),
      element("span", { class: "details-place" }, `token ${token} of ${record.length}`)),
    element("p", { class: "details-state" }, element("span", { class: `badge badge-${badge}` }, state),
      element("span", { class: "details-role" }, role)),
    element("p", { class: "details-why" }, why),
    rule ? element("p", { class: "details-rule" }, rule) : null,
    ...disagreements(record, token).map((warning) => element("p", { class: "details-warning", role: "note" }, warning)),
    element("dl", {}, ...[
      row("id", String(id)),
      row("text", textOf(run, id)),
      row("position", String(record.value("position_ids", token) ?? token)),
      ...FIELDS.filter(({ label }) => label).map((field) => fact(record, token, field)),
    ].flat().filter(Boolean)));
}

/** The token in a sentence, for those who hear the page. @param {Run} run @param {TokenRecord} record @param {number} token
 * @param {import("../data/metrics.js").Metric} metric @param {number | null} value */
export function spokenToken(run, record, token, metric, value) {
  const text = run.vocabulary.show(record.ids, token);
  const { state } = explained(run, record, token);
  const measured = value === null || Number.isNaN(value) ? "" : `, ${metric.label} ${precise(value)}`;
  return `Token ${token} of ${record.length}: ${text}, ${state}${measured}`;
}

/** @param {Run} run @param {number} id */
function textOf(run, id) {
  const text = run.vocabulary.texts.get(id);
  if (typeof text === "string") return text === `#${id}` ? "not decoded" : JSON.stringify(text);
  return text ? `bytes ${text.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")}` : "not decoded";
}

/** What was not sampled has no logprob of the engine, and so no ratio and no KL. @param {TokenRecord} record @param {number} token */
const isSampled = (record, token) => (record.value("sampled", token) ?? record.value("loss_mask", token)) !== 0;

/** What a logprob is the log of. @type {Record<string, string>} */
const PROBABILITIES = { trainer_logprobs: "π\u00a0=", inference_logprobs: "μ\u00a0=" };

/** @param {TokenRecord} record @param {number} token @param {import("../data/metrics.js").Field} field */
function fact(record, token, { label, name, formula, optional, needs_sampled: needsSampled }) {
  const value = record.value(name, token);
  if (optional && (value === undefined || value === null)) return [];
  if (value === undefined) return row(label, "not recorded", formula, "absent");
  if (needsSampled && !isSampled(record, token)) return row(label, "not sampled", formula, "absent");
  if (typeof value === "number" && name in PROBABILITIES) return row(label, `${precise(value)} ·\u00a0${PROBABILITIES[name]}\u00a0${short(Math.exp(value), 4)}`, formula);
  return value === null ? row(label, "none", formula, "absent") : row(label, precise(value), formula);
}

/** @param {string} label @param {string} value @param {string} [formula] @param {string} [kind] */
function row(label, value, formula = "", kind = "") {
  return [element("dt", {}, label, formula ? element("small", {}, formula) : null), element("dd", { class: kind }, value)];
}

/** @param {TokenRecord} record @param {number} token @returns {string[]} */
export function disagreements(record, token) {
  const [trainer, inference] = [record.value("trainer_logprobs", token), record.value("inference_logprobs", token)];
  const found = [];
  for (const [name, of] of Object.entries(DERIVED)) {
    if (!record.chunk.differs(name)) continue;
    const recorded = record.value(name, token);
    if (typeof trainer !== "number" || typeof inference !== "number" || typeof recorded !== "number") continue;
    const expected = of(trainer, inference);
    if (!agrees(recorded, expected)) found.push(`${name} was recorded as ${precise(recorded)}, but ${fieldOf(name).formula} gives ${precise(expected)}.`);
  }
  const [masked, high, low] = ["is_masked", "is_masked_high", "is_masked_low"].map((name) => record.value(name, token));
  if (masked === 0 && (high || low)) found.push("Recorded as masked on one side, and as not masked.");
  const loss = record.value("token_loss", token) ?? 0;
  if (record.value("loss_mask", token) === 0 && Math.abs(loss) > 1e-12) {
    found.push(`Not trainable, but its loss was recorded as ${precise(loss)}.`);
  }
  return found;
}

// Why a token did or did not train: its state in the ledger, and the numbers that decided.

/** @typedef {{state: string, badge: string, why: string, rule: string | null}} Reason
 * `badge` is the ledger's name of the state; `rule` the inequality that decided, with its numbers. */

/** @param {Run} run @param {TokenRecord} record @param {number} token */
const explained = (run, record, token) => reasonOf(record, token, run.lossAt(record.step), run.isSkipped(record.step));

/** @param {TokenRecord} record @param {number} token @param {any} loss the run's `[trainer.loss]`, or null
 * @param {boolean} isSkipped whether its step moved no weights @returns {Reason} */
export function reasonOf(record, token, loss, isSkipped) {
  const read = (/** @type {string} */ name) => record.value(name, token);
  const trainable = read("loss_mask");
  if (trainable === undefined) return reason("Unknown", "unknown", "This export has no loss mask: whether the token trained is not recorded.");
  if (!trainable) return untrainable(read, token);
  if (isSkipped) return reason("Skipped", "skipped", "The loss or the gradient of its step was not finite, so that no weights moved.");
  const mode = record.field("mode") ?? "rl";
  const side = maskSide(record, token);
  const bounds = mode === "opd" ? { type: "dppo", dppo_mask_low: 0.2, dppo_mask_high: 0.2 } : loss;
  const rule = mode === "sft" ? null : ruleOf(read, side, bounds);
  if (side) return masked(side, read("advantages") ?? null, rule);
  if (mode === "sft") return reason("Trained", "trained", "A supervised target: its loss is −log π.");
  if (mode === "opd") return reason("Trained", "trained", "Distilled: the teacher's logprob minus the trainer's is its advantage.", rule);
  if (read("is_masked") === undefined) return reason("Trainable", "unknown", "In the loss mask; whether the trust region kept it is not recorded.", rule);
  const advantage = read("advantages") ?? null;
  if (advantage === null) return reason("Trained", "trained", "Inside the trust region; its advantage is not recorded.", rule);
  if (advantage === 0) return reason("Trained", "trained", "Its advantage is 0: only a KL term, if the loss has one, moves it.", rule);
  const push = advantage > 0 ? "up" : "down";
  return reason("Trained", "trained", `Its advantage ${signed(advantage, 3)} pushes its probability ${push}.`, rule);
}

/** @param {TokenRecord} record @param {number} token @returns {"high" | "low" | "neither" | null} */
export function maskSide(record, token) {
  if (record.value("is_masked", token) !== 1) return null;
  if (record.value("is_masked_high", token)) return "high";
  return record.value("is_masked_low", token) ? "low" : "neither";
}

/** @param {string} state @param {string} badge @param {string} why @param {string | null} [rule] @returns {Reason} */
const reason = (state, badge, why, rule = null) => ({ state, badge, why, rule });

/** @param {(name: string) => any} read @param {number} token */
function untrainable(read, token) {
  const sampled = read("sampled");
  if (sampled) return reason("Not trainable", "untrainable", "Sampled, but masked out by the environment or trained in another branch.");
  if (token === 0) return reason("Context", "context", "The first token of a sequence has no prediction, so there is nothing to train.");
  if (sampled === 0) return reason("Context", "context", "Prompt or tool output: the policy did not sample it.");
  return reason("Not trainable", "untrainable", "Outside the loss mask: prompt, tool output, or masked out by the environment.");
}

/** @param {"high" | "low" | "neither"} side @param {number | null} advantage @param {string | null} rule */
function masked(side, advantage, rule) {
  const pull = advantage === null ? "Its advantage" : `Its advantage ${signed(advantage, 3)}`;
  const rest = "Left out of the policy gradient; only a KL term, if the loss has one, still moves it.";
  const [state, because] = {
    high: ["Masked high", `${pull} would raise a probability that is already too far above the one sampled from.`],
    low: ["Masked low", `${pull} would lower a probability that is already too far below the one sampled from.`],
    neither: ["Masked", "Out of the trust region."],
  }[side];
  return reason(state, "masked", `${because} ${rest}`, rule);
}

/** The comparison that the trust region of the run's loss makes for this token.
 * @param {(name: string) => any} read @param {"high" | "low" | "neither" | null} side @param {any} loss */
function ruleOf(read, side, loss) {
  const [advantage, delta, ratio] = [read("advantages"), read("prob_delta"), read("importance_ratio")];
  if (!loss || typeof advantage !== "number") return null;
  const isOut = side !== null;
  const [above, below] = isOut ? [">", "<"] : ["≤", "≥"];
  if (loss.type === "dppo" && typeof delta === "number") {
    return advantage > 0
      ? `A > 0 and Δ = ${signed(delta, 4)} ${above} dppo_mask_high = ${short(loss.dppo_mask_high)}`
      : `A ≤ 0 and Δ = ${signed(delta, 4)} ${below} −dppo_mask_low = −${short(loss.dppo_mask_low)}`;
  }
  if (typeof ratio !== "number") return null;
  if (loss.type === "icepop") {
    if (!isOut) return `min_ratio = ${short(loss.min_ratio)} ≤ r = ${short(ratio, 4)} ≤ max_ratio = ${short(loss.max_ratio)}`;
    return ratio > loss.max_ratio ? `r = ${short(ratio, 4)} > max_ratio = ${short(loss.max_ratio)}` : `r = ${short(ratio, 4)} < min_ratio = ${short(loss.min_ratio)}`;
  }
  if (loss.type === "ppo_clip") {
    if (advantage === 0) return "A = 0: nothing to clip";
    return advantage > 0
      ? `A > 0 and r = ${short(ratio, 4)} ${above} 1 + clip_high = ${short(1 + loss.clip_high)}`
      : `A < 0 and r = ${short(ratio, 4)} ${below} 1 − clip_low = ${short(1 - loss.clip_low)}`;
  }
  return null;
}

// The tokens of a record as rows: what the coloured text shows, for those who would rather read numbers.

const OF_RECORD = new Set(["adv", "reward", "stale"]); // told by the record's head, unless its tokens differ

export class TokenTable {
  /** @type {TokenRecord} */
  record;

  /** @type {(ArrayLike<number> | null)[]} by metric */
  values = [];

  /** @param {any} app @param {HTMLElement} root */
  constructor(app, root) {
    this.app = app;
    this.table = new VirtualTable({
      label: "Tokens",
      rowHeight: 26,
      onChoose: (token) => app.go({ token }),
      columns: [
        { key: "at", label: "at", width: "56px", cell: (row) => String(row) },
        { key: "text", label: "token", width: "auto", text: true, cell: (row) => this.text(row) },
        { key: "state", label: "state", width: "110px", text: true, cell: (row) => explained(app.run, this.record, row).state },
        ...METRICS.map((metric, i) => ({
          key: metric.key, label: metric.label, width: `${Math.max(84, 26 + 7 * metric.label.length)}px`, title: metric.about,
          cell: (/** @type {number} */ row) => (fieldOf(metric.column).needs_sampled && !isSampled(this.record, row) ? "" : short(this.values[i]?.[row])),
        })),
      ],
    });
    root.append(this.table.root);
  }

  /** @param {TokenRecord} record @param {any} look @param {number} token */
  show(record, look, token) {
    this.record = record;
    this.look = look;
    this.ids = record.ids;
    this.values = METRICS.map((metric) => valuesOf(record, metric));
    this.table.chosen = token;
    const isKept = (/** @type {string} */ key, /** @type {ArrayLike<number> | null} */ values) => values && !(OF_RECORD.has(key) && isConstant(values));
    this.table.hide(new Set(METRICS.filter(({ key }, i) => !isKept(key, this.values[i])).map(({ key }) => key)));
    this.table.show(Array.from({ length: record.length }, (_, i) => i));
  }

  /** @param {number} row */
  text(row) {
    return painted(element("span", { class: `token ${this.look.classes(row)}` }, this.app.run.vocabulary.show(this.ids, row)), this.look.colour(row));
  }

  /** @param {number} token */
  reveal(token) { this.table.choose(token); }
}

/** Whether all values are the same; those that are not known do not count. @param {ArrayLike<number>} values */
function isConstant(values) {
  const known = Array.from(values).filter((value) => !Number.isNaN(value));
  return known.every((value) => value === known[0]);
}
