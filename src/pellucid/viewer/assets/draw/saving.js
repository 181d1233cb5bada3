// Buttons that take what is seen out of the page. They stand at the right end of a header: of a view for all of it,
// of a card for that card.

import { saveColumns, saveFile } from "../data/save.js";
import { element } from "./dom.js";
import { picture } from "./picture.js";

/**
 * @param {string} what in words, for the tooltip
 * @param {() => string} name of the file, without its ending
 * @param {{columns?: () => import("../data/save.js").SavedColumn[] | Promise<import("../data/save.js").SavedColumn[]>, shown?: () => Element}} from
 * @param {...(Node | null)} others further buttons, before these
 */
export function saveBar(what, name, { columns, shown }, ...others) {
  const button = (/** @type {string} */ label, /** @type {() => void} */ onclick) => element("button", { type: "button", title: `save ${what} as ${label}`, onclick }, label);
  return element("span", { class: "save-bar" }, ...others,
    columns && button("CSV", async () => saveColumns(name(), "csv", await columns())),
    columns && button("Parquet", async () => saveColumns(name(), "parquet", await columns())),
    shown && button("PNG", () => savePicture(name(), shown())));
}

/** The picture of one chart. @param {string} what @param {() => string} name */
export function saveChart(what, name) {
  const button = element("button", { type: "button", class: "quiet save-chart no-picture", title: `save ${what} as PNG`, "aria-label": `save ${what} as PNG`,
    onclick: () => savePicture(name(), /** @type {Element} */ (button.closest(".card"))) }, "↓");
  return button;
}

/** @param {string} name @param {Element} shown */
function savePicture(name, shown) {
  picture(shown).toBlob((blob) => blob && saveFile(`${name}.png`, "image/png", blob));
}
