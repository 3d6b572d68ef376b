// A table that is sorted by any column, and searched.

const LINES = 3;

class Grid {
  constructor(box, data) {
    Object.assign(this, { box, data, by: null, isDown: true, isFound: null, most: data.first });
    this.isNumber = data.columns.map(({ kind }) => kind === "bytes" || kind === "count");
    this.texts = data.rows.map((row) => row.map((cell, i) => this.text(cell, i)).join("\n").toLowerCase());
    this.largest = data.columns.map((_, i) => Math.max(1, ...data.rows.map((row) => this.value(row[i]) ?? 0)));
    this.heads = data.columns.map((column, i) => make("th", { scope: "col", class: this.isNumber[i] ? "number" : "" },
      make("button", { type: "button", click: () => this.sort(i) }, column.heading, make("span", { class: "arrow", "aria-hidden": "true" }))));
    this.body = make("tbody");
    this.told = make("output", { role: "status" });
    this.more = make("button", { type: "button", hidden: "", click: () => { this.most = Infinity; this.fill(); } });
    box.append(
      make("div", { class: "bar" }, make("h3", {}, data.title), data.rows.length > 5 ? searchField("Search", (words) => this.search(words)) : null, this.told),
      // wider than the page: it is scrolled, with keys as well
      make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": data.title },
        make("table", {}, make("thead", {}, make("tr", {}, ...this.heads)), this.body)),
      this.more, data.note ? make("p", { class: "told" }, data.note) : "");
    this.fill();
    addEventListener("beforeprint", () => { for (const each of box.querySelectorAll("details")) each.open = true; });
  }

  value(cell) { return Array.isArray(cell) ? cell[0] : cell; }

  text(cell, i) {
    const { kind } = this.data.columns[i];
    if (cell === null) return "";
    if (kind === "lines") return cell.join("\n");
    if (!this.isNumber[i]) return String(cell);
    return Array.isArray(cell) ? cell[1] : kind === "bytes" ? bytes(cell) : count(cell);
  }

  sort(i) {
    // a number: the largest first; text: from a on; a third time as it was
    const first = this.isNumber[i];
    if (this.by !== i) [this.by, this.isDown] = [i, first];
    else if (this.isDown === first) this.isDown = !first;
    else this.by = null;
    this.heads.forEach((head, k) => {
      const way = k !== this.by ? null : this.isDown ? "descending" : "ascending";
      if (way) head.setAttribute("aria-sort", way);
      else head.removeAttribute("aria-sort");
      head.querySelector(".arrow").textContent = way ? (this.isDown ? " ▼" : " ▲") : "";
    });
    this.fill();
  }

  search(words) {
    this.isFound = words.trim() ? finds(words) : null;
    this.fill();
  }

  order() {
    const { rows } = this.data;
    const shown = [...rows.keys()].filter((n) => !this.isFound || this.isFound(this.texts[n]));
    if (this.by === null) return shown;
    const i = this.by;
    const sign = this.isDown ? -1 : 1;
    const compare = this.isNumber[i]
      ? (a, b) => this.value(a) - this.value(b)
      : (a, b) => this.text(a, i).localeCompare(this.text(b, i), "en", { numeric: true });
    return shown.sort((m, n) => {
      const [a, b] = [rows[m][i], rows[n][i]];
      // what is not known stands last, either way
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * compare(a, b);
    });
  }

  fill() {
    const order = this.order();
    const shown = order.slice(0, this.most);
    this.body.replaceChildren(...shown.map((n) => make("tr", {}, ...this.data.rows[n].map((cell, i) => this.cell(cell, i)))));
    this.more.hidden = shown.length === order.length;
    this.more.textContent = `Show all ${count(order.length)} rows`;
    this.told.textContent = this.isFound ? `${count(order.length)} of ${count(this.data.rows.length)} rows` : "";
  }

  cell(cell, i) {
    const { kind, has_bar } = this.data.columns[i];
    const text = this.text(cell, i);
    if (kind === "lines") return make("td", { class: "lines" }, ...this.lines(cell ?? []));
    if (kind === "name") return make("td", {}, make("div", { class: "named" }, square(colourOf(this.data.colour, text)), make("bdi", {}, text)));
    if (!this.isNumber[i]) return make("td", { class: kind }, make("bdi", {}, text));
    const n = this.value(cell) ?? 0;
    const title = kind === "bytes" && text ? `${count(n)} B` : null;
    if (!has_bar) return make("td", { class: "number", title }, text);
    const bar = draw("svg", { class: "part", "aria-hidden": "true" },
      draw("rect", { width: `${Math.max(0, (100 * n) / this.largest[i])}%`, height: "100%", rx: 2 }));
    return make("td", { class: "number has-bar", title }, make("div", {}, text), bar);
  }

  lines(lines) {
    const list = (some) => make("ul", {}, ...some.map((line) => make("li", {}, make("bdi", {}, line))));
    if (lines.length <= LINES) return lines.length ? [list(lines)] : [];
    return [list(lines.slice(0, LINES)),
      make("details", {}, make("summary", {}, `and ${lines.length - LINES} more`), list(lines.slice(LINES)))];
  }
}
