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

export class Points {
  /** @param {import("./source.js").Source} source */
  constructor(source) {
    this.source = source;
    /** @type {any} the head that the slices belong to */
    this.head = null;
    /** @type {Promise<Record<string, any[]>> | null} */
    this.slices = null;
  }

  /**
   * One point for each step of the head; null where a step has no such record.
   * @param {any} head @param {Chosen} chosen @returns {Promise<any[]>}
   */
  async over(head, chosen) {
    const wanted = head.steps.map((/** @type {any} */ summary) => narrowed(summary, chosen));
    const slices = wanted.some((/** @type {any} */ one) => one && (one.rank !== ANY || one.version !== ANY)) ? await this.load(head) : {};
    return head.steps.map((/** @type {any} */ summary, /** @type {number} */ i) => {
      if (!wanted[i]) return null;
      const { rank, version } = wanted[i];
      const env = chosen.env || "all";
      if (rank === ANY && version === ANY) return summary.points[env] ?? null;
      return slices[summary.step]?.find((one) => one.env === env && one.rank === rank && one.version === version) ?? null;
    });
  }

  /** @param {any} head */
  load(head) {
    if (this.head !== head || !this.slices) {
      this.head = head;
      this.slices = this.source.slices().catch((error) => { this.slices = null; throw error; });
    }
    return this.slices;
  }
}

/** What is left to choose in a step: of a single rank or version nothing; null where the step has no such record.
 * @param {any} summary @param {Chosen} chosen */
function narrowed({ step, ranks, versions }, { rank, weights }) {
  const version = versionIn(weights, step);
  if ((rank >= 0 && !ranks.includes(rank)) || (version !== ANY && !versions.includes(version))) return null;
  const [oneRank, oneVersion] = [rank < 0 || ranks.length === 1, version === ANY || versions.length === 1];
  return { rank: oneRank ? ANY : rank, version: oneVersion ? ANY : version };
}
