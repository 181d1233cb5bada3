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

/** @typedef {{name: string, values: (string | number | null)[]}} SavedColumn */

/** The tokens of a record, with their texts. @param {TokenRecord} record @param {Vocabulary} vocabulary @returns {SavedColumn[]} */
export function recordColumns(record, vocabulary) {
  const ids = record.column("token_ids") ?? [];
  const each = (/** @type {(i: number) => any} */ read) => Array.from({ length: record.length }, (_, i) => read(i));
  return [{ name: "text", values: each((i) => vocabulary.plain(ids[i])) },
    ...present(record).map((name) => ({ name, values: each((i) => record.value(name, i) ?? null) }))];
}

/** The tokens of several records, with where they are. @param {TokenRecord[]} records @param {Vocabulary} vocabulary @returns {SavedColumn[]} */
export function recordsColumns(records, vocabulary) {
  const parts = records.map((record) => {
    const each = (/** @type {(i: number) => any} */ read) => Array.from({ length: record.length }, (_, i) => read(i));
    return [{ name: "step", values: each(() => record.step) }, { name: "record", values: each(() => record.record) }, { name: "token", values: each((i) => i) }, ...recordColumns(record, vocabulary)];
  });
  return joined(parts);
}

/** One token, with where it is. @param {TokenRecord} record @param {number} token @param {Vocabulary} vocabulary @returns {SavedColumn[]} */
export function tokenRow(record, token, vocabulary) {
  const ids = record.column("token_ids") ?? [];
  const named = Object.entries({ step: record.step, record: record.record, token, env_name: record.field("env") ?? "", text: vocabulary.plain(ids[token]) });
  return [...named, ...present(record).map((name) => [name, record.value(name, token) ?? null])].map(([name, value]) => ({ name: String(name), values: [/** @type {any} */ (value)] }));
}

/** Tables under each other; what one of them lacks is null. @param {SavedColumn[][]} parts @returns {SavedColumn[]} */
export function joined(parts) {
  const names = [...new Set(parts.flatMap((part) => part.map(({ name }) => name)))];
  return names.map((name) => ({ name, values: parts.flatMap((part) => part.find((one) => one.name === name)?.values ?? part[0].values.map(() => null)) }));
}

/** The tokens that are 1. @param {Uint8Array} chosen */
export function chosenTokens(chosen) {
  /** @type {number[]} */
  const tokens = [];
  for (let i = 0; i < chosen.length; i += 1) if (chosen[i]) tokens.push(i);
  return tokens;
}

/** Some tokens of a step, with where they are. @param {import("./run.js").StepTokens} all @param {number[]} tokens @param {Vocabulary} vocabulary
 * @returns {SavedColumn[]} */
export function selectionColumns(all, tokens, vocabulary) {
  const ids = all.column("token_ids") ?? [];
  const names = COLUMNS.filter((name) => all.column(name) !== undefined);
  return [{ name: "step", values: tokens.map(() => all.step) }, { name: "record", values: tokens.map((i) => all.owners[i]) },
    { name: "token", values: tokens.map((i) => all.position(i)) }, { name: "env_name", values: tokens.map((i) => all.index.value("env", all.owners[i]) ?? "") },
    { name: "text", values: tokens.map((i) => vocabulary.plain(ids[i])) },
    ...names.map((name) => {
      const column = all.column(name);
      return { name, values: tokens.map((i) => (!column || Number.isNaN(column[i]) ? null : column[i])) };
    })];
}

/** @param {string} name without its ending @param {"csv" | "parquet"} kind @param {SavedColumn[]} columns */
export function saveColumns(name, kind, columns) {
  if (kind === "csv") saveFile(`${name}.csv`, "text/csv", asCsv(columns));
  else saveFile(`${name}.parquet`, "application/vnd.apache.parquet", parquet(columns));
}

/** @param {SavedColumn[]} columns */
function asCsv(columns) {
  const lines = [columns.map(({ name }) => name).join(",")];
  for (let i = 0; i < (columns[0]?.values.length ?? 0); i += 1) {
    lines.push(columns.map(({ values }) => (typeof values[i] === "string" ? quoted(String(values[i])) : values[i] ?? "")).join(","));
  }
  return `${lines.join("\r\n")}\r\n`;
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
