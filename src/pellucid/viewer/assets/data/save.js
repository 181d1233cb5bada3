// Taking tokens out of the page: JSON, CSV, Parquet.

import { FIELDS, RECORD_FIELDS, fieldOf } from "./metrics.js";

/** @typedef {import("./run.js").TokenRecord} TokenRecord @typedef {import("./run.js").StepTokens} StepTokens
 * @typedef {import("./texts.js").Vocabulary} Vocabulary
 * @typedef {{name: string, values: (string | number | null)[]}} SavedColumn */

/** @param {TokenRecord | StepTokens} tokens */
const present = (tokens) => FIELDS.map(({ name }) => name).filter((name) => tokens.column(name) !== undefined);

/** A line of an export. @param {TokenRecord} record */
export function recordAsJson(record) {
  const fields = Object.entries(RECORD_FIELDS).map(([key, name]) => [name, record.field(key)]).filter(([, value]) => value !== null);
  const columns = present(record).map((name) => [name, Array.from({ length: record.length }, (_, i) => {
    const value = record.value(name, i);
    return fieldOf(name).is_flag && value !== null ? Boolean(value) : value;
  })]);
  return JSON.stringify(Object.fromEntries([["step", record.step], ...fields, ["role_spans", record.segments], ...columns]));
}

/** Some tokens of a record or a step, with their texts. @param {TokenRecord | StepTokens} from @param {number[]} tokens @param {Vocabulary} vocabulary
 * @param {Record<string, (token: number) => string | number>} [where] columns that say where they are @returns {SavedColumn[]} */
function tokenColumns(from, tokens, vocabulary, where = {}) {
  const { ids } = from;
  return [...Object.entries(where).map(([name, read]) => ({ name, values: tokens.map(read) })),
    { name: "text", values: tokens.map((i) => vocabulary.plain(ids[i])) },
    ...present(from).map((name) => {
      const column = from.column(name);
      return { name, values: tokens.map((i) => (!column || Number.isNaN(column[i]) ? null : column[i])) };
    })];
}

/** @param {TokenRecord} record */
const placeIn = ({ step, record }) => ({ step: () => step, record: () => record, token: (/** @type {number} */ i) => i });

/** @param {TokenRecord} record */
const allTokens = ({ length }) => Array.from({ length }, (_, i) => i);

/** The tokens of a record. @param {TokenRecord} record @param {Vocabulary} vocabulary */
export const recordColumns = (record, vocabulary) => tokenColumns(record, allTokens(record), vocabulary);

/** The tokens of several records. @param {TokenRecord[]} records @param {Vocabulary} vocabulary */
export const recordsColumns = (records, vocabulary) => joined(records.map((record) => tokenColumns(record, allTokens(record), vocabulary, placeIn(record))));

/** One token. @param {TokenRecord} record @param {number} token @param {Vocabulary} vocabulary */
export const tokenRow = (record, token, vocabulary) => tokenColumns(record, [token], vocabulary, { ...placeIn(record), env_name: () => record.field("env") ?? "" });

/** Some tokens of a step. @param {StepTokens} all @param {number[]} tokens @param {Vocabulary} vocabulary */
export const selectionColumns = (all, tokens, vocabulary) => tokenColumns(all, tokens, vocabulary, { step: () => all.step, record: (i) => all.owners[i],
  token: (i) => all.position(i), env_name: (i) => all.index.value("env", all.owners[i]) ?? "" });

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

