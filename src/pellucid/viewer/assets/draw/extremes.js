// Which points of a long line are worth drawing: no pixel of a chart shows more than its lowest and its highest.

/**
 * The first and the last place, and of every stretch those of the lowest and the highest value; all places of a short line.
 *
 *   extremes([5, 1, 9, 2, 2, 7], () => true, 4)   [0, 1, 2, 3, 5]
 *
 * @param {ArrayLike<number>} values @param {(i: number) => boolean} counts @param {number} most about how many
 * @returns {number[]} ascending
 */
export function extremes(values, counts, most) {
  const { length } = values;
  if (length <= most) return Array.from({ length }, (_, i) => i);
  const stretches = Math.max(1, Math.floor(most / 2));
  const places = [0];
  for (let stretch = 0; stretch < stretches; stretch += 1) {
    const end = Math.floor(((stretch + 1) * length) / stretches);
    let low = -1;
    let high = -1;
    for (let i = Math.floor((stretch * length) / stretches); i < end; i += 1) {
      if (!counts(i) || Number.isNaN(values[i])) continue;
      if (low < 0 || values[i] < values[low]) low = i;
      if (high < 0 || values[i] > values[high]) high = i;
    }
    for (const place of low < high ? [low, high] : [high, low]) if (place > places[places.length - 1]) places.push(place);
  }
  if (places[places.length - 1] < length - 1) places.push(length - 1);
  return places;
}
