// A run as the views see it: its head, the rows of a step, the tokens of a record, all tokens of a step.
// What was read is kept; a record costs one chunk.

import { readColumn } from "./blob.js";
import { DERIVED, derive } from "./derive.js";
import { Points } from "./points.js";
import { lastAtMost } from "./sorted.js";
import { Vocabulary } from "./texts.js";

/**
 * @typedef {import("./blob.js").Numbers} Numbers
 * @typedef {import("./source.js").Source} Source
 * @typedef {[string, number, number]} Segment role, start, end
 */

const KEPT_CHUNKS = 600;
const SPARK_CELLS = 32;
const CHUNKS_AT_ONCE = 2;

/** What was asked for is not looked at any more. */
export class Abandoned extends Error {}

export class Run {
  /** @param {Source} source @param {any} head */
  constructor(source, head) {
    this.source = source;
    this.head = head;
    this.vocabulary = new Vocabulary(source);
    this.points = new Points(source);
    /** Whether all tokens of a step are still worth reading: they may be many. @type {(step: number) => boolean} */
    this.wantsTokens = () => true;
    /** @type {Map<number, Promise<StepIndex>>} */
    this.indexes = new Map();
    /** @type {Map<number, Promise<StepIndex>>} */
    this.rows = new Map();
    /** @type {Map<string, Promise<Chunk>>} */
    this.chunks = new Map();
    /** @type {Map<number, Promise<StepTokens>>} */
    this.tokens = new Map();
  }

  /** Steps whose tokens can be opened. @returns {number[]} */
  get steps() { return this.head.held; }

  /** Whether loss or gradient of a step was not finite, so that it moved no weights. @param {number} step */
  isSkipped(step) { return (this.head.metrics.skipped_steps ?? []).some((/** @type {number[]} */ [at, isSkipped]) => at === step && isSkipped === 1); }

  get envs() {
    const names = new Set();
    for (const { points } of this.head.steps) for (const env of Object.keys(points)) if (env !== "all") names.add(env);
    return [...names].sort();
  }

  /** @param {number} step */
  summary(step) { return this.head.steps.find((/** @type {any} */ summary) => summary.step === step); }

  /** `[trainer.loss]` by which a step was trained, or null: a resumed run may have another than before. @param {number} step */
  lossAt(step) {
    const { losses } = this.head;
    return losses.filter((/** @type {[number, any]} */ [first]) => first <= step).at(-1)?.[1] ?? losses[0]?.[1] ?? null;
  }

  /** The step that can be opened and is nearest to one that may not be. @param {number} step */
  nearestStep(step) {
    return this.steps.reduce((best, next) => (Math.abs(next - step) < Math.abs(best - step) ? next : best), this.steps[0]);
  }

  /** @param {number} step @returns {Promise<StepIndex>} */
  index(step) {
    return kept(this.indexes, step, async () => new StepIndex(step, await this.source.step(step)));
  }

  /** The index with what the records' tokens add up to. @param {number} step @returns {Promise<StepIndex>} */
  measured(step) {
    return kept(this.rows, step, async () => {
      const [index, blob] = await Promise.all([this.index(step), this.source.rows(step)]);
      index.measure(blob);
      return index;
    });
  }

  /** @param {number} step @param {number} number */
  chunk(step, number) {
    if (this.chunks.size > KEPT_CHUNKS) this.chunks.delete(/** @type {string} */ (this.chunks.keys().next().value));
    return kept(this.chunks, `${step}/${number}`, async () => new Chunk(await this.source.chunk(step, number)));
  }

  /** The index of a step that has this record. @param {number} step @param {number} record @returns {Promise<StepIndex>} */
  async indexWith(step, record) {
    const index = await this.index(step);
    if (record < 0 || record >= index.length) throw new Error(`Step ${step} has ${index.length} records, from 0 on; there is no record ${record}.`);
    return index;
  }

  /** @param {number} step @param {number} record @returns {Promise<TokenRecord>} */
  async record(step, record) {
    const index = await this.indexWith(step, record);
    const number = index.chunkOf(record);
    const chunk = await this.chunk(step, number);
    const opened = new TokenRecord(index, record, chunk, record - index.chunkStarts[number]);
    await this.vocabulary.learn(opened.column("token_ids") ?? []);
    return opened;
  }

