// The smallest Parquet file that every reader takes: one row group, plain encoding, no compression.
// Texts are UTF-8 byte arrays, numbers are doubles; null is what a definition level of 0 says.

/** @typedef {{name: string, values: (string | number | null)[]}} ParquetColumn */

const MAGIC = [0x50, 0x41, 0x52, 0x31]; // PAR1
const DOUBLE = 5;
const BYTE_ARRAY = 6;
const OPTIONAL = 1;
const UTF8 = 0;
const PLAIN = 0;
const RLE = 3;

/** @param {ParquetColumn[]} columns @returns {Uint8Array<ArrayBuffer>} */
export function parquet(columns) {
  const rows = columns[0]?.values.length ?? 0;
  const bytes = new Bytes();
  bytes.raw(MAGIC);
  const chunks = columns.map(({ name, values }) => {
    const isText = values.some((value) => typeof value === "string");
    const page = pageOf(values, isText);
    const start = bytes.length;
    const header = new Compact().struct((s) => s.i32(1, 0).i32(2, page.length).i32(3, page.length)
      .inner(5, (p) => p.i32(1, rows).i32(2, PLAIN).i32(3, RLE).i32(4, RLE)));
    bytes.raw(header.bytes.data);
    bytes.raw(page.data);
    return { name, type: isText ? BYTE_ARRAY : DOUBLE, start, size: bytes.length - start };
  });
  const footer = new Compact().struct((s) => s.i32(1, 1)
    .list(2, chunks.length + 1, (i, element) => (i === 0
      ? element.string(4, "tokens").i32(5, chunks.length)
      : schemaElement(element, chunks[i - 1])))
    .i64(3, rows)
    .list(4, 1, (_, group) => group
      .list(1, chunks.length, (i, chunk) => chunk.i64(2, chunks[i].start).inner(3, (meta) => meta
        .i32(1, chunks[i].type).i32List(2, [PLAIN, RLE]).stringList(3, [chunks[i].name]).i32(4, 0)
        .i64(5, rows).i64(6, chunks[i].size).i64(7, chunks[i].size).i64(9, chunks[i].start)))
      .i64(2, chunks.reduce((sum, { size }) => sum + size, 0)).i64(3, rows))
    .string(6, "pellucid"));
  bytes.raw(footer.bytes.data);
  bytes.u32(footer.bytes.length);
  bytes.raw(MAGIC);
  return Uint8Array.from(bytes.data);
}

/** @param {Fields} element @param {{name: string, type: number}} column */
function schemaElement(element, { name, type }) {
  element.i32(1, type).i32(3, OPTIONAL).string(4, name);
  if (type === BYTE_ARRAY) element.i32(6, UTF8);
}

/** Definition levels as one bit-packed run, then the values that are there. @param {(string | number | null)[]} values @param {boolean} isText */
function pageOf(values, isText) {
  const groups = Math.ceil(values.length / 8);
  const levels = new Bytes();
  levels.varint((groups << 1) | 1);
  for (let group = 0; group < groups; group += 1) {
    let byte = 0;
    for (let bit = 0; bit < 8; bit += 1) if ((values[group * 8 + bit] ?? null) !== null) byte |= 1 << bit;
    levels.raw([byte]);
  }
  const page = new Bytes();
  page.u32(levels.length);
  page.raw(levels.data);
  for (const value of values) {
    if (value === null) continue;
    if (isText) {
      const text = new TextEncoder().encode(String(value));
      page.u32(text.length);
      page.raw(text);
    } else page.raw(new Uint8Array(new Float64Array([Number(value)]).buffer));
  }
  return page;
}

class Bytes {
  constructor() {
    /** @type {number[]} */
    this.data = [];
  }

  get length() { return this.data.length; }

  /** @param {ArrayLike<number>} bytes */
  raw(bytes) { for (let i = 0; i < bytes.length; i += 1) this.data.push(bytes[i]); }

  /** @param {number} value */
  u32(value) { this.raw([value & 255, (value >>> 8) & 255, (value >>> 16) & 255, (value >>> 24) & 255]); }

  /** @param {number} value */
  varint(value) {
    let rest = value;
    while (rest > 127) { this.data.push((rest % 128) | 128); rest = Math.floor(rest / 128); }
    this.data.push(rest);
  }
}

/** Thrift's compact protocol, as far as a footer needs it. */
class Compact {
  constructor() { this.bytes = new Bytes(); }

  /** @param {(fields: Fields) => void} fill */
  struct(fill) {
    fill(new Fields(this.bytes));
    this.bytes.raw([0]);
    return this;
  }
}

class Fields {
  /** @param {Bytes} bytes */
  constructor(bytes) {
    this.bytes = bytes;
    this.last = 0;
  }

  /** @param {number} id @param {number} type */
  field(id, type) {
    this.bytes.raw([((id - this.last) << 4) | type]);
    this.last = id;
  }

  /** @param {number} id @param {number} value */
  i32(id, value) { this.field(id, 5); this.bytes.varint(value * 2); return this; }

  /** @param {number} id @param {number} value */
  i64(id, value) { this.field(id, 6); this.bytes.varint(value * 2); return this; }

  /** @param {number} id @param {string} value */
  string(id, value) { this.field(id, 8); this.text(value); return this; }

  /** @param {string} value */
  text(value) {
    const encoded = new TextEncoder().encode(value);
    this.bytes.varint(encoded.length);
    this.bytes.raw(encoded);
  }

  /** @param {number} id @param {(fields: Fields) => void} fill */
  inner(id, fill) {
    this.field(id, 12);
    fill(new Fields(this.bytes));
    this.bytes.raw([0]);
    return this;
  }

  /** @param {number} id @param {number} count @param {(i: number, fields: Fields) => void} fill */
  list(id, count, fill) {
    this.field(id, 9);
    this.size(count, 12);
    for (let i = 0; i < count; i += 1) { fill(i, new Fields(this.bytes)); this.bytes.raw([0]); }
    return this;
  }

  /** @param {number} id @param {number[]} values */
  i32List(id, values) {
    this.field(id, 9);
    this.size(values.length, 5);
    for (const value of values) this.bytes.varint(value * 2);
    return this;
  }

  /** @param {number} id @param {string[]} values */
  stringList(id, values) {
    this.field(id, 9);
    this.size(values.length, 8);
    for (const value of values) this.text(value);
    return this;
  }

  /** @param {number} count @param {number} type */
  size(count, type) {
    if (count < 15) this.bytes.raw([(count << 4) | type]);
    else { this.bytes.raw([0xf0 | type]); this.bytes.varint(count); }
  }
}
