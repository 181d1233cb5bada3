// Puts the page together: header, table, record, keys. The hash is `#record` or `#record/token`.

const CURVE = { width: 250, height: 44, left: 30 };

function drawHeader(head) {
  document.title = `${head.name}, pellucid`;
  byId("run-name").textContent = head.name;
  const { steps, records, tokens } = head.totals;
  byId("totals").textContent = [[steps, "step"], [records, "record"], [tokens, "token"]]
    .map(([number, noun]) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`).join(" · ");
  byId("notes").replaceChildren(...head.notes.map((note) => element("p", {}, note)));
  if (head.ledger) drawLedger(head.ledger);
  if (head.reward) drawCurve(head.reward);
}

function drawLedger(ledger) {
  byId("ledger").hidden = false;
  const title = element("h3", {}, "Ledger ");
  byId("ledger").append(title);
  if (ledger.error) return title.append(element("span", { class: "fault" }, ledger.error));
  const running = ledger.running.length ? `, ${ledger.running.join(", ")} not closed` : "";
  title.append(ledger.differences.length
    ? element("span", { class: "fault" }, `does not balance: ${ledger.differences.join("; ")}`)
    : element("span", {}, `${count(ledger.sampled)} sampled tokens, balanced${running}`));
  const parts = ledger.states.filter(([, tokens]) => tokens > 0);
  const bar = element("div", { class: "bar", "aria-hidden": "true" }, ...parts.map(([state, tokens]) => {
    const part = element("i", { class: state });
    part.style.flexGrow = tokens;
    return part;
  }));
  const total = parts.reduce((sum, [, tokens]) => sum + tokens, 0);
  const items = ledger.states.map(([state, tokens]) => element("li", {},
    element("i", { class: `key ${state}` }), `${state.replaceAll("_", " ")} ${count(tokens)} `,
    element("span", {}, share(tokens / total))));
  byId("ledger").append(bar, element("ul", { class: "states" }, ...items));
}

function share(part) {
  return part > 0 && part < 0.001 ? "< 0.1 %" : `${(100 * part).toFixed(1)} %`;
}

function drawCurve({ steps, values }) {
  const { width, height, left } = CURVE;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (step) => left + ((step - steps[0]) / (steps.at(-1) - steps[0] || 1)) * (width - left);
  const y = (value) => height - ((value - low) / (high - low || 1)) * height;
  const points = steps.map((step, index) => `${x(step).toFixed(1)},${y(values[index]).toFixed(1)}`).join(" ");
  const last = values.at(-1);
  const label = `from ${short(values[0], 3)} to ${short(last, 3)}`;
  const viewBox = `0 -3 ${width} ${height + 16}`;
  const drawing = svg("svg", { width, height: height + 16, viewBox, role: "img", "aria-label": `Reward ${label}` });
  drawing.append(
    svg("line", { class: "axis", x1: left, x2: width, y1: height, y2: height }),
    svg("polyline", { class: "line", points }),
    svg("circle", { cx: x(steps.at(-1)), cy: y(last), r: 2.5 }),
    svg("text", { x: left - 6, y: 7, "text-anchor": "end" }, short(high, 3)),
    svg("text", { x: left - 6, y: height, "text-anchor": "end" }, short(low, 3)),
    svg("text", { x: left, y: height + 12 }, `step ${count(steps[0])}`),
    svg("text", { x: width, y: height + 12, "text-anchor": "end" }, count(steps.at(-1))));
  byId("curve").append(element("figcaption", {}, "Reward ", element("span", {}, label)), drawing);
  byId("curve").hidden = false;
}

function drawLegend(scale) {
  const ramp = element("div", { class: "ramp" });
  for (let index = 0; index < scale.classes; index += 1) ramp.append(element("i", { class: `kl-${index}` }));
  const range = Math.log(scale.high / scale.low);
  for (const tick of [...decades(scale), scale.high]) {
    const bound = { [scale.low]: "≤ ", [scale.high]: "≥ " }[tick] ?? "";
    const label = element("span", {}, bound + short(tick));
    label.style.left = `${(100 * Math.log(tick / scale.low)) / range}%`;
    ramp.append(label);
  }
  const shape = (style, words) =>
    element("span", {}, element("span", { class: `token ${style}` }, "abc"), ` ${words}`);
  const title = element("div", {}, element("div", {}, "Mismatch KL of trainable tokens, log scale"), ramp);
  byId("legend").replaceChildren(title, element("div", { class: "shapes" },
    shape("kl-3 masked-high", "masked high"),
    shape("kl-3 masked-low", "masked low"),
    shape("plain", "not trainable")));
}

// Powers of ten from `low` that leave room for the label of `high`.
function decades({ low, high }) {
  const ticks = [];
  for (let tick = low; tick < high / 4; tick *= 10) ticks.push(tick);
  return ticks;
}

async function start() {
  const data = JSON.parse(byId("data").textContent);
  const head = await inflate(data.head);
  drawHeader(head);
  drawLegend(head.scale);
  let wanted = parseHash(location.hash, data.records.length);
  let opened = 0;
  const view = new RecordView(head, (token) => history.replaceState(null, "", `#${view.index}/${token}`));
  const table = new RecordTable(head, async (index) => {
    const token = wanted.record === index ? wanted.token : null;
    wanted = { record: null, token: null };
    const turn = ++opened;
    const record = await inflate(data.records[index]);
    if (turn === opened) view.show(index, record, token);
  });
  const keys = {
    j: () => table.move(1),
    k: () => table.move(-1),
    ArrowRight: () => view.move(1),
    ArrowLeft: () => view.move(-1),
  };
  document.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target instanceof HTMLSelectElement) return;
    event.preventDefault();
    act();
  });
  window.addEventListener("hashchange", () => {
    wanted = parseHash(location.hash, data.records.length);
    if (wanted.record !== null) table.choose(wanted.record);
  });
  table.choose(wanted.record ?? 0);
}

function parseHash(hash, numRecords) {
  const [record, token] = hash.slice(1).split("/").map((part) => (/^\d+$/.test(part) ? Number(part) : null));
  if (record === null || record >= numRecords) return { record: null, token: null };
  return { record, token: token ?? null };
}

start().catch((error) => {
  byId("totals").textContent = `This page could not open its data: ${error.message}`;
  throw error;
});
