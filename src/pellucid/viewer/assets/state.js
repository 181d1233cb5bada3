// The one state of the page. The URL's hash is its serialised form, so a link restores exactly what was seen:
//
//   #record?step=40&record=3&token=12&fill=entropy
//
// What has its default value is left out.

import { METRICS } from "./data/metrics.js";

/** @typedef {typeof DEFAULTS} State */

export const DEFAULTS = {
  view: "run",
  step: -1, // the last one
  record: 0,
  token: -1, // none
  fill: "kl",
  scope: "run", // whose values the colours span: record, step, run
  masks: true,
  table: false, // tokens as a table
  env: "",
  rank: -1, // all
  weights: "", // v37: of policy version 37; age1: one step old
  steps: "", // 40:80, what the run's curves show
  filter: "",
  search: "",
  within: "record", // where a search looks: record, step, run
  sort: "",
  up: false,
  x: "kl", // of the scatter
  y: "entropy",
  brush: "", // kl:0.1:2,entropy:0:1
  top: "kl", // what the worst tokens are worst by
  kind: "all", // the class of worst tokens
  loss: "", // of what-if; empty: the run's own
  bounds: "", // high=0.3,low=0.2
  other: -1, // the step compared with
  ids: false, // the table per token id instead of records
  show: "", // the group of curves; empty: the overview
  pick: "", // parts of metrics' names
  smooth: 0, // steps that a curve is averaged over
  log: false, // log axes of all curves
  outcome: "", // of the saved rollouts
  rollout: "", // the one that is open
  talk: false, // it is shown as a conversation
  turn: -1, // of the conversation; none
  more: false, // histograms of all metrics
  runs: "", // names of the runs that are compared, with // between them
  over: "step", // x axis of their curves: step, time, tokens
  example: "", // environment//example that is compared
  attempt: 0, // at it
  window: "", // 0:60000, milliseconds of the run that its time line shows
};

/** A change of these is a new place, to which the back button returns. */
const PLACES = new Set(["view", "step", "record", "talk"]);

/** @param {State} state */
export function serialise(state) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (name === "view" || value === /** @type {any} */ (DEFAULTS)[name]) continue;
    query.set(name, typeof value === "boolean" ? (value ? "1" : "0") : String(value));
  }
  const rest = query.toString();
  return `#${state.view}${rest ? `?${rest}` : ""}`;
}

