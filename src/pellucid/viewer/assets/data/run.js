// A run as the views see it: its head, the rows of a step, the tokens of a record, all tokens of a step, and each
// step in a few numbers. What was read is kept; a record costs one chunk.

import { readColumn } from "./source.js";
import { Vocabulary } from "./texts.js";

/**
 * @typedef {import("./source.js").Numbers} Numbers
 * @typedef {import("./source.js").ColumnBlob} ColumnBlob
 * @typedef {import("./source.js").Source} Source
 * @typedef {[string, number, number]} Segment role, start, end
 */

const KEPT_CHUNKS = 600;
const SPARK_CELLS = 32;
const CHUNKS_AT_ONCE = 2;

/** What was asked for is not looked at any more. */
export class Abandoned extends Error {}

export class Run {
  /** Whether all tokens of a step are still worth reading: they may be many. @type {(step: number) => boolean} */
  wantsTokens = () => true;

  /** @type {Map<number, Promise<StepIndex>>} */
  indexes = new Map();

  /** @type {Map<number, Promise<StepIndex>>} */
  rows = new Map();

  /** @type {Map<string, Promise<Chunk>>} */
  chunks = new Map();

  /** @type {Map<number, Promise<StepTokens>>} */
  tokens = new Map();

  /** @type {Map<string, Promise<any[]>>} */
  saved = new Map();

  /** @type {Map<any, Promise<Record<string, [number, number][]>>>} by the head that they belong to */
  allMetrics = new Map();

  /** @type {Map<any, Promise<any>>} by the head that they belong to */
  timelines = new Map();

  /** Points by rank and weights. @type {Map<any, Promise<Record<string, any[]>>>} by the head that they belong to */
  slices = new Map();

  /** @param {Source} source @param {any} head */
  constructor(source, head) {
    this.source = source;
    this.head = head;
    this.vocabulary = new Vocabulary(source);
  }

  /** Steps whose tokens can be opened. @returns {number[]} */
  get steps() { return this.head.held; }

  /** Whether loss or gradient of a step was not finite, so that it moved no weights. @param {number} step */
  isSkipped(step) { return (this.head.metrics.skipped_steps ?? []).some((/** @type {number[]} */ [at, isSkipped]) => at === step && isSkipped === 1); }

  /** How many rollouts are saved, of an outcome or of any, of a step or of all. @param {string} [outcome] @param {number} [step] */
  numRollouts(outcome, step) {
    return Object.entries(this.head.rollouts).filter(([own]) => step === undefined || Number(own) === step)
      .reduce((total, [, counts]) => total + Object.entries(counts).reduce((sum, [name, number]) => sum + (outcome ? Number(name === outcome) : Number(name !== "truncated")) * number, 0), 0);
  }

  /** Every metric of the run. @returns {Promise<Record<string, [number, number][]>>} */
  metrics() {
    if (!this.allMetrics.has(this.head)) this.allMetrics.clear();
    return kept(this.allMetrics, this.head, () => this.source.json("metrics"));
  }

  /** Who worked and who waited. @returns {Promise<any>} */
  timeline() {
    if (!this.timelines.has(this.head)) this.timelines.clear();
    return kept(this.timelines, this.head, () => this.source.json("timeline"));
  }

  /** Saved rollouts of a step. @param {number} step @returns {Promise<any[]>} */
  rollouts(step) { return kept(this.saved, `${step} ${JSON.stringify(this.head.rollouts[step])}`, () => this.source.json(`rollouts/${step}`)); }

  /** One saved rollout: the server has longer texts than the list. @param {any} row @returns {Promise<any>} */
  async rollout(row) {
    if (!row.cut || !this.head.live) return row;
    return kept(this.saved, `${row.step}/${row.number}/${row.outcome}`, () => this.source.json(`rollout/${row.step}/${row.number}`));
  }

  get envs() {
    const names = new Set();
    for (const name of Object.keys(this.head.metrics)) if (/^reward\/[^/]+$/.test(name) && name !== "reward/all") names.add(name.slice(7));
    for (const { points } of this.head.steps) for (const env of Object.keys(points)) if (env !== "all") names.add(env);
    return [...names].sort();
  }

  /** `[trainer.loss]` by which a step was trained, or null: a resumed run may have another than before. @param {number} step */
  lossAt(step) {
    const { losses } = this.head;
    return losses.filter((/** @type {[number, any]} */ [first]) => first <= step).at(-1)?.[1] ?? losses[0]?.[1] ?? null;
  }

  /** The step that can be opened and is nearest to one that may not be. @param {number} step */
  nearestStep(step) {
    return this.steps.reduce((best, next) => (Math.abs(next - step) < Math.abs(best - step) ? next : best), this.steps[0]);
  }

