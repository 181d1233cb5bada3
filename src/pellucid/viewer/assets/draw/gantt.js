// Spans over time in lanes, on a canvas. Only what is in sight is drawn, and no pixel of a lane more than once.

import { canvasOf, label, themeColour } from "./dom.js";

/**
 * @typedef {{name: string, capacity: number | null, lives: [number, number][], lived_s: number, seconds: Record<string, number>, rest_s: number,
 *   on_path: Record<string, number>, phase: string[], start: number[], end: number[], step: number[], load: (number | null)[], named: Record<string, string>}} Lane
 * @typedef {{lane: string[], phase: string[], start: number[], end: number[], step: number[]}} Path
 * @typedef {{start: number[], end: number[]}} Spans ascending, none beside another; milliseconds
 * @typedef {{at: number, left: number, right: number}} Bar index of a span, and where it is drawn
 */

export const AXIS = 22;
export const LANE = 46;
const TITLE = 15;
const BAR = LANE - TITLE - 8;

/** Colours by what is done: training, sampling, weights, environments each have one; waiting is hatched. @type {Record<string, string>} */
export const COLOURS = {
  compute: "series-1", pack: "series-6", optimizer: "series-3", publish: "series-4", write: "series-4", observe: "series-6", validate: "series-5", checkpoint: "series-5",
  send: "series-6", sample: "series-2", environment: "series-5", decode: "series-2", load: "series-4", update: "series-4", evaluate: "series-3",
};

/**
 * The bars to draw for the spans between two times: at most one per pixel. Of spans that share a pixel, the longest stands for all.
 *
 *   windowed({start: [0, 10, 10.2], end: [10, 10.2, 10.5]}, 0, 100, 100)   [{at: 0, left: 0, right: 10}, {at: 2, left: 10, right: 11}]
 *
 * @param {Spans} spans @param {number} from @param {number} to @param {number} width @returns {Bar[]}
 */
export function windowed({ start, end }, from, to, width) {
  const scale = width / (to - from);
  /** @type {Bar[]} */
  const bars = [];
  let pixel = -1;
  for (let i = firstEndingAfter(end, from); i < start.length && start[i] < to; i += 1) {
    const left = Math.max(0, (start[i] - from) * scale);
    const right = Math.min(width, (end[i] - from) * scale);
    if (right - left >= 1) {
      bars.push({ at: i, left, right });
      pixel = -1;
    } else if (Math.floor(left) !== pixel) {
      pixel = Math.floor(left);
      bars.push({ at: i, left: pixel, right: pixel + 1 });
    } else {
      const last = bars[bars.length - 1];
      if (end[i] - start[i] > end[last.at] - start[last.at]) last.at = i;
    }
  }
  return bars;
}

/** @param {number[]} end @param {number} time */
export function firstEndingAfter(end, time) {
  let [low, high] = [0, end.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}

/** The span at a time, or -1. @param {Spans} spans @param {number} time @param {number} [slack] */
export function spanAt({ start, end }, time, slack = 0) {
  const at = firstEndingAfter(end, time - slack);
  return at < start.length && start[at] <= time + slack ? at : -1;
}

/** Round times for an axis, milliseconds. @param {number} from @param {number} to @param {number} most how many @returns {number[]} */
export function ticksOf(from, to, most) {
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 3e4, 6e4, 12e4, 3e5, 6e5, 12e5, 18e5, 36e5, 72e5, 216e5, 432e5, 864e5];
  const step = steps.find((one) => (to - from) / one <= most) ?? Math.ceil((to - from) / most / 864e5) * 864e5;
  const found = [];
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) found.push(time);
  return found;
}