  /** The first tokens of a long record, unless all of them are here already; null for others. @param {number} step @param {number} record
   * @returns {Promise<TokenRecord | null>} */
  async lead(step, record) {
    const index = await this.index(step);
    if (!index.summary.leads.includes(record) || this.chunks.has(`${step}/${index.chunkOf(record)}`)) return null;
    const opened = new TokenRecord(index, record, new Chunk(await this.source.lead(step, record)), 0);
    await this.vocabulary.learn(opened.column("token_ids") ?? []);
    return opened;
  }

  /** All tokens of a step. @param {number} step @returns {Promise<StepTokens>} */
  stepTokens(step) {
    if (this.tokens.size > 3) this.tokens.delete(/** @type {number} */ (this.tokens.keys().next().value));
    return kept(this.tokens, step, async () => {
      const index = await this.index(step);
      const chunks = [];
      for (let number = 0; number < index.chunkStarts.length; number += CHUNKS_AT_ONCE) {
        if (number && !this.wantsTokens(step)) throw new Abandoned(`tokens of step ${step}`);
        const last = Math.min(index.chunkStarts.length, number + CHUNKS_AT_ONCE);
        chunks.push(...await Promise.all(Array.from({ length: last - number }, (_, i) => this.chunk(step, number + i))));
      }
      const tokens = new StepTokens(index, chunks);
      await this.vocabulary.learn(tokens.column("token_ids") ?? []);
      return tokens;
    });
  }
}

/** @template K, V @param {Map<K, Promise<V>>} cache @param {K} key @param {() => Promise<V>} make */
function kept(cache, key, make) {
  let found = cache.get(key);
  if (found) cache.delete(key);
  else found = make().catch((error) => { cache.delete(key); throw error; });
  cache.set(key, found);
  return found;
}

export class StepIndex {
  /** @param {number} step @param {import("./blob.js").Blob} blob */
  constructor(step, blob) {
    this.step = step;
    this.length = blob.meta.records;
    this.summary = blob.meta;
    this.blob = blob;
    this.words = blob.meta.words;
    /** @type {import("./blob.js").Blob | null} */
    this.measures = null;
    this.chunkStarts = /** @type {Numbers} */ (
      readColumn(blob, "chunk_starts", blob.columns.chunk_starts.length ?? 1) ?? new Int32Array(1));
    /** @type {Map<string, any>} */
    this.columns = new Map();
  }

  /** @param {import("./blob.js").Blob} blob */
  measure(blob) {
    this.measures = blob;
    this.columns.clear();
  }

  /** Numbers by record; NaN where a record does not say. @param {string} name */
  column(name) {
    if (!this.columns.has(name)) {
      const own = this.measures && name in this.measures.columns ? this.measures : this.blob;
      this.columns.set(name, readColumn(own, name, name === "sparks" ? this.length * SPARK_CELLS : this.length) ?? new Float64Array(this.length).fill(NaN));
    }
    return this.columns.get(name);
  }

  /** A number or a word of one record; null where it does not say. @param {string} name @param {number} record */
  value(name, record) {
    const value = this.column(name)[record];
    if (this.words[name]) return this.words[name][value] || null;
    return Number.isNaN(value) ? null : value;
  }

  /** @param {number} record */
  spark(record) {
    const cells = this.column("sparks");
    const width = this.measures ? cells.length / this.length : 0;
    return cells.subarray(record * width, (record + 1) * width);
  }

  /** @param {number} record */
  chunkOf(record) { return lastAtMost(this.chunkStarts, record); }

  /** Records with the same word, such as the members of a group. @param {string} name @param {any} word */
  withWord(name, word) {
    const found = [];
    for (let i = 0; i < this.length; i += 1) if (this.value(name, i) === word) found.push(i);
    return found;
  }
}

