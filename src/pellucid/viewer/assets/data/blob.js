// Bytes to columns: the other side of `blob.py`, which describes the format.

/**
 * @typedef {Float32Array | Float64Array | Uint8Array | Int16Array | Int32Array} Numbers
 * @typedef {{fill?: number | null, ramp?: number, type?: string, at?: number, length?: number,
 *   split?: boolean, against?: string, per?: string}} Column
 * @typedef {{meta: any, columns: Record<string, Column>, payload: ArrayBuffer}} Blob
 */

/** @type {Record<string, any>} */
const ARRAYS = { u1: Uint8Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

/** @param {Uint8Array} bytes */
export async function inflate(bytes) {
  const { readable, writable } = new DecompressionStream("deflate");
  const writer = writable.getWriter();
  // Both fail with what reading fails with.
  Promise.allSettled([writer.write(/** @type {any} */ (bytes)), writer.close()]);
  // Part by part, not as a `Response`: that waits behind whatever else the page has to do.
  const reader = readable.getReader();
  const parts = [];
  let length = 0;
  for (let { value } = await reader.read(); value; { value } = await reader.read()) {
    parts.push(value);
    length += value.length;
  }
  const whole = new Uint8Array(length);
  let at = 0;
  for (const part of parts) { whole.set(part, at); at += part.length; }
  return whole.buffer;
}

/** @param {ArrayBuffer} buffer */
export function parseJson(buffer) {
  return JSON.parse(new TextDecoder().decode(buffer));
}

/** @param {ArrayBuffer} buffer @returns {Blob} */
export function parseBlob(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const { meta, columns } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return { meta, columns, payload: buffer.slice(4 + length) };
}

/**
 * One value per token (or per record, for a blob of rows). Undefined where the column is not there, null where
 * it is but says nothing.
 * @param {Blob} blob @param {string} name @param {number} length
 * @param {ArrayLike<number>} [lengths] tokens of each record, for columns with one value per record
 * @returns {Numbers | null | undefined}
 */
export function readColumn(blob, name, length, lengths) {
  const column = blob.columns[name];
  if (!column) return undefined;
  if (column.fill === null) return null;
  if (column.fill !== undefined) return new Float64Array(length).fill(column.fill);
  if (column.ramp !== undefined) return ramp(length, lengths ?? [length]);
  const stored = readStored(blob, column);
  return column.per === "record" ? repeated(stored, length, lengths ?? []) : stored;
}

/** @param {Blob} blob @param {Column} column @returns {Numbers} */
function readStored(blob, column) {
  const { at = 0, length = 0, type = "f4" } = column;
  const Type = ARRAYS[type];
  const width = Type.BYTES_PER_ELEMENT;
  const raw = new Uint8Array(blob.payload, at, length * width);
  const values = new Type(column.split ? joined(raw, length, width).buffer : raw.slice().buffer);
  if (!column.against) return values;
  const reference = /** @type {Float32Array} */ (readStored(blob, blob.columns[column.against]));
  const bits = new Int32Array(reference.buffer);
  const folded = new Uint32Array(values.buffer);
  for (let i = 0; i < length; i += 1) bits[i] += (folded[i] >>> 1) ^ -(folded[i] & 1);
  return reference;
}

/** @param {Uint8Array} raw @param {number} length @param {number} width */
function joined(raw, length, width) {
  const bytes = new Uint8Array(length * width);
  for (let place = 0; place < width; place += 1) {
    const from = place * length;
    for (let i = 0, to = place; i < length; i += 1, to += width) bytes[to] = raw[from + i];
  }
  return bytes;
}

/** @param {number} length @param {ArrayLike<number>} lengths */
function ramp(length, lengths) {
  const values = new Int32Array(length);
  for (let record = 0, at = 0; record < lengths.length; record += 1) {
    for (let i = 0; i < lengths[record]; i += 1, at += 1) values[at] = i;
  }
  return values;
}

/** @param {Numbers} perRecord @param {number} length @param {ArrayLike<number>} lengths */
function repeated(perRecord, length, lengths) {
  const values = new Float64Array(length);
  for (let record = 0, at = 0; record < lengths.length; record += 1) {
    values.fill(perRecord[record], at, (at += lengths[record]));
  }
  return values;
}
