// Numbers as people read them.

export const ABSENT = "–";

/** 1,234,567: the first use of `Intl` takes a browser longer than drawing a page. @param {number} value */
const grouped = (value) => String(Math.round(value * 1000) / 1000).replace(/\d(?=(\d{3})+(\.|$))/g, "$&,");

/** @param {number | null | undefined} value */
const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);

/** @param {number | null | undefined} value */
export const count = (value) => (isKnown(value) ? grouped(/** @type {number} */ (value)) : ABSENT);

/** Three significant digits. @param {number | null | undefined} value @param {number} [digits] */
export function short(value, digits = 3) {
  if (!isKnown(value)) return ABSENT;
  const number = /** @type {number} */ (value);
  if (number === 0) return "0";
  if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  const rounded = Number(number.toPrecision(digits));
  const text = size >= 1e5 || size < 1e-3
    ? number.toExponential(Math.max(0, digits - 2)).replace("e+", "e").replace(/e-/, "e−")
    : Math.abs(rounded) >= 1e4 ? grouped(rounded) : String(rounded);
  return text.replace(/^-/, "−");
}

/** Seven significant digits: what a float32 holds. @param {number} value */
export const precise = (value) => (Number.isInteger(value) ? grouped(value) : short(value, 7));

/** @param {number | null | undefined} value @param {number} digits */
export const fixed = (value, digits) => (isKnown(value) ? /** @type {number} */ (value).toFixed(digits).replace(/^-(?=[0.]*$)/, "").replace("-", "−") : ABSENT);

/** @param {number | null | undefined} value @param {number} digits */
export function signed(value, digits) {
  const text = fixed(value, digits);
  return isKnown(value) && /** @type {number} */ (value) > 0 ? `+${text}` : text;
}

/** @param {number | null | undefined} share */
export function percent(share) {
  if (!isKnown(share)) return ABSENT;
  const value = /** @type {number} */ (share) * 100;
  return `${value === 0 || value >= 10 ? value.toFixed(value >= 99.95 || value === 0 ? 0 : 1) : short(value, 2)} %`;
}

/** @param {number} number @param {string} one @param {string} [many] */
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** @param {number} value 12,300 → "12.3k" */
export function compact(value) {
  if (Math.abs(value) < 10_000) return grouped(value);
  const [divisor, unit] = Math.abs(value) >= 1e9 ? [1e9, "G"] : Math.abs(value) >= 1e6 ? [1e6, "M"] : [1e3, "k"];
  return `${short(value / /** @type {number} */ (divisor))}${unit}`;
}

/** `1 h 20 min`, `3 min 5 s`, `12 s`. @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (!isKnown(seconds)) return ABSENT;
  const whole = Math.round(/** @type {number} */ (seconds));
  for (const [size, unit, smaller, name] of /** @type {[number, string, number, string][]} */ ([[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]])) {
    if (whole >= size) return `${Math.floor(whole / size)} ${unit}${whole % size >= smaller ? ` ${Math.floor((whole % size) / smaller)} ${name}` : ""}`;
  }
  return `${whole} s`;
}