class Chunk {
  /** @param {import("./blob.js").Blob} blob */
  constructor(blob) {
    this.blob = blob;
    const count = blob.meta.segments.length;
    this.lengths = /** @type {Numbers} */ (readColumn(blob, "lengths", count));
    this.starts = new Int32Array(count + 1);
    for (let i = 0; i < count; i += 1) this.starts[i + 1] = this.starts[i] + this.lengths[i];
    this.length = this.starts[count];
    /** @type {Map<string, Numbers | null | undefined>} */
    this.columns = new Map();
  }

  /** @param {string} name @returns {Numbers | null | undefined} */
  column(name) {
    if (!this.columns.has(name)) {
      const isDerived = this.blob.meta.derived.includes(name);
      this.columns.set(name, isDerived ? this.derived(name) : readColumn(this.blob, name, this.length, this.lengths));
    }
    return this.columns.get(name);
  }

  /** Whether a derived column is carried as recorded because it is not what its formula gives. @param {string} name */
  differs(name) { return name in DERIVED && name in this.blob.columns && this.blob.columns[name].fill !== null; }

  /** @param {string} name */
  derived(name) {
    return derive(name, /** @type {Numbers} */ (this.column("trainer_logprobs")), /** @type {Numbers} */ (this.column("inference_logprobs")));
  }
}

export class TokenRecord {
  /** @param {StepIndex} index @param {number} record @param {Chunk} chunk @param {number} place */
  constructor(index, record, chunk, place) {
    this.index = index;
    this.step = index.step;
    this.record = record;
    this.chunk = chunk;
    this.start = chunk.starts[place];
    this.end = chunk.starts[place + 1];
    this.length = this.end - this.start;
    /** @type {Segment[]} */
    this.segments = chunk.blob.meta.segments[place];
    this.mask = chunk.column("loss_mask");
  }

  /** @param {string} name @returns {Numbers | null | undefined} */
  column(name) { return this.chunk.column(name)?.subarray(this.start, this.end) ?? this.chunk.column(name); }

  /** Undefined where not recorded, null where there is no value. @param {string} name @param {number} token */
  value(name, token) {
    const column = this.chunk.column(name);
    if (!column) return column;
    const value = column[this.start + token];
    return Number.isNaN(value) ? null : value;
  }

  /** Of the record as a whole. @param {string} name */
  field(name) { return this.index.value(name, this.record); }

  /** @param {number} token */
  isTrainable(token) { return !this.mask || this.mask[this.start + token] !== 0; }
}

export class StepTokens {
  /** @param {StepIndex} index @param {Chunk[]} chunks */
  constructor(index, chunks) {
    this.index = index;
    this.step = index.step;
    this.chunks = chunks;
    this.length = chunks.reduce((total, chunk) => total + chunk.length, 0);
    this.starts = new Int32Array(index.length + 1);
    this.owners = new Int32Array(this.length);
    let record = 0;
    for (const chunk of chunks) {
      for (const length of chunk.lengths) {
        this.starts[record + 1] = this.starts[record] + length;
        this.owners.fill(record, this.starts[record], this.starts[record + 1]);
        record += 1;
      }
    }
    /** @type {Map<string, Float64Array | null | undefined>} */
    this.columns = new Map();
  }

  /** NaN where a record has no value; null or undefined where none has. @param {string} name */
  column(name) {
    if (!this.columns.has(name)) {
      const parts = this.chunks.map((chunk) => chunk.column(name));
      let all = parts.every((part) => part === undefined) ? undefined : null;
      if (parts.some((part) => part)) {
        const values = new Float64Array(this.length);
        let at = 0;
        this.chunks.forEach((chunk, i) => {
          const part = parts[i];
          if (part) values.set(part, at); else values.fill(NaN, at, at + chunk.length);
          at += chunk.length;
        });
        this.columns.set(name, values);
        return values;
      }
      this.columns.set(name, all);
    }
    return this.columns.get(name);
  }

  /** Where the loss mask is set; everywhere in an export without one. @param {number} token */
  isTrainable(token) {
    const mask = this.column("loss_mask");
    return !mask || mask[token] !== 0;
  }

  /** A token's place in its record. @param {number} token */
  position(token) { return token - this.starts[this.owners[token]]; }
}
