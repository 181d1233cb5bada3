// A token with its neighbours in one line.

import { element } from "./dom.js";

/**
 * @param {import("../data/texts.js").Vocabulary} vocabulary @param {ArrayLike<number>} ids @param {number} from @param {number} to
 * @param {number} middle @param {(at: number) => [string, string] | null} colour
 */
export function contextLine(vocabulary, ids, from, to, middle, colour) {
  const part = (/** @type {number} */ at) => {
    const node = element("span", { class: at === middle ? "token pinned" : "token" }, vocabulary.show(ids, at));
    const paint = colour(at);
    if (paint) { node.style.background = paint[0]; node.style.color = paint[1]; }
    return node;
  };
  const range = (/** @type {number} */ a, /** @type {number} */ b) => Array.from({ length: Math.max(0, b - a) }, (_, i) => part(a + i));
  return element("span", { class: "context-line" }, element("span", { class: "context-before" }, element("bdi", {}, ...range(from, middle))),
    part(middle), element("span", { class: "context-after" }, ...range(middle + 1, to)));
}
