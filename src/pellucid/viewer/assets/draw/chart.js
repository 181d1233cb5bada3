// Lines over steps or positions, by uPlot, in the page's colours.

import { themeColour } from "./dom.js";
import { percent, short } from "./format.js";

/** @type {any} */
let uPlot;
// What uPlot gets to know of `Intl`: its numbers and dates are never shown, and the real ones take long to load.
const NO_INTL = { NumberFormat: class { format = String; }, DateTimeFormat: class { resolvedOptions() { return { timeZone: "UTC" }; } } };

/**
 * @typedef {{label: string, values: ArrayLike<number | null>, colour: string, width?: number, dash?: number[]}} Line
 * @typedef {{height: number, width?: number, x: ArrayLike<number>, lines: Line[], log?: boolean, sync?: string, spans?: [number, number][],
 *   points?: boolean, marker?: () => number | null, onClick?: (x: number) => void, onBrush?: (low: number, high: number) => void,
 *   onHover?: (index: number | null) => void, onReset?: () => void, range?: [number, number] | null, label?: string, percent?: boolean,
 *   fractions?: boolean, unit?: string, axis?: {text(x: number): string, ticks?(low: number, high: number): number[]}}} ChartOptions
 * `range`: of the x axis, whose ticks are whole numbers unless `fractions`, or as `axis` says; `unit`: what they count; `label`: makes the chart usable by keyboard, and says what it is.
 */

const SECOND_CLICK_MS = 260;
/** Between the ticks of counts. */
const WHOLE = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
/** Charts share the cursor, not what is dragged. */
const SHARED = { pub: (/** @type {string} */ type) => type.startsWith("mousemove") || type === "mouseleave", sub: () => true };

/** @param {HTMLElement} root @param {ChartOptions} options @returns {any} */
export function lineChart(root, options) {
  const { x, lines, log = false, height } = options;
  const axis = { stroke: () => themeColour("muted"), font: "11px system-ui, sans-serif", ticks: { show: false },
    grid: { stroke: () => themeColour("rule"), width: 1 } };
  const data = /** @type {any} */ ([Array.from(x), ...lines.map(({ values }) => Array.from(values, (value) =>
    (value === null || Number.isNaN(value) || (log && value <= 0) ? null : value)))]);
  const areWhole = data.slice(1).every((/** @type {(number | null)[]} */ values) => values.every((value) => value === null || Number.isInteger(value)));
  uPlot ??= /** @type {any} */ (window).loadUPlot(NO_INTL);
  const chart = new uPlot({
    width: Math.max(120, options.width ?? root.clientWidth),
    height,
    padding: [8, 10, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: Boolean(options.onBrush), y: false, setScale: false },
      sync: options.sync ? { key: options.sync, filters: SHARED } : undefined, points: { size: 6 } },
    scales: { x: { time: false, range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => widened(options.range ?? [low, high]) },
      y: log ? { distr: 3, range: logRange } : { range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => padded(low, high) } },
    axes: [
      { ...axis, size: 26, gap: 7, ...(options.axis?.ticks ? { splits: (/** @type {any} */ _, /** @type {number} */ _axis, /** @type {number} */ low, /** @type {number} */ high) => options.axis?.ticks?.(low, high) } : {}),
        values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => named(options.unit, ticks.map((tick) => (options.axis ? options.axis.text(tick) : options.fractions ? short(tick) : Number.isInteger(tick) ? String(tick) : ""))), grid: { show: false } },
      { ...axis, size: 52, space: 26, ...(log ? { splits: decades, filter: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks } : areWhole ? { incrs: WHOLE } : {}), values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map((tick) => (tick === null ? "" : options.percent ? percent(tick).replace(".0 ", " ") : short(tick, log ? 1 : 3))) },
    ],
    series: [{}, ...lines.map((line) => ({
      label: line.label, stroke: () => themeColour(line.colour), width: line.width ?? 1.5, dash: line.dash, spanGaps: true, points: { show: options.points ?? x.length < 40, size: 4 } }))],
    hooks: {
      drawClear: [(/** @type {any} */ plot) => shadeSpans(plot, options.spans ?? [])],
      draw: [(/** @type {any} */ plot) => drawMarker(plot, options.marker?.())],
      setCursor: [(/** @type {any} */ plot) => options.onHover?.(plot.cursor.idx ?? null)],
      setSelect: [(/** @type {any} */ { select: { left, width }, posToVal }) => { if (width >= 3) options.onBrush?.(posToVal(left, "x"), posToVal(left + width, "x")); }],
    },
  }, data, root);
  if (options.onClick) listenForClicks(chart, data[0], options);
  if (options.label) listenForKeys(root, chart, data[0], options);
  const observer = new ResizeObserver(() => {
    if (!root.isConnected) { observer.disconnect(); chart.destroy(); return; }
    if (root.clientWidth > 0 && root.clientWidth !== chart.width) chart.setSize({ width: root.clientWidth, height });
  });
  observer.observe(root);
  return chart;
}

