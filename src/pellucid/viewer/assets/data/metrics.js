// The schema of `pellucid.data.schema`, which is in the page: every per-token field of an export, and what tokens can be
// coloured, ordered and filtered by.

/**
 * @typedef {{key: string, scale: "log" | "sequential" | "diverging", about: string, shortcut: number | null,
 *   of: "value" | "negative" | "age", label: string, formula: string}} Shade
 * @typedef {{name: string, label: string, formula: string, key: string, is_flag: boolean, optional: boolean, needs_sampled: boolean,
 *   shade: Shade | null}} Field
 * @typedef {{key: string, label: string, name: string, formula: string, kind: "log" | "sequential" | "diverging", shortcut: number | null,
 *   column: string, of?: (value: number, step: number) => number, about: string}} Metric
 */

/** @type {{fields: Field[], words: Record<string, string>, numbers: Record<string, string>}} `words`, `numbers`: fields of a record, by the page's name. */
const SCHEMA = JSON.parse(document.getElementById("schema")?.textContent ?? "");

/** Per-token fields, in the order of an export. */
export const FIELDS = SCHEMA.fields;

/** Names of texts that a record has. */
export const WORDS = Object.keys(SCHEMA.words);

/** The page's name of a record's field -> its name in an export. */
export const RECORD_FIELDS = { ...SCHEMA.words, ...SCHEMA.numbers };

/** @param {string} name */
export const fieldOf = (name) => /** @type {Field} */ (FIELDS.find((field) => field.name === name));

const FORMS = {
  value: { of: undefined, name: "" },
  negative: { of: (/** @type {number} */ value) => -value, name: "−" },
  age: { of: (/** @type {number} */ value, /** @type {number} */ step) => (value < 0 ? NaN : step - value), name: "step − " },
};

/** @param {Field} field @returns {Metric[]} */
function metricsOf({ name, label, formula, shade }) {
  if (!shade) return [];
  const form = FORMS[shade.of];
  return [{ key: shade.key, label: shade.label || label[0].toUpperCase() + label.slice(1), name: form.name + name, formula: shade.formula || formula,
    kind: shade.scale, shortcut: shade.shortcut, column: name, of: form.of, about: shade.about }];
}

/** Those with a key 1 to 9 first, in that order. */
export const METRICS = FIELDS.flatMap(metricsOf).sort((a, b) => (a.shortcut ?? 10) - (b.shortcut ?? 10));

/** @param {string} key */
export const metricOf = (key) => METRICS.find((metric) => metric.key === key) ?? METRICS[0];

/** The metric of every token of a record or a step; null where nothing is recorded.
 * @param {{column(name: string): any, step: number}} tokens @param {Metric} metric
 * @returns {ArrayLike<number> | null} */
export function valuesOf(tokens, metric) {
  const column = tokens.column(metric.column);
  if (!column || !metric.of) return column ?? null;
  const values = new Float64Array(column.length);
  for (let i = 0; i < column.length; i += 1) values[i] = metric.of(column[i], tokens.step);
  return values;
}