/** @param {string} name without its ending @param {"csv" | "parquet"} kind @param {SavedColumn[]} columns */
export function saveColumns(name, kind, columns) {
  if (kind === "csv") saveFile(`${name}.csv`, "text/csv", asCsv(columns));
  else saveFile(`${name}.parquet`, "application/vnd.apache.parquet", ...parquet(columns));
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

/** @param {string} name @param {string} type @param {...BlobPart} parts */
export function saveFile(name, type, ...parts) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(parts, { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// The smallest Parquet file that every reader takes: one row group, plain encoding, no compression. Texts are UTF-8
// byte arrays, numbers are doubles; null is what a definition level of 0 says.

const MAGIC = Uint8Array.of(0x50, 0x41, 0x52, 0x31); // PAR1
const [DOUBLE, BYTE_ARRAY, OPTIONAL, UTF8, PLAIN, RLE] = [5, 6, 1, 0, 0, 3];

/** @param {SavedColumn[]} columns @returns {Uint8Array<ArrayBuffer>[]} the parts of the file */
function parquet(columns) {
  const rows = columns[0]?.values.length ?? 0;
  const parts = [MAGIC];
  let end = MAGIC.length;
  const chunks = columns.map(({ name, values }) => {
    const isText = values.some((value) => typeof value === "string");
    const page = pageOf(values, isText);
    const length = i32(page.reduce((sum, part) => sum + part.length, 0));
    const encodings = struct({ 1: i32(rows), 2: i32(PLAIN), 3: i32(RLE), 4: i32(RLE) });
    const start = end;
    for (const part of [Uint8Array.from(struct({ 1: i32(0), 2: length, 3: length, 5: encodings }).bytes), ...page]) { parts.push(part); end += part.length; }
    return { name, type: isText ? BYTE_ARRAY : DOUBLE, start, size: end - start };
  });
  const schema = chunks.map(({ name, type }) => struct({ 1: i32(type), 3: i32(OPTIONAL), 4: string(name), 6: type === BYTE_ARRAY ? i32(UTF8) : null }));
  const metas = chunks.map(({ name, type, start, size }) => struct({ 2: i64(start), 3: struct({ 1: i32(type), 2: list([i32(PLAIN), i32(RLE)]), 3: list([string(name)]),
    4: i32(0), 5: i64(rows), 6: i64(size), 7: i64(size), 9: i64(start) }) }));
  const group = struct({ 1: list(metas), 2: i64(end - MAGIC.length), 3: i64(rows) });
  const footer = Uint8Array.from(struct({ 1: i32(1), 2: list([struct({ 4: string("tokens"), 5: i32(chunks.length) }), ...schema]), 3: i64(rows), 4: list([group]), 6: string("pellucid") }).bytes);
  return [...parts, footer, u32(footer.length), MAGIC];
}

/** Definition levels as one bit-packed run, then the values that are there. @param {(string | number | null)[]} values @param {boolean} isText */
function pageOf(values, isText) {
  const levels = new Uint8Array(Math.ceil(values.length / 8));
  values.forEach((value, i) => { if (value !== null) levels[i >> 3] |= 1 << (i & 7); });
  const run = Uint8Array.from(varint((levels.length << 1) | 1));
  const known = values.filter((value) => value !== null);
  const data = isText ? known.map((value) => new TextEncoder().encode(String(value))).flatMap((text) => [u32(text.length), text])
    : [new Uint8Array(Float64Array.from(known, Number).buffer)];
  return [u32(run.length + levels.length), run, levels, ...data];
}

/** @param {number} value */
const u32 = (value) => new Uint8Array(Uint32Array.of(value).buffer);

// Thrift's compact protocol, as far as a footer needs it: values with their type and bytes.

/** @typedef {{type: number, bytes: number[]}} Thrift */

/** @param {number} value @returns {number[]} */
const varint = (value) => (value > 127 ? [(value % 128) | 128, ...varint(Math.floor(value / 128))] : [value]);

/** @param {number} value @returns {Thrift} */
const i32 = (value) => ({ type: 5, bytes: varint(value * 2) });

/** @param {number} value @returns {Thrift} */
const i64 = (value) => ({ type: 6, bytes: varint(value * 2) });

/** @param {string} value @returns {Thrift} */
function string(value) {
  const text = new TextEncoder().encode(value);
  return { type: 8, bytes: [...varint(text.length), ...text] };
}

/** @param {Thrift[]} items @returns {Thrift} */
function list(items) {
  const { length } = items;
  const type = items[0]?.type ?? 12;
  return { type: 9, bytes: [...(length < 15 ? [(length << 4) | type] : [0xf0 | type, ...varint(length)]), ...items.flatMap(({ bytes }) => bytes)] };
}

/** @param {Record<number, Thrift | null>} fields by id @returns {Thrift} */
function struct(fields) {
  const bytes = [];
  let last = 0;
  for (const [id, value] of Object.entries(fields)) {
    if (!value) continue;
    bytes.push(((Number(id) - last) << 4) | value.type, ...value.bytes);
    last = Number(id);
  }
  return { type: 12, bytes: [...bytes, 0] };
}
