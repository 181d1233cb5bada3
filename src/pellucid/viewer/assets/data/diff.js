// What two token sequences share: the parts in order, each common, only in the first, or only in the second.

/** @typedef {{kind: "same" | "first" | "second", start: number, end: number}} Part `start`, `end`: in the sequence it is of; "same": in the second */

const LONGEST = 3000; // beyond it, only common beginnings and ends are found

/** @param {ArrayLike<number>} first @param {ArrayLike<number>} second @returns {Part[]} */
export function diff(first, second) {
  const start = commonPrefix([first, second]);
  let [a, b] = [first.length, second.length];
  while (a > start && b > start && first[a - 1] === second[b - 1]) { a -= 1; b -= 1; }
  /** @type {Part[]} */
  const parts = [];
  push(parts, "same", 0, start);
  if (a - start > LONGEST || b - start > LONGEST) {
    push(parts, "first", start, a);
    push(parts, "second", start, b);
  } else middle(first, second, start, a, b, parts);
  push(parts, "same", b, second.length);
  return parts;
}

/** @param {ArrayLike<number>[]} sequences */
export function commonPrefix(sequences) {
  const shortest = Math.min(...sequences.map(({ length }) => length));
  let at = 0;
  while (at < shortest && sequences.every((sequence) => sequence[at] === sequences[0][at])) at += 1;
  return at;
}

/** The longest common subsequence of what differs. @param {ArrayLike<number>} first @param {ArrayLike<number>} second
 * @param {number} start @param {number} a @param {number} b @param {Part[]} parts */
function middle(first, second, start, a, b, parts) {
  const [rows, columns] = [a - start, b - start];
  const table = new Uint16Array((rows + 1) * (columns + 1));
  for (let i = rows - 1; i >= 0; i -= 1) {
    for (let j = columns - 1; j >= 0; j -= 1) {
      const at = i * (columns + 1) + j;
      table[at] = first[start + i] === second[start + j] ? table[at + columns + 2] + 1 : Math.max(table[at + columns + 1], table[at + 1]);
    }
  }
  let [i, j] = [0, 0];
  while (i < rows || j < columns) {
    const at = i * (columns + 1) + j;
    if (i < rows && j < columns && first[start + i] === second[start + j]) { push(parts, "same", start + j, start + j + 1); i += 1; j += 1; }
    else if (i < rows && (j === columns || table[at + columns + 1] >= table[at + 1])) { push(parts, "first", start + i, start + i + 1); i += 1; }
    else { push(parts, "second", start + j, start + j + 1); j += 1; }
  }
}

/** @param {Part[]} parts @param {Part["kind"]} kind @param {number} start @param {number} end */
function push(parts, kind, start, end) {
  if (start >= end) return;
  const last = parts[parts.length - 1];
  if (last?.kind === kind && last.end === start) last.end = end; else parts.push({ kind, start, end });
}
