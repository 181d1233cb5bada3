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