/** 0.25 s, 12.5 s, 3:05, 1:02:03 since the start. @param {number} ms @param {number} [span] of the axis: decides how precise */
export function clock(ms, span = ms) {
  if (ms < 6e4 && span < 6e5) return `${Number((ms / 1000).toFixed(span < 2000 ? 3 : span < 2e4 ? 1 : 0))} s`;
  const seconds = Math.round(ms / 1000);
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  const two = (/** @type {number} */ number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(seconds % 60)}` : `${minutes}:${two(seconds % 60)}`;
}

/** @param {{lanes: Lane[], path: Path, from: number, to: number, width: number, canvas: HTMLCanvasElement, focus: {lane: number, at: number} | null, waits: Set<string>}} options */
export function drawGantt({ lanes, path, from, to, width, canvas, focus, waits }) {
  const height = AXIS + lanes.length * LANE;
  const { context } = canvasOf(width, height, canvas);
  const place = (/** @type {number} */ time) => ((time - from) / (to - from)) * width;
  const hatch = hatched(context, themeColour("edge"));
  for (const time of ticksOf(from, to, Math.max(2, Math.floor(width / 90)))) {
    const x = Math.round(place(time)) + 0.5;
    context.strokeStyle = themeColour("rule");
    context.beginPath();
    context.moveTo(x, AXIS - 4);
    context.lineTo(x, height);
    context.stroke();
    if (x < width - 30) label(context, clock(time, to - from), x + 3, 12);
  }
  lanes.forEach((lane, row) => {
    const top = AXIS + row * LANE + TITLE;
    label(context, lane.name, 1, top - 4);
    for (const [start, end] of lane.lives) {
      context.fillStyle = themeColour("panel");
      context.fillRect(place(start), top, Math.max(1, place(end) - place(start)), BAR);
    }
    for (let life = 1; life < lane.lives.length; life += 1) drawStop(context, place(lane.lives[life - 1][1]), place(lane.lives[life][0]), top, width);
    for (const { at, left, right } of windowed(lane, from, to, width)) drawBar(context, lane, at, left, right, top, waits, hatch);
    if (focus?.lane === row) {
      context.strokeStyle = themeColour("ink");
      context.lineWidth = 2;
      const [left, right] = [place(lane.start[focus.at]), place(lane.end[focus.at])];
      context.strokeRect(left - 1, top - 2, Math.max(3, right - left) + 2, BAR + 4);
      context.lineWidth = 1;
    }
  });
  drawPath(context, lanes, path, from, to, width);
}

/** @param {CanvasRenderingContext2D} context @param {Lane} lane @param {number} at @param {number} left @param {number} right @param {number} top
 * @param {Set<string>} waits @param {CanvasPattern | null} hatch */
function drawBar(context, lane, at, left, right, top, waits, hatch) {
  const phase = lane.phase[at];
  const wide = right - left > 3 ? 0.5 : 0; // a hairline between bars that can be told apart
  if (waits.has(phase)) {
    context.fillStyle = hatch ?? themeColour("edge");
    context.fillRect(left, top, right - left - wide, BAR);
    return;
  }
  const load = lane.load[at];
  const share = lane.capacity && load !== null && phase === "decode" ? Math.min(1, Math.max(0.08, load / lane.capacity)) : 1;
  context.fillStyle = themeColour(COLOURS[phase] ?? "edge");
  if (share < 1) {
    context.globalAlpha = 0.25;
    context.fillRect(left, top, right - left - wide, BAR);
    context.globalAlpha = 1;
  }
  context.fillRect(left, top + BAR * (1 - share), right - left - wide, BAR * share);
  const text = String(lane.step[at]);
  if (lane.step[at] >= 0 && share === 1 && right - left > 9 + 7 * text.length) {
    context.fillStyle = themeColour("paper");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "left";
    context.fillText(text, left + 4, top + BAR / 2 + 4);
  }
}

/** Between two starts of a process. @param {CanvasRenderingContext2D} context @param {number} left @param {number} right @param {number} top @param {number} width */
function drawStop(context, left, right, top, width) {
  const [from, to] = [Math.max(0, left), Math.min(width, right)];
  if (to <= from) return;
  context.strokeStyle = themeColour("bad");
  context.setLineDash([3, 3]);
  context.strokeRect(from + 0.5, top + 0.5, Math.max(1, to - from - 1), BAR - 1);
  context.setLineDash([]);
  if (to - from > 52) label(context, "stopped", (from + to) / 2, top + BAR / 2 + 4, "center");
}

const FAR = 24; // pixels between two bars of the path: the run was stopped there

/** A line below what is on the critical path, and where the path changes lanes. @param {CanvasRenderingContext2D} context @param {Lane[]} lanes @param {Path} path
 * @param {number} from @param {number} to @param {number} width */
function drawPath(context, lanes, path, from, to, width) {
  const rows = new Map(lanes.map(({ name }, row) => [name, row]));
  const bottom = (/** @type {number} */ at) => AXIS + (rows.get(path.lane[at]) ?? 0) * LANE + TITLE + BAR + 3;
  context.fillStyle = themeColour("ink");
  const bars = windowed(path, from, to, width);
  for (const { at, left, right } of bars) context.fillRect(left, bottom(at) - 1, right - left, 3);
  const visible = bars.filter(({ left, right }) => right - left >= 3); // a moment in another lane is no change
  if (visible.length > width / 4) return;
  for (const [i, { at, right }] of visible.entries()) {
    const next = visible[i + 1];
    if (!next || path.lane[next.at] === path.lane[at] || next.left - right > FAR) continue;
    const [low, high] = [bottom(at), bottom(next.at)].sort((a, b) => a - b);
    context.fillRect((right + next.left) / 2 - 0.5, low - 1, 1, high - low + 3);
  }
}

/** @param {CanvasRenderingContext2D} context @param {string} colour @returns {CanvasPattern | null} */
function hatched(context, colour) {
  const { canvas, context: tile } = canvasOf(6, 6);
  tile.strokeStyle = colour;
  tile.beginPath();
  for (const shift of [-6, 0, 6]) { tile.moveTo(shift, 6); tile.lineTo(shift + 6, 0); }
  tile.stroke();
  const pattern = context.createPattern(canvas, "repeat");
  const density = window.devicePixelRatio || 1;
  pattern?.setTransform(new DOMMatrix().scale(1 / density));
  return pattern;
}
