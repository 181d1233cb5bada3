// Where a text, a pattern, a token id or a sequence of ids occurs.
//
//   hello        text, in any case        /h[ae]llo/i  a pattern
//   #123         a token id               #123 45 6    ids in a row

/** @typedef {{kind: "ids", ids: number[]} | {kind: "text", pattern: RegExp}} Query */

export class SearchError extends Error {}

/** @param {string} text @returns {Query | null} */
export function parseQuery(text) {
  const asked = text.trim();
  if (!asked) return null;
  const ids = asked.match(/^#(\d+(?:[\s,]+#?\d+)*)$/);
  if (ids) return { kind: "ids", ids: ids[1].split(/[\s,#]+/).map(Number) };
  const pattern = asked.match(/^\/(.+)\/([imsu]*)$/);
  if (!pattern) return { kind: "text", pattern: new RegExp(asked.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu") };
  try {
    return { kind: "text", pattern: new RegExp(pattern[1], `g${pattern[2]}`) };
  } catch (error) {
    throw new SearchError(/** @type {Error} */ (error).message);
  }
}

/**
 * [first, last) tokens of every occurrence.
 * @param {Query} query @param {ArrayLike<number>} ids @param {import("./texts.js").Vocabulary} vocabulary @param {number} [limit]
 * @returns {[number, number][]}
 */
export function occurrences(query, ids, vocabulary, limit = 10_000) {
  return query.kind === "ids" ? ofIds(query.ids, ids, limit) : ofText(query.pattern, ids, vocabulary, limit);
}

/** @param {number[]} wanted @param {ArrayLike<number>} ids @param {number} limit */
function ofIds(wanted, ids, limit) {
  const found = /** @type {[number, number][]} */ ([]);
  for (let at = 0; at + wanted.length <= ids.length && found.length < limit; at += 1) {
    if (wanted.every((id, i) => ids[at + i] === id)) found.push([at, at + wanted.length]);
  }
  return found;
}

/** @param {RegExp} pattern @param {ArrayLike<number>} ids @param {import("./texts.js").Vocabulary} vocabulary @param {number} limit */
function ofText(pattern, ids, vocabulary, limit) {
  const starts = new Int32Array(ids.length + 1);
  const parts = [];
  let length = 0;
  for (let at = 0; at < ids.length; at += 1) {
    starts[at] = length;
    const known = vocabulary.texts.get(ids[at]);
    const part = typeof known === "string" ? known : vocabulary.join(ids, at, at + 1);
    parts.push(part);
    length += part.length;
  }
  starts[ids.length] = length;
  const text = parts.join("");
  const found = /** @type {[number, number][]} */ ([]);
  let token = 0;
  for (const match of text.matchAll(pattern)) {
    if (found.length >= limit) break;
    const [from, to] = [match.index, match.index + Math.max(1, match[0].length)];
    while (token + 1 < ids.length && starts[token + 1] <= from) token += 1;
    let end = token + 1;
    while (end < ids.length && starts[end] < to) end += 1;
    found.push([token, end]);
  }
  return found;
}