  /** One point for each step of the head; null where a step has no record that is meant. @param {Chosen} chosen @returns {Promise<any[]>} */
  async points(chosen) {
    const { head } = this;
    const wanted = head.steps.map((/** @type {any} */ summary) => narrowed(summary, chosen));
    if (!this.slices.has(head)) this.slices.clear();
    const isWhole = (/** @type {any} */ one) => one.rank === ANY && one.version === ANY;
    const slices = wanted.some((/** @type {any} */ one) => one && !isWhole(one)) ? await kept(this.slices, head, () => this.source.json("slices")) : {};
    return head.steps.map((/** @type {any} */ summary, /** @type {number} */ i) => {
      if (!wanted[i]) return null;
      const env = chosen.env || "all";
      if (isWhole(wanted[i])) return summary.points[env] ?? null;
      return slices[summary.step]?.find((/** @type {any} */ one) => one.env === env && one.rank === wanted[i].rank && one.version === wanted[i].version) ?? null;
    });
  }

  /** @param {number} step @returns {Promise<StepIndex>} */
  index(step) {
    return kept(this.indexes, step, async () => new StepIndex(step, await this.source.blob(`step/${step}`)));
  }

  /** The index with what the records' tokens add up to. @param {number} step @returns {Promise<StepIndex>} */
  measured(step) {
    return kept(this.rows, step, async () => {
      const [index, blob] = await Promise.all([this.index(step), this.source.blob(`rows/${step}`)]);
      index.measure(blob);
      return index;
    });
  }

  /** @param {number} step @param {number} number */
  chunk(step, number) {
    if (this.chunks.size > KEPT_CHUNKS) this.chunks.delete(/** @type {string} */ (this.chunks.keys().next().value));
    return kept(this.chunks, `${step}/${number}`, async () => new Chunk(await this.source.blob(`chunk/${step}/${number}`)));
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
    return this.learned(new TokenRecord(index, record, chunk, record - index.chunkStarts[number]));
  }

  /** The first tokens of a long record, unless all of them are here already; null for others. @param {number} step @param {number} record
   * @returns {Promise<TokenRecord | null>} */
  async lead(step, record) {
    const index = await this.index(step);
    if (!index.summary.leads.includes(record) || this.chunks.has(`${step}/${index.chunkOf(record)}`)) return null;
    return this.learned(new TokenRecord(index, record, new Chunk(await this.source.blob(`lead/${step}/${record}`)), 0));
  }

  /** Looks up the texts of tokens. @template {TokenRecord | StepTokens} T @param {T} tokens @returns {Promise<T>} */
  async learned(tokens) {
    await this.vocabulary.learn(tokens.ids);
    return tokens;
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
      return this.learned(new StepTokens(index, chunks));
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
  /** @param {number} step @param {ColumnBlob} blob */
  constructor(step, blob) {
    this.step = step;
    this.length = blob.meta.records;
    this.summary = blob.meta;
    this.blob = blob;
    this.words = blob.meta.words;
    /** @type {ColumnBlob | null} */
    this.measures = null;
    this.chunkStarts = /** @type {Numbers} */ (
      readColumn(blob, "chunk_starts", blob.columns.chunk_starts.length ?? 1) ?? new Int32Array(1));
    /** @type {Map<string, any>} */
    this.columns = new Map();
  }

  /** @param {ColumnBlob} blob */
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

  /** Records with the same words, such as the members of a group. @param {Record<string, any>} words */
  withWords(words) {
    const wanted = Object.entries(words);
    return Array.from({ length: this.length }, (_, i) => i).filter((i) => wanted.every(([name, word]) => this.value(name, i) === word));
  }
}

class Chunk {
  /** @param {ColumnBlob} blob */
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
      this.columns.set(name, isDerived ? this.derive(name) : readColumn(this.blob, name, this.length, this.lengths));
    }
    return this.columns.get(name);
  }

  /** @param {string} name */
  derive(name) {
    const of = DERIVED[name];
    const [trainer, inference] = ["trainer_logprobs", "inference_logprobs"].map((other) => /** @type {Numbers} */ (this.column(other)));
    const values = new Float32Array(this.length);
    for (let i = 0; i < values.length; i += 1) values[i] = of(trainer[i], inference[i]);
    return values;
  }

  /** Whether a derived column is carried as recorded because it is not what its formula gives. @param {string} name */
  differs(name) { return name in DERIVED && name in this.blob.columns && this.blob.columns[name].fill !== null; }
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

  /** @returns {ArrayLike<number>} */
  get ids() { return this.column("token_ids") ?? []; }

  /** Undefined where not recorded, null where there is no value. @param {string} name @param {number} token */
  value(name, token) {
    const column = this.chunk.column(name);
    if (!column) return column;
    const value = column[this.start + token];
    return Number.isNaN(value) ? null : value;
  }

  /** Where a token is: the record, the place in it, and [first, last) of the record's tokens here. @param {number} _token */
  owner(_token) { return this.record; }

  /** @param {number} _token @returns {[number, number]} */
  neighbours(_token) { return [0, this.length]; }

  /** @param {number} token */
  position(token) { return token; }

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
      const values = parts.some(Boolean) ? new Float64Array(this.length).fill(NaN) : null;
      let at = 0;
      this.chunks.forEach((chunk, i) => {
        const part = parts[i];
        if (part) values?.set(part, at);
        at += chunk.length;
      });
      this.columns.set(name, values ?? (parts.every((part) => part === undefined) ? undefined : null));
    }
    return this.columns.get(name);
  }

  /** @returns {ArrayLike<number>} */
  get ids() { return this.column("token_ids") ?? []; }

  /** Where the loss mask is set; everywhere in an export without one. @param {number} token */
  isTrainable(token) {
    const mask = this.column("loss_mask");
    return !mask || mask[token] !== 0;
  }

  /** @param {number} token */
  owner(token) { return this.owners[token]; }

  /** @param {number} token @returns {[number, number]} */
  neighbours(token) { return [this.starts[this.owners[token]], this.starts[this.owners[token] + 1]]; }

  /** A token's place in its record. @param {number} token */
  position(token) { return token - this.starts[this.owners[token]]; }
}

