// Where every sampled token went, as a flow: from the engine over the orchestrator to the trainer, each state
// leaving where it is decided. Widths are tokens.

import { svg } from "./dom.js";
import { count, percent } from "./format.js";

const HEIGHT = 230;
const TOP = 22;
const BAR = 10;
const LABEL_GAP = 19;

/** What each stage decides, in the order in which it leaves. */
export const STAGES = [
  { name: "engine", does: "sampled", states: ["cancelled", "lost", "in_flight"] },
  { name: "orchestrator", does: "received", states: ["eval", "failed_rollout", "dropped_group", "stale", "filtered", "zero_advantage", "rejected"] },
  { name: "trainer", does: "sent", states: ["rolled_back", "truncated", "untrainable", "skipped", "masked", "trained"] },
];

export const MEANING = /** @type {Record<string, string>} */ ({
  eval: "sampled for evaluation", lost: "a process died", cancelled: "sampling was cancelled", failed_rollout: "the rollout failed",
  dropped_group: "its group was dropped", stale: "too old when the batch was formed", filtered: "a filter took it out",
  zero_advantage: "its advantage is 0: no signal", rejected: "invalid", truncated: "beyond seq_len",
  untrainable: "sampled, but masked out by the environment, or trained in another branch", skipped: "in a step whose loss or gradient was not finite",
  masked: "outside the trust region",
  trained: "moved the weights", rolled_back: "trained in a step that a resume discarded", in_flight: "running, queued, or waiting for the next batch",
});

/** @param {Record<string, number>} states @param {number} sampled @param {number} width @param {(state: string) => void} onChoose */
export function sankey(states, sampled, width, onChoose) {
  const total = Math.max(1, sampled);
  const scale = (HEIGHT - TOP - 30) / total;
  const columns = [0, 0.27, 0.54].map((share) => share * (width - 230));
  const right = width - 230;
  const root = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": spoken(states, sampled) });
  const present = [...STAGES].reverse().flatMap(({ states: names }, i) => [...names].reverse().filter((name) => states[name]).map((name) => ({ name, stage: 2 - i })));
  // Ends stand in the order in which they leave, spread so that no two labels collide.
  let next = TOP;
  const ends = new Map(present.map(({ name, stage }) => {
    const size = Math.max(2, states[name] * scale);
    const place = { name, stage, top: next, size };
    next += Math.max(size + 4, LABEL_GAP);
    return [name, place];
  }));
  let remaining = sampled;
  STAGES.forEach((stage, i) => {
    const leaving = stage.states.filter((name) => states[name]);
    const gone = leaving.reduce((sum, name) => sum + states[name], 0);
    const size = remaining * scale;
    if (size > 0) {
      const isRoomy = width > 600;
      root.append(svg("rect", { x: columns[i], y: TOP, width: BAR, height: Math.max(1, size), rx: 2, class: "flow-bar" }),
        ...(isRoomy ? [svg("text", { x: columns[i], y: TOP - 7, class: "flow-stage" }, `${stage.does} ${count(remaining)}`)] : []));
    }
    let at = i === 2 ? TOP : TOP + (remaining - gone) * scale;
    if (i < 2 && remaining - gone > 0) root.append(ribbon(columns[i] + BAR, TOP, columns[i + 1], TOP, (remaining - gone) * scale, "flow-on"));
    for (const name of [...leaving].reverse()) {
      const end = /** @type {any} */ (ends.get(name));
      const band = ribbon(columns[i] + BAR, at, right, end.top, Math.max(1, states[name] * scale), `flow-link flow-${kind(name)}`, `${name}: ${MEANING[name]}`);
      band.addEventListener("click", () => onChoose(name));
      root.append(band);
      at += states[name] * scale;
    }
    remaining -= gone;
  });
  for (const { name, top, size } of ends.values()) {
    const open = (/** @type {Event} */ event) => { if (event.type === "click" || /** @type {KeyboardEvent} */ (event).key === "Enter") onChoose(name); };
    root.append(svg("rect", { x: right, y: top, width: BAR, height: size, rx: 2, class: `flow-end flow-end-${kind(name)}` }),
      svg("text", { x: right + BAR + 8, y: top + Math.min(size, 14) / 2 + 5, class: "flow-label flow-link", tabindex: 0, role: "link", "aria-label": `${name.replaceAll("_", " ")} ${count(states[name])} ${percent(states[name] / total)}`, onclick: open, onkeydown: open },
        svg("tspan", { class: "flow-name" }, name.replaceAll("_", " ")), svg("tspan", { dx: 3 }, ` ${count(states[name])}`), svg("tspan", { dx: 3, class: "flow-share" }, ` ${percent(states[name] / total)}`),
        svg("title", {}, MEANING[name] ?? "")));
  }
  const height = Math.max(HEIGHT, next + 6);
  root.setAttribute("height", String(height));
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return root;
}

/** @param {string} name */
const kind = (name) => (name === "trained" ? "trained" : name === "masked" || name === "untrainable" || name === "truncated" ? "masked" : name === "in_flight" || name === "eval" ? "open" : "lost");

/** @param {number} x @param {number} y @param {number} x2 @param {number} y2 @param {number} size @param {string} name @param {string} [title] */
function ribbon(x, y, x2, y2, size, name, title) {
  const middle = (x + x2) / 2;
  const path = svg("path", { class: `flow ${name}`, d: `M${x},${y} C${middle},${y} ${middle},${y2} ${x2},${y2} L${x2},${y2 + size} C${middle},${y2 + size} ${middle},${y + size} ${x},${y + size} Z` });
  if (title) path.append(svg("title", {}, title));
  return path;
}

/** @param {Record<string, number>} states @param {number} sampled */
function spoken(states, sampled) {
  return `${count(sampled)} sampled tokens: ${Object.entries(states).map(([name, tokens]) => `${count(tokens)} ${name.replaceAll("_", " ")}`).join(", ")}`;
}
