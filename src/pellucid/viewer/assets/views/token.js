// One token: every field, the derived ones with their formula, why it did or did not train, and what was
// recorded against what the formulas give.

import { AGAINST_INFERENCE } from "../data/metrics.js";
import { DERIVED, agrees } from "../data/derive.js";
import { reasonOf } from "../data/reason.js";
import { element } from "../draw/dom.js";
import { precise } from "../draw/format.js";

const FIELDS = /** @type {[string, string, string][]} */ ([
  ["trainer logprob", "trainer_logprobs", "log π"],
  ["inference logprob", "inference_logprobs", "log μ"],
  ["teacher logprob", "teacher_logprobs", "log teacher"],
  ["log ratio", "log_importance_ratio", "ℓ = log π − log μ"],
  ["ratio", "importance_ratio", "r = exp ℓ"],
  ["mismatch KL", "mismatch_kl", "r − ℓ − 1"],
  ["prob. delta", "prob_delta", "Δ = π − μ"],
  ["entropy", "entropy", "−Σ p log p"],
  ["advantage", "advantages", "A"],
  ["reward", "rewards", "R"],
  ["token loss", "token_loss", "L"],
  ["temperature", "temperatures", "τ"],
  ["policy version", "policy_versions", "v"],
]);

/** @param {import("../data/run.js").Run} run @param {import("../data/run.js").TokenRecord} record @param {number} token */
export function tokenDetails(run, record, token) {
  const ids = record.column("token_ids") ?? [];
  const { state, badge, why, rule } = reasonOf(record, token, run.lossAt(record.step), run.isSkipped(record.step));
  const id = ids[token];
  const warnings = disagreements(record, token);
  return element("div", { class: "details-body" },
    element("p", { class: "details-token" }, element("span", { class: "token-sample" }, run.vocabulary.show(ids, token)),
      element("span", { class: "details-place" }, `token ${token} of ${record.length}`)),
    element("p", { class: "details-state" }, element("span", { class: `badge badge-${badge}` }, state),
      element("span", { class: "details-role" }, roleOf(record, token))),
    element("p", { class: "details-why" }, why),
    rule ? element("p", { class: "details-rule" }, rule) : null,
    ...warnings.map((warning) => element("p", { class: "details-warning", role: "note" }, warning)),
    element("dl", {}, ...[
      row("id", String(id)),
      row("text", textOf(run, id)),
      row("position", String(record.value("position_ids", token) ?? token)),
      ...FIELDS.map(([label, name, formula]) => field(record, token, label, name, formula)),
    ].flat().filter(Boolean)));
}

/** The token in a sentence, for those who hear the page. @param {import("../data/run.js").Run} run
 * @param {import("../data/run.js").TokenRecord} record @param {number} token @param {import("../data/metrics.js").Metric} metric @param {number | null} value */
export function spokenToken(run, record, token, metric, value) {
  const text = run.vocabulary.show(record.column("token_ids") ?? [], token);
  const { state } = reasonOf(record, token, run.lossAt(record.step), run.isSkipped(record.step));
  const measured = value === null || Number.isNaN(value) ? "" : `, ${metric.label} ${precise(value)}`;
  return `Token ${token} of ${record.length}: ${text}, ${state}${measured}`;
}

/** @param {import("../data/run.js").TokenRecord} record @param {number} token */
function roleOf(record, token) {
  const [role] = record.segments.find(([, start, end]) => token >= start && token < end) ?? [""];
  return role;
}

/** @param {import("../data/run.js").Run} run @param {number} id */
function textOf(run, id) {
  const text = run.vocabulary.texts.get(id);
  if (typeof text === "string") return text === `#${id}` ? "not decoded" : JSON.stringify(text);
  return text ? `bytes ${text.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")}` : "not decoded";
}

/** @param {import("../data/run.js").TokenRecord} record @param {number} token @param {string} label @param {string} name @param {string} formula */
function field(record, token, label, name, formula) {
  const value = record.value(name, token);
  if (value === undefined) return name === "teacher_logprobs" || name === "temperatures" ? [] : row(label, "not recorded", formula, "absent");
  if (AGAINST_INFERENCE.has(name) && record.value("sampled", token) === 0) return row(label, "not sampled", formula, "absent");
  if (value === null) return name === "teacher_logprobs" ? [] : row(label, "none", formula, "absent");
  return row(label, precise(value), formula);
}

/** @param {string} label @param {string} value @param {string} [formula] @param {string} [kind] */
function row(label, value, formula = "", kind = "") {
  return [element("dt", {}, label, formula ? element("small", {}, formula) : null), element("dd", { class: kind }, value)];
}

/** @param {import("../data/run.js").TokenRecord} record @param {number} token @returns {string[]} */
export function disagreements(record, token) {
  const [trainer, inference] = [record.value("trainer_logprobs", token), record.value("inference_logprobs", token)];
  const found = [];
  for (const [name, { formula, of }] of Object.entries(DERIVED)) {
    if (!record.chunk.differs(name)) continue;
    const recorded = record.value(name, token);
    if (typeof trainer !== "number" || typeof inference !== "number" || typeof recorded !== "number") continue;
    const expected = of(trainer, inference);
    if (!agrees(recorded, expected)) found.push(`${name} was recorded as ${precise(recorded)}, but ${formula} gives ${precise(expected)}.`);
  }
  const [masked, high, low] = ["is_masked", "is_masked_high", "is_masked_low"].map((name) => record.value(name, token));
  if (masked === 0 && (high || low)) found.push("Recorded as masked on one side, and as not masked.");
  const loss = record.value("token_loss", token) ?? 0;
  if (record.value("loss_mask", token) === 0 && Math.abs(loss) > 1e-12) {
    found.push(`Not trainable, but its loss was recorded as ${precise(loss)}.`);
  }
  return found;
}
