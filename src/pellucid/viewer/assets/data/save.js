// Taking tokens out of the page: JSON, CSV, Parquet.

import { parquet } from "./parquet.js";

/** Every column that a record can have, in the order of an export. */
const COLUMNS = ["token_ids", "position_ids", "loss_mask", "advantages", "rewards", "inference_logprobs", "trainer_logprobs",
  "entropy", "mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta", "is_masked", "is_masked_high",
  "is_masked_low", "token_loss", "sampled", "temperatures", "teacher_logprobs", "policy_versions"];
const FLAGS = new Set(["loss_mask", "is_masked", "is_masked_high", "is_masked_low", "sampled"]);
const FIELDS = /** @type {Record<string, string>} */ ({ env_name: "env", training_mode: "mode", example_id: "example", group_id: "group",
  rollout_id: "rollout", sample_id: "sample", run_id: "run", reward: "reward", advantage: "advantage", stop_reason: "stop",
  rank: "rank", denominator: "denominator" });

/** @typedef {import("./run.js").TokenRecord} TokenRecord @typedef {import("./texts.js").Vocabulary} Vocabulary */

/** @param {TokenRecord} record */
const present = (record) => COLUMNS.filter((name) => record.column(name) !== undefined);

/** A line of an export. @param {TokenRecord} record */
export function recordAsJson(record) {
  const fields = Object.entries(FIELDS).map(([name, key]) => [name, record.field(key)]).filter(([, value]) => value !== null);
  const columns = present(record).map((name) => [name, Array.from({ length: record.length }, (_, i) => {
    const value = record.value(name, i);
    return FLAGS.has(name) && value !== null ? Boolean(value) : value;
  })]);
  return JSON.stringify(Object.fromEntries([["step", record.step], ...fields, ["role_spans", record.segments], ...columns]));
}

/** @param {TokenRecord} record @param {Vocabulary} vocabulary */
export function tokensAsCsv(record, vocabulary) {
  const names = present(record);
  const ids = record.column("token_ids") ?? [];
  const lines = [["text", ...names].join(",")];
  for (let i = 0; i < record.length; i += 1) {
    lines.push([quoted(vocabulary.plain(ids[i])), ...names.map((name) => record.value(name, i) ?? "")].join(","));
  }
  return `${lines.join("\r\n")}\r\n`;
}

/** @param {TokenRecord} record @param {Vocabulary} vocabulary */
export function tokensAsParquet(record, vocabulary) {
  const ids = record.column("token_ids") ?? [];
  const text = Array.from({ length: record.length }, (_, i) => vocabulary.plain(ids[i]));
  return parquet([{ name: "text", values: text }, ...present(record).map((name) => ({
    name, values: Array.from({ length: record.length }, (_, i) => record.value(name, i) ?? null) }))]);
}

/** A spreadsheet takes a cell that begins so for a formula. @param {string} text */
function quoted(text) {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n']/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** @param {string} name @param {string} type @param {BlobPart} content */
export function saveFile(name, type, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
