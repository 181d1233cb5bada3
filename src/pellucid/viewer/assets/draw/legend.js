// The colours in use, with their numbers.

import { element } from "./dom.js";
import { short } from "./format.js";

/** @param {import("./scale.js").ColourScale} scale @param {string} scope */
export function legend(scale, scope) {
  const bar = element("span", { class: "legend-bar" });
  bar.style.background = `linear-gradient(90deg, ${scale.colours.map(([colour]) => colour).join(", ")})`;
  const middle = scale.kind === "log" ? Math.sqrt(scale.low * scale.high) : (scale.low + scale.high) / 2;
  const end = scale.kind === "diverging" ? "" : "≤ ";
  return element("span", { class: "legend", title: `over trainable tokens of this ${scope}` },
    element("span", {}, end + short(scale.low, 2)), bar, element("span", {}, (scale.kind === "diverging" ? "" : "≥ ") + short(scale.high, 2)),
    element("span", { class: "legend-middle" }, short(middle, 2)));
}