/** The first of some ticks tells what all of them are. @param {string | undefined} unit @param {string[]} texts */
function named(unit, texts) {
  const first = texts.findIndex(Boolean);
  return unit ? texts.map((text, i) => (i === first ? `${unit} ${text}` : text)) : texts;
}

/** @param {[number, number]} range */
const widened = ([low, high]) => (low === high ? [low - 1, high + 1] : [low, high]);

/** @param {any} chart @param {number[]} x @param {ChartOptions} options */
function listenForClicks(chart, x, { onClick, onReset }) {
  let pressedAt = 0;
  let waiting = 0;
  chart.over.addEventListener("mousedown", (/** @type {MouseEvent} */ event) => { pressedAt = event.clientX; });
  chart.over.addEventListener("click", (/** @type {MouseEvent} */ event) => {
    const { idx } = chart.cursor;
    if (Math.abs(event.clientX - pressedAt) >= 4 || idx === null || idx === undefined) return;
    // Where a second click means something, the first one waits for it.
    clearTimeout(waiting);
    if (onReset) waiting = setTimeout(() => onClick?.(x[idx]), SECOND_CLICK_MS);
    else onClick?.(x[idx]);
  });
  if (onReset) chart.over.addEventListener("dblclick", () => { clearTimeout(waiting); onReset(); });
}

/** Arrows move the cursor, with Shift they select; Enter opens the place, or looks closer at what is selected.
 * @param {HTMLElement} root @param {any} chart @param {number[]} x @param {ChartOptions} options */
function listenForKeys(root, chart, x, { label, onClick, onBrush, onHover }) {
  let [at, from] = [-1, -1];
  for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", `${label}: arrows move, Shift selects, Enter opens`]]) root.setAttribute(name, value);
  root.addEventListener("keydown", (event) => {
    const change = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -x.length, End: x.length })[event.key];
    if (change) {
      const [first, last] = [x.findIndex((value) => value >= chart.scales.x.min), x.findLastIndex((value) => value <= chart.scales.x.max)];
      if (event.shiftKey && from < 0) from = Math.max(first, at);
      if (!event.shiftKey) from = -1;
      at = Math.min(last, Math.max(first, (at >= 0 ? at : change > 0 ? first - 1 : last + 1) + change));
      const place = (/** @type {number} */ index) => chart.valToPos(x[index], "x");
      chart.setCursor({ left: place(at), top: 10 });
      onHover?.(at);
      const [low, high] = [Math.min(from, at), Math.max(from, at)];
      chart.setSelect({ left: from < 0 ? 0 : place(low), width: from < 0 ? 0 : place(high) - place(low), top: 0, height: chart.over.clientHeight }, false);
    } else if (event.key === "Enter" && at >= 0) {
      if (from >= 0 && from !== at) onBrush?.(x[Math.min(from, at)], x[Math.max(from, at)]); else onClick?.(x[at]);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
}

/** At most six decades, up to the highest value. @param {any} _plot @param {number} low @param {number} high */
function logRange(_plot, low, high) {
  if (!(high > 0)) return [0.1, 1];
  const top = high * 1.3;
  return [Math.max(low > 0 ? low / 1.3 : top * 1e-6, top * 1e-6), top];
}

/** Powers of ten, every one or every few; 1, 2 and 5 times of them where there is only one. @param {any} _plot @param {number} _axis @param {number} low @param {number} high */
function decades(_plot, _axis, low, high) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const stride = Math.max(1, Math.ceil((last - first + 1) / 5));
  const powers = [];
  for (let power = first; power <= last; power += stride) powers.push(10 ** power);
  if (powers.length > 1) return powers;
  const between = []; // 2, 5, 10, 20, … where there is no decade to read
  for (let power = first - 1; power <= last + 1; power += 1) between.push(...[1, 2, 5].map((digit) => digit * 10 ** power));
  return between.filter((tick) => tick >= low && tick <= high);
}

/** @param {number} low @param {number} high */
function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

/** @param {any} plot @param {[number, number][]} spans */
function shadeSpans(plot, spans) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.fillStyle = themeColour("shade");
  for (const [start, end] of spans) {
    const left = plot.valToPos(start - 0.5, "x", true);
    const right = plot.valToPos(end - 0.5, "x", true);
    const from = Math.max(bbox.left, left);
    ctx.fillRect(from, bbox.top, Math.min(bbox.left + bbox.width, right) - from, bbox.height);
  }
  ctx.restore();
}

/** @param {any} plot @param {number | null | undefined} at */
function drawMarker(plot, at) {
  if (at === null || at === undefined || at < 0) return;
  const { ctx, bbox } = plot;
  const x = plot.valToPos(at, "x", true);
  ctx.save();
  ctx.strokeStyle = themeColour("accent");
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

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