/** What is unknown or malformed is left at its default. @param {string} hash @returns {State} */
export function parse(hash) {
  const [view, rest = ""] = hash.replace(/^#/, "").split("?", 2);
  const query = new URLSearchParams(rest);
  const state = /** @type {any} */ ({ ...DEFAULTS, view: view || DEFAULTS.view });
  for (const [name, text] of query) {
    if (!(name in DEFAULTS) || name === "view") continue;
    const kind = typeof (/** @type {any} */ (DEFAULTS)[name]);
    if (kind === "number") {
      const number = Number(text);
      if (Number.isInteger(number)) state[name] = number;
    } else state[name] = kind === "boolean" ? text === "1" : text;
  }
  return state;
}

export class Store {
  state = parse(location.hash);

  /** @type {((state: State, changed: Set<string>) => void)[]} */
  listeners = [];

  constructor() {
    for (const event of ["hashchange", "popstate"]) window.addEventListener(event, () => this.adopt(parse(location.hash)));
  }

  /** @param {(state: State, changed: Set<string>) => void} listener */
  subscribe(listener) { this.listeners.push(listener); }

  /** @param {Partial<State>} changes @param {{replace?: boolean}} [options] */
  set(changes, { replace = false } = {}) {
    const isPlace = Object.entries(changes).some(([name, value]) => PLACES.has(name) && value !== /** @type {any} */ (this.state)[name]);
    const next = { ...this.state, ...changes };
    const hash = serialise(next);
    try {
      if (hash !== serialise(this.state)) history[isPlace && !replace ? "pushState" : "replaceState"](null, "", hash);
    } catch { /* a sandboxed frame has no history */ }
    this.adopt(next);
  }

  /** @param {State} next */
  adopt(next) {
    const before = /** @type {any} */ (this.state);
    const changed = new Set(Object.keys(next).filter((name) => /** @type {any} */ (next)[name] !== before[name]));
    this.state = next;
    if (changed.size) for (const listener of this.listeners) listener(next, changed);
  }
}

// What the keyboard does: one table, which the help shows, too.

/** `inList`: has a meaning in a list of runs, too. @type {{keys: string[], shown: string, what: string, inList?: boolean, run: (app: any, key: string) => void}[]} */
export const BINDINGS = [
  { keys: ["j", "k"], shown: "j k", what: "next, previous record or rollout", run: (app, key) => app.moveRecord(key === "j" ? 1 : -1) },
  { keys: ["l", "h"], shown: "l h", what: "next, previous step", run: (app, key) => app.moveStep(key === "l" ? 1 : -1) },
  { keys: ["n", "N"], shown: "n N", what: "next, previous outlier of the colouring, or turn of a conversation", run: (app, key) => app.moveOutlier(key === "n" ? 1 : -1) },
  { keys: ["ArrowRight", "ArrowLeft"], shown: "→ ←", what: "next, previous token", run: (app, key) => app.moveToken(key === "ArrowRight" ? 1 : -1) },
  { keys: ["g"], shown: "g", what: "the group of this record", run: (app) => app.go({ view: "group" }) },
  { keys: ["r"], shown: "r", what: "this record", run: (app) => app.go({ view: "record" }) },
  { keys: ["v"], shown: "v", what: "the conversation of this record or rollout", run: (app) => app.openConversation() },
  { keys: ["s"], shown: "s", what: "this step", run: (app) => app.go({ view: "step" }) },
  { keys: ["w"], shown: "w", what: "its worst tokens", run: (app) => app.go({ view: "worst" }) },
  { keys: ["1", "2", "3", "4", "5", "6", "7", "8", "9"], shown: "1 … 9", what: `colour by ${METRICS.filter(({ shortcut }) => shortcut).map(({ label }) => label[0].toLowerCase() + label.slice(1)).join(", ")}`, run: (app, key) => app.colourBy(Number(key) - 1) },
  { keys: ["m"], shown: "m", what: "show or hide masks", run: (app) => app.go({ masks: !app.store.state.masks }) },
  { keys: ["t"], shown: "t", what: "tokens as text or as a table", run: (app) => app.go({ table: !app.store.state.table }) },
  { keys: ["/"], shown: "/", what: "search", inList: true, run: (app) => (app.view?.find ?? app.topBar?.search).focus() },
  { keys: ["f"], shown: "f", what: "filter", run: (app) => app.topBar?.filter.focus() },
  { keys: ["y"], shown: "y", what: "copy the address of the record or token", run: (app) => app.copyId() },
  { keys: ["c"], shown: "c", what: "copy the record as JSON", run: (app) => app.copyRecord() },
  { keys: ["d"], shown: "d", what: "dark or light", inList: true, run: (app) => app.switchTheme() },
  { keys: ["?"], shown: "?", what: "this help", inList: true, run: (app) => app.toggleHelp() },
  { keys: ["Escape"], shown: "Esc", what: "close the help, show all steps, unpin the token", inList: true, run: (app) => app.escape() },
];

/** @param {any} app */
export function listenForKeys(app) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = /** @type {HTMLElement} */ (event.target);
    if (target.closest?.("input, select, textarea") && event.key !== "Escape") return;
    if (event.key.startsWith("Arrow") && target.closest?.("[data-arrows]") === null && app.store.state.view !== "record") return;
    const binding = BINDINGS.find(({ keys }) => keys.includes(event.key));
    if (!binding || (app.run?.head.runs && !binding.inList)) return;
    event.preventDefault();
    binding.run(app, event.key);
  });
}
