// What a total is made of, level by level: a flame graph that hangs from its root.

const ROW = 24;
const ORDERS = [["scope", "line", "category"], ["line", "category"], ["category", "scope", "line"]];

class Flame {
  constructor(box, data) {
    Object.assign(this, { box, data, order: ORDERS[0], isFound: null });
    this.tree = make("div", {
      class: "tree", role: "tree", "aria-label": data.title, keydown: (event) => this.key(event),
    });
    this.told = make("p", { class: "readout", "aria-live": "polite" });
    const names = ORDERS.map((order) => order.join(" › "));
    box.append(make("h3", {}, data.title), make("div", { class: "bar" },
      choice("From the top", names, (i) => { this.order = ORDERS[i]; this.grow(); }),
      make("div", { class: "keys" }, button("Back", "Zoom out by a level", () => this.zoom(this.focus.parent)),
        button("All", "Show all again", () => this.zoom(this.root))),
      searchField("Find", (words) => this.find(words))), this.told, this.tree);
    this.grow();
    new ResizeObserver(() => this.draw()).observe(this.tree);
  }

  grow() {
    const node = (name, parent) => ({ name, parent, n: 0, bytes: 0, tints: new Set(), children: new Map() });
    this.root = node("all", null);
    for (const { category, scope, stack, n_bytes, n_storages } of this.data.rows) {
      const facets = { category, scope, line: stack };
      const path = this.order.flatMap((facet) => facets[facet]).filter(Boolean);
      let at = this.root;
      for (const step of [null, ...path]) {
        if (step !== null) {
          if (!at.children.has(step)) at.children.set(step, node(step, at));
          at = at.children.get(step);
        }
        at.bytes += n_bytes;
        at.n += n_storages;
        at.tints.add(category);
      }
    }
    this.zoom(this.root);
  }

  zoom(node) {
    if (!node) return;
    this.focus = this.chosen = node;
    this.draw();
    this.tell(node);
  }

  path(node) {
    const found = [];
    for (let at = node; at; at = at.parent) found.unshift(at);
    return found;
  }

  draw() {
    const width = this.tree.clientWidth;
    this.cells = new Map();
    let depths = 0;
    const place = (node, depth, left, part) => {
      if (part * width < 2) return;
      depths = Math.max(depths, depth + 1);
      this.cells.set(node, this.cell(node, depth, left, part));
      if (!this.path(this.focus).includes(node) || node === this.focus) {
        let from = left;
        for (const child of this.sorted(node)) {
          const its = (part * child.bytes) / (node.bytes || 1);
          place(child, depth + 1, from, its);
          from += its;
        }
      }
    };
    const above = this.path(this.focus);
    above.forEach((node, depth) => place(node, depth, 0, 1));
    this.tree.style.height = `${depths * ROW}px`;
    const had = this.tree.contains(document.activeElement);
    this.tree.replaceChildren(...this.cells.values());
    if (had) this.cells.get(this.chosen)?.focus();
  }

  sorted(node) { return [...node.children.values()].sort((a, b) => b.bytes - a.bytes); }

  cell(node, depth, left, part) {
    const isLeaf = !node.children.size;
    // what is of several kinds has no colour, what is around one kind a lighter one
    const colour = node.tints.size === 1 ? colourOf("category", [...node.tints][0]) : null;
    const tints = !colour ? {} : isLeaf ? { "--tint": colour, "--ink": inkOn(colour) }
      : { "--tint": colour, "--part": "35%" };
    const isFound = this.isFound?.(node.name.toLowerCase());
    return make("div", {
      class: `cell${isLeaf ? " leaf" : ""}${isFound === true ? " found" : ""}${isFound === false ? " faint" : ""}`,
      role: "treeitem", tabindex: node === this.chosen ? 0 : -1, "aria-level": depth + 1,
      "aria-selected": String(node === this.chosen), "aria-label": this.words(node),
      "aria-expanded": isLeaf ? null : "true",
      style: { left: `${100 * left}%`, width: `${100 * part}%`, top: `${depth * ROW}px`, ...tints },
      click: () => { this.zoom(isLeaf ? node.parent : node); },
      pointerenter: () => this.tell(node),
      focus: () => this.choose(node, false),
    }, part * this.tree.clientWidth > 24 ? make("bdi", {}, node.name) : "");
  }

  words(node) {
    const n = node.n ? `, ${count(node.n)} storages` : "";
    return `${node.name}: ${exact(node.bytes)}, ${share(node.bytes, this.root.bytes)} of all${n}`;
  }

  tell(node) {
    const above = this.path(node).slice(1, -1).map((each) => each.name);
    this.told.replaceChildren(make("b", {}, this.words(node)),
      above.length ? make("span", { class: "detail" }, `in ${above.join(" › ")}`) : "");
  }

  choose(node, isMoved = true) {
    if (!node || !this.cells.has(node)) return;
    this.cells.get(this.chosen)?.setAttribute("tabindex", -1);
    this.cells.get(this.chosen)?.setAttribute("aria-selected", "false");
    this.chosen = node;
    const cell = this.cells.get(node);
    cell.setAttribute("tabindex", 0);
    cell.setAttribute("aria-selected", "true");
    if (isMoved) cell.focus();
    this.tell(node);
  }

  find(words) {
    this.isFound = words.trim() ? finds(words) : null;
    this.draw();
    if (!this.isFound) return this.tell(this.focus);
    // what is inside of one that was found is counted with it
    const sum = (node) => (this.isFound(node.name.toLowerCase()) ? node.bytes
      : [...node.children.values()].reduce((all, child) => all + sum(child), 0));
    const found = sum(this.root);
    this.told.textContent = `Found: ${exact(found)}, ${share(found, this.root.bytes)} of all`;
  }

  key(event) {
    const node = this.chosen;
    const beside = node.parent ? this.sorted(node.parent) : [node];
    const keys = {
      ArrowDown: () => this.choose(this.sorted(node)[0]), ArrowUp: () => this.choose(node.parent),
      ArrowRight: () => this.choose(beside[beside.indexOf(node) + 1]),
      ArrowLeft: () => this.choose(beside[beside.indexOf(node) - 1]),
      Home: () => this.choose(this.root), Enter: () => this.zoom(node.children.size ? node : node.parent),
      Backspace: () => this.zoom(this.focus.parent), Escape: () => this.zoom(this.root),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  }
}
