// Tokens into lines by width, as far as asked: what is in sight first, the rest when there is time.
//
//   const lines = new Lines(segments, room, (token) => …, (shown) => …);
//   lines.reach({ top: 900 });       // the lines down to 900 px are final
//   lines.reach({ token: 12_000 });  // and those up to this token

import { lastAtMost } from "../data/sorted.js";

export const LINE = 25;
export const PADDING = 16;
const GAP = 14; // between two speakers
const TOKEN_PADDING = 2;
const LOOKS_AT_CLOCK = 1024; // tokens between two looks at the clock

export class Lines {
  /**
   * @param {[string, number, number][]} segments @param {number} room in pixels
   * @param {(token: number) => string} show @param {(shown: string) => number} widthOf
   */
  constructor(segments, room, show, widthOf) {
    this.segments = segments;
    this.room = room;
    this.show = show;
    this.widthOf = widthOf;
    /** @type {number[]} the first token of each line, and the first token after them */
    this.starts = [segments[0]?.[1] ?? 0];
    /** @type {number[]} */
    this.tops = [];
    /** @type {number[]} the segment of each line */
    this.owners = [];
    this.top = PADDING;
    this.segment = 0;
    this.at = this.starts[0];
    this.used = 0;
    this.wordStart = this.at;
    this.wordUsed = 0;
  }

  get isDone() { return this.segment >= this.segments.length; }

  /** Of the whole sheet: guessed from the lines so far while there are tokens left. */
  get height() {
    const length = this.segments.at(-1)?.[2] ?? 0;
    return (this.isDone ? this.top : this.top * Math.max(1, length / Math.max(1, this.at))) + PADDING;
  }

  /** Goes on until a height, a token, or a time is reached. @param {{top?: number, token?: number, until?: number}} goal */
  reach({ top = Infinity, token = Infinity, until = Infinity }) {
    const isReached = () => this.top > top || this.starts[this.tops.length] > token || (until < Infinity && performance.now() > until);
    while (!this.isDone && !isReached()) {
      const end = this.segments[this.segment][2];
      this.lay(Math.min(end, this.at + LOOKS_AT_CLOCK), end);
      if (this.at < end) continue;
      if (this.starts[this.tops.length] < end) this.finish(end);
      this.segment += 1;
      if (!this.isDone) {
        this.top += GAP;
        this.at = this.wordStart = this.segments[this.segment][1];
        this.used = this.wordUsed = 0;
      }
    }
  }

  /** @param {number} stop @param {number} end of the segment */
  lay(stop, end) {
    const { room } = this;
    for (let { at } = this; at < stop; at += 1) {
      const shown = this.show(at);
      const width = Math.min(this.widthOf(shown) + TOKEN_PADDING, room);
      const first = shown[0];
      const lineStart = this.starts[this.tops.length];
      if (first === "·" || first === "<" || first === "#") { this.wordStart = at; this.wordUsed = this.used; }
      if (this.used + width > room && at > lineStart) {
        // Whole words go to the next line, unless that leaves this one half empty.
        const breakAt = this.wordStart > lineStart && this.wordUsed > room * 0.6 ? this.wordStart : at;
        this.finish(breakAt);
        this.used = breakAt === at ? 0 : this.used - this.wordUsed;
        this.wordUsed = 0;
      }
      this.used += width;
      if (shown.endsWith("⏎") && at + 1 < end) { this.finish(at + 1); this.used = 0; this.wordStart = at + 1; this.wordUsed = 0; }
    }
    this.at = stop;
  }

  /** Ends a line. @param {number} upTo the first token of the next */
  finish(upTo) {
    this.tops.push(this.top);
    this.owners.push(this.segment);
    this.starts.push(upTo);
    this.top += LINE;
  }

  get length() { return this.tops.length; }

  /** @param {number} height */
  atHeight(height) {
    this.reach({ top: height });
    return lastAtMost(this.tops, height);
  }

  /** @param {number} token */
  of(token) {
    this.reach({ token });
    return lastAtMost(this.starts, token, this.tops.length);
  }
}
