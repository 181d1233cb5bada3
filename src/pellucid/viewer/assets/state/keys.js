// What the keyboard does: one table, which the help shows, too.

/**
 * @typedef {{keys: string[], shown: string, what: string, run: (app: any, key: string) => void}} Binding
 */

/** @type {Binding[]} */
export const BINDINGS = [
  { keys: ["j", "k"], shown: "j k", what: "next, previous record", run: (app, key) => app.moveRecord(key === "j" ? 1 : -1) },
  { keys: ["l", "h"], shown: "l h", what: "next, previous step", run: (app, key) => app.moveStep(key === "l" ? 1 : -1) },
  { keys: ["n", "N"], shown: "n N", what: "next, previous outlier of the colouring", run: (app, key) => app.moveOutlier(key === "n" ? 1 : -1) },
  { keys: ["ArrowRight", "ArrowLeft"], shown: "→ ←", what: "next, previous token", run: (app, key) => app.moveToken(key === "ArrowRight" ? 1 : -1) },
  { keys: ["g"], shown: "g", what: "the group of this record", run: (app) => app.go({ view: "group" }) },
  { keys: ["r"], shown: "r", what: "this record", run: (app) => app.go({ view: "record" }) },
  { keys: ["s"], shown: "s", what: "this step", run: (app) => app.go({ view: "step" }) },
  { keys: ["w"], shown: "w", what: "its worst tokens", run: (app) => app.go({ view: "worst" }) },
  { keys: ["1", "2", "3", "4", "5", "6", "7", "8", "9"], shown: "1 … 9", what: "colour by mismatch KL, entropy, surprise, advantage, reward, log ratio, prob. delta, token loss, staleness", run: (app, key) => app.colourBy(Number(key) - 1) },
  { keys: ["m"], shown: "m", what: "show or hide masks", run: (app) => app.go({ masks: !app.store.state.masks }) },
  { keys: ["t"], shown: "t", what: "tokens as text or as a table", run: (app) => app.go({ table: !app.store.state.table }) },
  { keys: ["/"], shown: "/", what: "search", run: (app) => app.focusSearch() },
  { keys: ["f"], shown: "f", what: "filter", run: (app) => app.focusFilter() },
  { keys: ["y"], shown: "y", what: "copy the address of the record or token", run: (app) => app.copyId() },
  { keys: ["c"], shown: "c", what: "copy the record as JSON", run: (app) => app.copyRecord() },
  { keys: ["d"], shown: "d", what: "dark or light", run: (app) => app.switchTheme() },
  { keys: ["?"], shown: "?", what: "this help", run: (app) => app.toggleHelp() },
  { keys: ["Escape"], shown: "Esc", what: "close the help, show all steps, unpin the token", run: (app) => app.escape() },
];

/** @param {any} app */
export function listenForKeys(app) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = /** @type {HTMLElement} */ (event.target);
    if (target.closest?.("input, select, textarea") && event.key !== "Escape") return;
    if (event.key.startsWith("Arrow") && target.closest?.("[data-arrows]") === null && app.store.state.view !== "record") return;
    const binding = BINDINGS.find(({ keys }) => keys.includes(event.key));
    if (!binding) return;
    event.preventDefault();
    binding.run(app, event.key);
  });
}
