// One record: its tokens in their segments, and the details of the token under the pointer or the focus.

const TOKENS_AT_ONCE = 3000;

class RecordView {
  constructor(head, onToken) {
    this.scale = head.scale;
    this.rows = head.rows;
    this.texts = new Map(head.vocabulary.ids.map((id, index) => [id, head.vocabulary.texts[index]]));
    this.special = new Set(head.vocabulary.special);
    this.onToken = onToken;
    this.container = byId("tokens");
    this.container.addEventListener("mouseover", (event) => this.preview(event.target));
    this.container.addEventListener("mouseleave", () => this.explain(this.pinned));
    this.container.addEventListener("focusin", (event) => this.pin(event.target));
    this.container.addEventListener("click", (event) => event.target.closest(".token")?.focus());
  }

  show(index, { columns, segments, fields }, token) {
    this.index = index;
    this.columns = columns;
    this.segments = segments;
    this.fields = fields;
    this.nodes = [];
    this.pinned = null;
    this.drawHead();
    this.container.replaceChildren();
    this.container.scrollTop = 0;
    this.drawTokens(token === null ? TOKENS_AT_ONCE : Math.max(TOKENS_AT_ONCE, token + 1));
    const firstTrainable = this.nodes.find((node) => !node.classList.contains("plain"));
    const start = this.nodes[token] ?? firstTrainable ?? this.nodes[0];
    if (token !== null) start?.scrollIntoView({ block: "center" });
    this.pin(start);
  }

  value(name, index) {
    const column = this.columns[name];
    return Array.isArray(column) ? column[index] : column;
  }

  drawHead() {
    const row = {};
    for (const [name, values] of Object.entries(this.rows)) row[name] = values[this.index];
    byId("record-title").textContent = `Step ${row.step}${row.env ? `, ${row.env}` : ""}`;
    const trainable = row.trainable === null ? "loss mask not recorded" : `${count(row.trainable)} trainable`;
    const masked = row.masked ? `, ${count(row.masked)} masked` : "";
    byId("record-numbers").replaceChildren(...definitions([
      ["reward", short(row.reward, 4)],
      ["advantage", signed(row.advantage, 3)],
      ["tokens", `${count(row.tokens)}, ${trainable}${masked}`],
      ["mismatch KL", row.kl_mean === null ? ABSENT : `mean ${short(row.kl_mean)}, max ${short(row.kl_max)}`],
    ]));
    const words = (name) => name.replaceAll("_", " ").replace("idx", "index");
    const fields = Object.entries(this.fields).map(([name, value]) => [words(name), String(value)]);
    byId("record-fields").replaceChildren(...definitions(fields));
  }

  drawTokens(limit) {
    const from = this.nodes.length;
    for (const [role, start, end] of this.segments) {
      if (end <= from || start >= limit) continue;
      const nodes = [];
      for (let index = Math.max(start, from); index < Math.min(end, limit); index += 1) nodes.push(this.token(index));
      this.nodes.push(...nodes);
      const size = `${count(end - start)} ${end - start === 1 ? "token" : "tokens"}`;
      const name = role || (this.segments.length > 1 ? "no role" : "sequence");
      this.container.append(element("div", { class: "segment" },
        element("header", {}, name, element("small", {}, size)),
        element("div", { class: "text-run" }, ...this.withBreaks(nodes))));
    }
    const total = this.rows.tokens[this.index];
    if (limit >= total) return;
    const next = Math.min(TOKENS_AT_ONCE, total - limit);
    const label = `Show the next ${count(next)} of ${count(total)} tokens`;
    const more = element("button", { type: "button", class: "more" }, label);
    more.addEventListener("click", () => { more.remove(); this.drawTokens(limit + next); });
    this.container.append(more);
  }

  text(index) {
    return this.texts.get(this.value("token_ids", index));
  }

  token(index) {
    const text = visible(this.text(index)).replace(/\n$/, "");
    return element("span", { class: this.tokenClass(index), "data-index": index, tabindex: -1 }, text);
  }

  // Lines end after a token that ends one, and wrap before a token that starts with a space or is an id.
  withBreaks(nodes) {
    return nodes.flatMap((node) => {
      const text = this.text(Number(node.dataset.index));
      if (text.endsWith("\n") && node !== nodes.at(-1)) return [node, "\n"];
      return /^[ #]/.test(text) ? [element("wbr"), node] : [node];
    });
  }

  tokenClass(index) {
    const names = ["token"];
    if (this.special.has(this.value("token_ids", index))) names.push("special");
    if (this.value("loss_mask", index) === 0) return [...names, "plain"].join(" ");
    const kl = this.value("mismatch_kl", index) ?? null;
    names.push(kl === null ? "unscaled" : `kl-${klClass(kl, this.scale)}`);
    const mask = maskSide((name) => this.value(name, index));
    if (mask === "high" || mask === "neither") names.push("masked-high");
    if (mask === "low" || mask === "neither") names.push("masked-low");
    return names.join(" ");
  }

  preview(target) {
    const node = target.closest(".token");
    if (node) this.explain(node);
  }

  pin(node) {
    if (!node?.dataset?.index) return;
    this.pinned?.classList.remove("pinned");
    this.pinned?.setAttribute("tabindex", -1);
    this.pinned = node;
    node.classList.add("pinned");
    node.setAttribute("tabindex", 0);
    this.explain(node);
    this.onToken(Number(node.dataset.index));
  }

  move(change) {
    if (this.pinned) this.nodes[Number(this.pinned.dataset.index) + change]?.focus();
  }

  explain(node) {
    if (!node) return byId("details").replaceChildren();
    const index = Number(node.dataset.index);
    const read = (name) => this.value(name, index);
    const text = this.text(index);
    const [state, why] = reason(read, index, this.fields.training_mode ?? "rl");
    const sample = element("span", { class: this.tokenClass(index) }, node.textContent);
    byId("details").replaceChildren(
      element("p", { class: "shown" }, sample),
      element("p", { class: "state" }, state),
      element("p", { class: "why" }, why),
      element("dl", {}, ...definitions(detailsOf(read, index, text))));
  }
}