// A step in a few numbers, for all records or for those of an environment, a rank and the weights that sampled them.
//
//   weights   ""      whichever
//             "v37"   policy version 37
//             "age1"  the version that was one step old when its step was trained
//
// A record belongs to the oldest weights that had a part in it.

/** @typedef {{env: string, rank: number, weights: string}} Chosen rank −1: whichever */

const ANY = null;

/** Whether numbers by rank or weights are asked for. @param {Chosen} chosen */
export const isSliced = ({ rank, weights }) => rank >= 0 || weights !== "";

/** The policy version that is meant in a step; null: whichever. @param {string} weights @param {number} step */
export function versionIn(weights, step) {
  const [, kind, number] = weights.match(/^(v|age)(\d+)$/) ?? [];
  if (!kind) return ANY;
  return kind === "v" ? Number(number) : step - Number(number);
}

/** What can be chosen. @param {any} head */
export function choicesOf(head) {
  const distinct = (/** @type {(summary: any) => number[]} */ read) => /** @type {number[]} */ ([...new Set(head.steps.flatMap(read))]).sort((a, b) => a - b);
  return {
    ranks: distinct(({ ranks }) => ranks),
    versions: distinct(({ versions }) => versions),
    ages: distinct(({ step, versions }) => versions.map((/** @type {number} */ version) => step - version).filter((/** @type {number} */ age) => age >= 0)),
  };
}

/** What is left to choose in a step: of a single rank or version nothing; null where the step has no such record.
 * @param {any} summary @param {Chosen} chosen */
function narrowed({ step, ranks, versions }, { rank, weights }) {
  const version = versionIn(weights, step);
  if ((rank >= 0 && !ranks.includes(rank)) || (version !== ANY && !versions.includes(version))) return null;
  const [oneRank, oneVersion] = [rank < 0 || ranks.length === 1, version === ANY || versions.length === 1];
  return { rank: oneRank ? ANY : rank, version: oneVersion ? ANY : version };
}

// Columns that follow from the logprobs. The page carries them only where a record says something else.

/** @type {Record<string, (trainer: number, inference: number) => number>} */
export const DERIVED = {
  log_importance_ratio: (t, i) => t - i,
  importance_ratio: (t, i) => Math.exp(t - i),
  mismatch_kl: (t, i) => Math.expm1(t - i) - (t - i),
  prob_delta: (t, i) => Math.exp(t) - Math.exp(i),
};

const ABSOLUTE = 1e-6;
const RELATIVE = 1e-5;

/** Whether a recorded value is its formula's, but for rounding. @param {number} recorded @param {number} expected */
export function agrees(recorded, expected) {
  return Math.abs(recorded - expected) <= ABSOLUTE + RELATIVE * Math.abs(expected);
}

// Looking things up in ascending numbers.

/** The place of the last value that is not above the target; 0 where all are. @param {ArrayLike<number>} values @param {number} target @param {number} [length] */
export function lastAtMost(values, target, length = values.length) {
  let low = 0;
  let high = length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (values[middle] <= target) low = middle; else high = middle - 1;
  }
  return low;
}
