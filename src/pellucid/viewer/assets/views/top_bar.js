// The bar above every view: which view, which step, which environment, search and filter.

import { choicesOf } from "../data/run.js";
import { parseFilter } from "../data/select.js";
import { byId, element } from "../draw/dom.js";
import { plural } from "../draw/format.js";
import { SearchResults, parseQuery } from "./search.js";

const TITLES = /** @type {[string, string, string][]} */ ([
  ["runs", "Runs", "all runs"],
  ["compare", "Compare", "the selected runs, laid over each other"],
  ["run", "Run", "the whole run over its steps, and where its tokens went"],
  ["timeline", "Timeline", "who worked and who waited: why the run is not faster"],
  ["rollouts", "Rollouts", "every saved rollout: what became of it, and why"],
  ["step", "Step", "the records of one step (s)"],
  ["record", "Record", "one sequence, token by token (r)"],
  ["group", "Group", "all rollouts of one example (g)"],
  ["across", "Across steps", "the same example over the steps"],
  ["worst", "Worst tokens", "the tokens that stand out (w)"],
  ["whatif", "What if", "other bounds of the trust region"],
]);

export class TopBar {
  /** @param {any} app */
  constructor(app) {
    this.app = app;
    this.tabs = new Map(TITLES.filter(([name]) => app.views.includes(name)).map(([name, title, about]) => [name, element("button", { type: "button", title: about, onclick: () => app.go({ view: name }) }, title)]));
    byId("views").replaceChildren(...this.tabs.values());
    this.stepSelect = element("select", { "aria-label": "Step", onchange: () => app.go({ step: Number(this.stepSelect.value) }) });
    this.envSelect = element("select", { "aria-label": "Environment", onchange: () => app.go({ env: this.envSelect.value }) });
    this.rankSelect = element("select", { "aria-label": "Rank", title: "records of one data rank", onchange: () => app.go({ rank: Number(this.rankSelect.value) }) });
    this.weightsSelect = element("select", { "aria-label": "Weights", title: "records by the oldest weights that had a part in them", onchange: () => app.go({ weights: this.weightsSelect.value }) });
    this.search = element("input", { type: "search", title: "text, /a pattern/, #123 or #123 45: token ids", "aria-label": "Search", spellcheck: "false", autocomplete: "off" });
    this.within = element("select", { "aria-label": "Search in", onchange: () => app.go({ within: this.within.value }) },
      ...["record", "step", "run"].map((name) => element("option", { value: name }, `in ${name}`)));
    this.filter = element("input", { type: "search", title: "tokens that fulfil an expression: kl > 0.5 & adv < 0 & env = math", "aria-label": "Filter", spellcheck: "false", autocomplete: "off" });
    this.filter.hidden = Boolean(app.run.head.runs); // the list has a field of its own
    for (const [input, hint, short] of /** @type {[any, string, string][]} */ ([[this.search, "search text, /regex/, #id", "search"], [this.filter, "filter: kl > 0.5 & adv < 0", "filter"]])) {
      input.placeholder = short; // the whole hint where there is room for it
      new ResizeObserver(() => { input.placeholder = input.clientWidth > 200 ? hint : short; }).observe(input);
    }
    this.fault = element("div", { class: "fault", role: "alert", hidden: true });
    this.results = new SearchResults(app);
    this.live = element("span", { class: "live", hidden: !app.run.head.writing, title: "something writes to the run; this page follows it" }, "live");
    this.search.addEventListener("change", () => this.submit("search", this.search.value));
    this.search.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => { if (event.key === "Enter") { this.submit("search", this.search.value); if (app.state.view !== "rollouts") this.results.run(); } });
    this.filter.addEventListener("change", () => this.submit("filter", this.filter.value));
    byId("tools").replaceChildren(
      this.stepper = element("span", { class: "stepper" },
        element("button", { type: "button", "aria-label": "previous step", title: "previous step (h)", onclick: () => app.moveStep(-1) }, "‹"),
        this.stepSelect,
        element("button", { type: "button", "aria-label": "next step", title: "next step (l)", onclick: () => app.moveStep(1) }, "›")),
      this.envSelect, this.rankSelect, this.weightsSelect, element("span", { class: "search", hidden: app.run.head.runs }, this.search, this.within), this.filter, element("span", { class: "corner" }, this.live,
      element("button", { type: "button", class: "quiet", title: "dark or light (d)", "aria-label": "dark or light", onclick: () => app.switchTheme() }, "◐"),
      element("button", { type: "button", class: "quiet", title: "keys (?)", "aria-label": "help", onclick: () => app.toggleHelp() }, "?")),
      this.fault, this.results.root);
  }

  /** @param {"search" | "filter"} what @param {string} text */
  submit(what, text) {
    this.fault.hidden = true;
    try {
      if (what === "filter" && text.trim()) parseFilter(text);
      if (what === "search") parseQuery(text);
    } catch (error) {
      this.fault.textContent = /** @type {Error} */ (error).message;
      this.fault.hidden = false;
      return;
    }
    this.app.go({ [what]: text });
  }

  /** @param {import("../state.js").State} state */
  update(state) {
    for (const [name, tab] of this.tabs) {
      if (name !== state.view) tab.removeAttribute("aria-current");
      else if (!tab.hasAttribute("aria-current")) {
        tab.setAttribute("aria-current", "page");
        const bar = byId("views");
        if (bar.scrollWidth > bar.clientWidth) bar.scrollLeft = tab.offsetLeft - bar.offsetLeft - 40;
      }
    }
    this.stepper.hidden = !this.app.run.steps.length;
    this.within.hidden = state.view === "rollouts";
    this.fill(this.stepSelect, this.app.run.steps.map((/** @type {number} */ step) => [String(step), `step ${step}`]), String(state.step));
    this.fill(this.envSelect, [["", "all envs"], ...this.app.run.envs.map((/** @type {string} */ env) => [env, env || "no name"])], state.env);
    this.envSelect.hidden = this.app.run.envs.length < 2;
    const { rank, weights } = state; // shown where there are several, or one is asked for
    if (this.head !== this.app.run.head) {
      this.head = this.app.run.head;
      this.choices = choicesOf(this.head);
    }
    const { ranks, versions, ages } = /** @type {ReturnType<typeof choicesOf>} */ (this.choices);
    this.fill(this.rankSelect, [["-1", "all ranks"], ...ranks.map((one) => /** @type {[string, string]} */ ([String(one), `rank ${one}`]))], String(rank));
    this.rankSelect.hidden = ranks.length < 2 && rank < 0;
    this.fill(this.weightsSelect, [["", "all weights"], ...ages.map((age) => /** @type {[string, string]} */ ([`age${age}`, age ? `${plural(age, "step")} old` : "of this step"])),
      ...versions.map((version) => /** @type {[string, string]} */ ([`v${version}`, `version ${version}`]))], weights);
    this.weightsSelect.hidden = versions.length < 2 && !weights;
    this.within.value = state.within;
    if (document.activeElement !== this.search) this.search.value = state.search;
    if (document.activeElement !== this.filter) this.filter.value = state.filter;
    this.results.update(state);
  }

  /** @param {HTMLSelectElement} select @param {[string, string][]} choices @param {string} value */
  fill(select, choices, value) {
    const key = choices.map(([name]) => name).join("\u0000");
    if (select.dataset.key !== key) {
      select.dataset.key = key;
      select.replaceChildren(...choices.map(([name, text]) => element("option", { value: name }, text)));
    }
    select.value = value;
  }

  /** @param {boolean} isUp */
  connected(isUp) {
    this.live.hidden = isUp && !this.app.run.head.writing;
    this.live.textContent = isUp ? "live" : "server gone";
    this.live.classList.toggle("gone", !isUp);
  }
}
