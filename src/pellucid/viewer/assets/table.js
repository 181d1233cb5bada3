// The table of records: sorted and filtered over columns, and only the rows in sight are in the document.

const ROW_HEIGHT = 26;
const MARGIN_ROWS = 8;

const TABLE_COLUMNS = [
  { key: "step", label: "step", width: "44px", show: count, about: "Optimizer step" },
  { key: "env", label: "env", width: "auto", text: true, show: (value) => value || ABSENT, about: "Environment" },
  { key: "reward", label: "reward", width: "58px", show: (value) => fixed(value, 2), about: "Reward of the rollout" },
  { key: "advantage", label: "adv.", width: "54px", show: (value) => signed(value, 2), about: "Advantage" },
  { key: "tokens", label: "tokens", width: "60px", show: count, about: "Tokens, context included" },
  { key: "kl_mean", label: "KL mean", width: "72px", show: (value) => short(value), about: "Mean mismatch KL, trainable tokens" },
  { key: "kl_max", label: "KL max", width: "80px", show: (value) => short(value), about: "Largest mismatch KL, trainable tokens" },
  { key: "masked", label: "masked", width: "66px", show: count, about: "Trainable tokens out of the trust region" },
];

class RecordTable {
  constructor(head, onChoose) {
    this.rows = head.rows;
    this.scale = head.scale;
    this.onChoose = onChoose;
    this.all = head.rows.step.map((_, index) => index);
    this.order = this.all;
    this.sorted = { key: null, descending: false };
    this.chosen = null;
    this.scroller = byId("scroller");
    this.headings = TABLE_COLUMNS.map((column) => this.heading(column));
    byId("headings").replaceChildren(...this.headings);
    this.fillFilter("filter-step", this.rows.step);
    this.fillFilter("filter-env", this.rows.env);
    this.scroller.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.scroller);
    byId("rows").addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-index]");
      if (row) this.choose(Number(row.dataset.index));
    });
    this.arrange();
  }

  heading(column) {
    const attributes = { type: "button", title: column.about };
    const button = element("button", attributes, column.label, element("span", { class: "order" }));
    const largestFirst = !column.text && column.key !== "step";
    button.addEventListener("click", () => {
      const again = this.sorted.key === column.key;
      this.sorted = { key: column.key, descending: again ? !this.sorted.descending : largestFirst };
      this.arrange();
    });
    const cell = element("th", { scope: "col", class: column.text ? "text" : "number" }, button);
    cell.style.width = column.width;
    return cell;
  }

  fillFilter(id, values) {
    const select = byId(id);
    const choices = [...new Set(values)].sort((a, b) => (a < b ? -1 : 1));
    select.append(element("option", {}, "all"), ...choices.map((value) => element("option", { value }, String(value))));
    select.addEventListener("change", () => this.arrange());
  }

  arrange() {
    const { step, env } = this.rows;
    const [onlyStep, onlyEnv] = [byId("filter-step"), byId("filter-env")]
      .map((select) => (select.selectedIndex > 0 ? select.value : null));
    this.order = this.all.filter((index) =>
      (onlyStep === null || String(step[index]) === onlyStep) && (onlyEnv === null || env[index] === onlyEnv));
    const { key, descending } = this.sorted;
    if (key) this.order.sort(comparison(this.rows[key], descending));
    this.headings.forEach((cell, index) => markSorted(cell, TABLE_COLUMNS[index].key === key, descending));
    const [shown, all] = [this.order.length, this.all.length];
    const part = shown < all ? `${count(shown)} of ` : "";
    byId("shown").textContent = `${part}${count(all)} ${all === 1 ? "record" : "records"}`;
    this.scroller.scrollTop = 0;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW_HEIGHT) - MARGIN_ROWS);
    const visible = Math.ceil(this.scroller.clientHeight / ROW_HEIGHT) + 2 * MARGIN_ROWS;
    const shown = this.order.slice(first, first + visible);
    const below = this.order.length - first - shown.length;
    byId("rows").replaceChildren(spacer(first), ...shown.map((index) => this.row(index)), spacer(below));
  }

  row(index) {
    const cells = TABLE_COLUMNS.map((column) => {
      const value = this.rows[column.key][index];
      const text = column.show(value);
      const coloured = column.key === "kl_max" && value !== null;
      const content = coloured ? element("b", { class: `kl-${klClass(value, this.scale)}` }, text) : text;
      return element("td", column.text ? { class: "text", title: text } : {}, content);
    });
    return element("tr", { "data-index": index, "aria-current": index === this.chosen }, ...cells);
  }

  choose(index) {
    this.chosen = index;
    this.reveal();
    this.onChoose(index);
  }

  // From a record that the filter hides, the first one is next.
  move(change) {
    if (!this.order.length) return;
    const place = this.order.indexOf(this.chosen);
    const target = place < 0 ? 0 : Math.min(this.order.length - 1, Math.max(0, place + change));
    if (this.order[target] !== this.chosen) this.choose(this.order[target]);
  }

  reveal() {
    const top = this.order.indexOf(this.chosen) * ROW_HEIGHT;
    const room = this.scroller.clientHeight - 2 * ROW_HEIGHT;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    if (top > this.scroller.scrollTop + room) this.scroller.scrollTop = top - room;
    this.draw();
  }
}

function markSorted(cell, isSorted, descending) {
  cell.removeAttribute("aria-sort");
  if (isSorted) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
  cell.querySelector(".order").textContent = isSorted ? (descending ? "↓" : "↑") : "";
}

function spacer(rows) {
  const row = element("tr", { class: "spacer", "aria-hidden": "true" });
  row.style.height = `${Math.max(0, rows) * ROW_HEIGHT}px`;
  return row;
}

// Records that do not say come last, whichever way the column is sorted.
function comparison(values, descending) {
  const sign = descending ? -1 : 1;
  return (a, b) => {
    const [left, right] = [values[a], values[b]];
    if (left === right) return a - b;
    if (left === null || right === null) return left === null ? 1 : -1;
    return sign * (left < right ? -1 : 1);
  };
}
