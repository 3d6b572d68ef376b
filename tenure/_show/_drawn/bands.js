// Bytes over time as bands on top of each other; below them the spans that were open.

const [LEFT, RIGHT, TOP, HEIGHT, AXIS, LANE, MOST_LANES] = [72, 14, 30, 260, 24, 18, 8];

class Bands {
  constructor(box, data) {
    Object.assign(this, { box, data, way: data.ways[0], only: null, hovered: null });
    this.lanes = Math.min(MOST_LANES, 1 + Math.max(-1, ...data.spans.map((span) => span.depth)));
    this.svg = draw("svg", { class: "plot", "aria-hidden": "true" });
    this.tip = make("div", { class: "tip", hidden: "", "aria-hidden": "true" });
    this.legend = make("tbody");
    this.here = make("th", { scope: "col", class: "number" }, "at the cursor");
    this.slider = make("div", {
      class: "slider", role: "slider", tabindex: 0, "aria-valuemin": 0, "aria-valuemax": data.end,
      "aria-label": `${data.title}: moment`, keydown: (event) => this.key(event),
    }, this.svg, this.tip);
    filled(box, {}, [make("h3", {}, data.title), this.toolbar(), this.slider, this.markList(), this.legendTable()]);
    this.listen();
    axis.add(this, data.end);
    new ResizeObserver(() => this.draw()).observe(this.slider);
  }

  toolbar() {
    const { ways } = this.data;
    const names = ways.map((way) => way.name);
    const switched = (i) => { this.way = ways[i]; this.only = null; this.draw(); };
    return make("div", { class: "bar" },
      ways.length > 1 ? choice("Divided by", names, switched) : null,
      make("div", { class: "keys", role: "group", "aria-label": "What is seen of the time" },
        button("+", "Zoom in", () => axis.zoom(1 / 2)),
        button("−", "Zoom out", () => axis.zoom(2)),
        button("Whole run", "Show the whole run", () => axis.look(0, axis.whole)),
        button("Peak", "Go to the peak", () => this.toPeak())));
  }

  legendTable() {
    return make("table", { class: "legend" },
      make("thead", {}, make("tr", {},
        (this.wayHead = make("th", { scope: "col" })),
        make("th", { scope: "col", class: "number" }, "at the peak"),
        make("th", { scope: "col", class: "number" }, "share"), this.here)),
      this.legend);
  }

  markList() {
    const rows = this.data.marks.map((mark) => make("li", {},
      button(`at ${mark.at_s.toFixed(2)} s`, `Go to ${mark.at_s.toFixed(2)} s`, () => this.goTo(mark.at_s)),
      make("span", {}, mark.text)));
    return rows.length ? make("ul", { class: "marks", "aria-label": "Out of memory" }, ...rows) : null;
  }

  listen() {
    const at = (event) => event.clientX - this.slider.getBoundingClientRect().left;
    const events = {
      pointermove: (event) => this.point(at(event), event),
      pointerleave: () => { this.tip.hidden = true; },
      pointerdown: (event) => {
        if (event.button) return;
        this.dragged = at(event);
        this.slider.setPointerCapture(event.pointerId);
      },
      pointerup: (event) => this.release(at(event)),
      pointercancel: () => this.release(null),
      dblclick: () => axis.look(0, axis.whole),
      blur: () => { this.tip.hidden = true; },
      focus: () => { if (axis.at === null) this.toPeak(); },
    };
    for (const name in events) this.slider.addEventListener(name, events[name]);
    this.slider.addEventListener("wheel", (event) => {
      // without a key the wheel scrolls the page, as everywhere
      if (!event.ctrlKey) return;
      event.preventDefault();
      axis.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.timeAt(at(event)));
    }, { passive: false });
  }

  timeAt(x) { return axis.begin + (clamp(x - LEFT, 0, this.width) / this.width) * (axis.end - axis.begin); }
  x(at) { return LEFT + ((at - axis.begin) / (axis.end - axis.begin)) * this.width; }
  y(n) { return TOP + HEIGHT * (1 - n / this.top); }
  shownBands() { return this.way.bands.filter((band) => this.only === null || band.name === this.only); }

  // Of each column of pixels the highest moment: what is drawn is what was, and no peak is lost.
  sample() {
    const { times, levels } = this.data;
    const found = [];
    let first = times.findIndex((time) => time > axis.begin);
    first = Math.max(0, (first < 0 ? times.length : first) - 1);
    for (let i = first; i < times.length && times[i] <= axis.end; i++) {
      const x = Math.max(LEFT, this.x(times[i]));
      const last = found.at(-1);
      if (!last || Math.floor(x) > Math.floor(last.x)) found.push({ i, x });
      else if (levels[i] > levels[last.i]) last.i = i;
    }
    return found;
  }

  draw() {
    this.width = this.slider.clientWidth - LEFT - RIGHT;
    if (this.width < 50) return;
    this.samples = this.sample();
    const shown = this.shownBands();
    const levels = this.only === null ? this.data.levels : shown[0]?.values ?? [];
    const most = Math.max(1, ...this.samples.map(({ i }) => levels[i]));
    const step = stepOfBytes(most, 4);
    // room for what is written above the peak
    this.top = Math.max(most * 1.08, 1);
    const height = TOP + HEIGHT + AXIS + this.lanes * LANE;
    this.svg.setAttribute("viewBox", `0 0 ${this.slider.clientWidth} ${height}`);
    this.svg.setAttribute("height", height);
    this.cursor = draw("g", { class: "cursor" });
    this.selection = draw("rect", { class: "selection", y: TOP, height: HEIGHT, width: 0 });
    this.svg.replaceChildren(
      this.drawGrid(step), this.drawBands(shown), this.drawLanes(), this.drawMarks(), this.selection, this.cursor);
    this.fillLegend();
    this.showCursor();
  }

  drawGrid(step) {
    const group = draw("g", { class: "grid" });
    for (const n of ticksOf(0, this.top, step)) {
      group.append(
        draw("line", { x1: LEFT, x2: LEFT + this.width, y1: this.y(n), y2: this.y(n) }),
        draw("text", { x: LEFT - 8, y: this.y(n) + 4, "text-anchor": "end" }, bytes(n)));
    }
    const time = stepOf(axis.end - axis.begin, Math.max(2, this.width / 110));
    for (const at of ticksOf(axis.begin, axis.end, time)) {
      const x = this.x(at);
      const anchor = x > LEFT + this.width - 24 ? "end" : "middle";
      group.append(
        draw("line", { x1: x, x2: x, y1: TOP + HEIGHT, y2: TOP + HEIGHT + 4 }),
        draw("text", { x, y: TOP + HEIGHT + 17, "text-anchor": anchor }, tickText(at, time)));
    }
    return group;
  }

  drawBands(shown) {
    const group = draw("g", { class: "bands" });
    const right = this.x(Math.min(axis.end, this.data.end));
    let low = this.samples.map(() => 0);
    for (const band of shown) {
      const high = this.samples.map(({ i }, k) => low[k] + band.values[i]);
      let path = "";
      this.samples.forEach(({ x }, k) => {
        path += `${k ? "H" : "M"}${x.toFixed(1)}${k ? "V" : ","}${this.y(high[k]).toFixed(1)}`;
      });
      path += `H${right.toFixed(1)}`;
      for (let k = low.length - 1; k >= 0; k--) path += `V${this.y(low[k]).toFixed(1)}H${this.samples[k].x.toFixed(1)}`;
      if (low.length) group.append(draw("path", { d: `${path}Z`, fill: colourOf(this.way.name, band.name), "data-name": band.name }));
      low = high;
    }
    return group;
  }

  drawLanes() {
    const group = draw("g", { class: "lanes" });
    // how far each lane is drawn: of many spans within a pixel one is enough
    const drawn = Array(MOST_LANES).fill(0);
    for (const { name, depth, begin_s, end_s } of this.data.spans) {
      if (depth >= MOST_LANES || end_s < axis.begin || begin_s > axis.end) continue;
      const x = Math.max(LEFT, this.x(begin_s));
      const width = Math.max(0.7, Math.min(LEFT + this.width, this.x(end_s)) - x);
      if (x + width < drawn[depth] + 0.7) continue;
      drawn[depth] = x + width;
      const y = TOP + HEIGHT + AXIS + depth * LANE;
      // a colour means what the switch says: where that is another way, spans have none
      const colour = this.way.name === "scope" ? colourOf("scope", name) : null;
      const style = colour ? { "--tint": colour, "--ink": inkOn(colour) } : {};
      group.append(draw("rect", { x, y, width, height: LANE - 2, rx: Math.min(3, width / 4), style }));
      const room = Math.floor((width - 8) / 6.6);
      const text = name.length > room ? `${name.slice(0, room - 1)}…` : name;
      if (room > 3 || room >= name.length) group.append(draw("text", { x: x + 4, y: y + 12, style }, text));
    }
    return group;
  }

  drawMarks() {
    const group = draw("g", { class: "marks" });
    const { marks, times, levels, peak } = this.data;
    for (const mark of marks) {
      const x = this.x(mark.at_s);
      if (mark.at_s < axis.begin || mark.at_s > axis.end) continue;
      group.append(draw("g", { class: "oom" },
        draw("line", { x1: x, x2: x, y1: TOP - 12, y2: TOP + HEIGHT }),
        draw("text", { x, y: TOP - 16, "text-anchor": "middle" }, "OOM")));
    }
    if (this.only !== null || times[peak] < axis.begin || times[peak] > axis.end) return group;
    const [x, y] = [this.x(times[peak]), this.y(levels[peak])];
    const isRight = x > LEFT + this.width / 2;
    group.append(draw("g", { class: "peak" }, draw("circle", { cx: x, cy: y, r: 4.5 }),
      draw("text", { x: x + (isRight ? -10 : 10), y: y + 1, "text-anchor": isRight ? "end" : "start" },
        `peak ${bytes(levels[peak])}`)));
    return group;
  }

  // the drawn moment at the cursor, or before it
  current() {
    if (axis.at === null || !this.samples.length) return null;
    const k = this.samples.findLastIndex(({ i }) => this.data.times[i] <= axis.at);
    return Math.max(0, k);
  }

  showCursor() {
    if (!this.cursor) return;
    const k = this.current();
    this.cursor.replaceChildren();
    if (k === null) return;
    const { i, x } = this.samples[k];
    this.cursor.append(draw("line", { x1: x, x2: x, y1: TOP, y2: TOP + HEIGHT + AXIS + this.lanes * LANE }));
    const at = this.data.times[i];
    this.here.textContent = `at ${axis.seconds(at)}`;
    this.hereCells.forEach(([cell, values]) => {
      cell.textContent = bytes(values[i]);
      cell.title = `${count(values[i])} B`;
    });
    const top = this.way.bands.toSorted((a, b) => b.values[i] - a.values[i]).slice(0, 3)
      .map((band) => `${band.name} ${bytes(band.values[i])}`);
    this.slider.setAttribute("aria-valuenow", at);
    this.slider.setAttribute("aria-valuetext", `${axis.seconds(at)}: ${exact(this.data.levels[i])} in use; ${top.join(", ")}`);
  }

  fillLegend() {
    const { levels, peak } = this.data;
    this.wayHead.textContent = this.way.name;
    this.hereCells = [];
    const row = (head, values, kind) => {
      const here = make("td", { class: "number" });
      this.hereCells.push([here, values]);
      const at = values[peak];
      return make("tr", { class: kind }, make("th", { scope: "row" }, head),
        make("td", { class: "number", title: `${count(at)} B` }, bytes(at)),
        make("td", { class: "number" }, share(at, levels[peak])), here);
    };
    // as they lie: the topmost first
    const rows = this.way.bands.toReversed().map((band) => row(
      make("button", {
        type: "button", "aria-pressed": String(this.only === band.name),
        title: `${band.name}: show it alone, or all again`,
        click: () => { this.isolate(band.name); },
      }, square(colourOf(this.way.name, band.name)), make("bdi", {}, band.name)),
      band.values, this.only !== null && this.only !== band.name ? "faint" : ""));
    this.legend.replaceChildren(...rows, row("total", levels, "total"));
  }

  isolate(name) {
    this.only = this.only === name ? null : name;
    this.draw();
    this.legend.querySelector(`[aria-pressed="true"]`)?.focus();
  }

  point(x, event) {
    if (this.dragged !== undefined && Math.abs(x - this.dragged) > 4) {
      const [a, b] = [this.dragged, x].map((each) => clamp(each, LEFT, LEFT + this.width)).sort((p, q) => p - q);
      this.selection.setAttribute("x", a);
      this.selection.setAttribute("width", b - a);
    }
    const k = this.samples.findLastIndex((sample) => sample.x <= Math.max(x, LEFT));
    if (k < 0) return;
    axis.moveTo(this.data.times[this.samples[k].i]);
    this.showTip(event.clientY - this.slider.getBoundingClientRect().top);
  }

  release(x) {
    const from = this.dragged;
    this.dragged = undefined;
    this.selection.setAttribute("width", 0);
    if (x !== null && from !== undefined && Math.abs(x - from) > 4) {
      const [a, b] = [from, x].map((each) => this.timeAt(each)).sort((p, q) => p - q);
      axis.look(a, b);
    }
  }

  // the band at a height; with keys there is none, and the largest is told
  bandAt(i, y) {
    const bands = this.shownBands();
    if (y === null) return bands.toSorted((a, b) => b.values[i] - a.values[i])[0];
    const level = (this.top * (TOP + HEIGHT - y)) / HEIGHT;
    let sum = 0;
    return level >= 0 ? bands.find((each) => (sum += each.values[i]) >= level) : undefined;
  }

  showTip(y = null) {
    const k = this.current();
    if (k === null) return;
    const { i, x } = this.samples[k];
    const at = this.data.times[i];
    const band = this.bandAt(i, y);
    const open = this.data.spans.filter((span) => span.begin_s <= at && at < span.end_s).sort((a, b) => a.depth - b.depth);
    this.tip.replaceChildren(
      make("div", { class: "when" }, axis.seconds(at)),
      make("div", {}, `in use ${exact(this.data.levels[i])}`),
      band ? make("div", {}, square(colourOf(this.way.name, band.name)), make("bdi", {}, band.name), ` ${exact(band.values[i])}`) : "",
      open.length ? make("div", { class: "detail" }, open.map((span) => span.name).join(" › ")) : "");
    this.tip.hidden = false;
    const room = this.slider.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${clamp(x + 12 > room ? x - this.tip.offsetWidth - 12 : x + 12, 0, Math.max(0, room))}px`;
    this.tip.style.top = `${clamp((y ?? TOP + HEIGHT / 2) - 20, 0, TOP + HEIGHT - this.tip.offsetHeight)}px`;
  }

  goTo(at) {
    axis.moveTo(at);
    this.showTip();
  }
  toPeak() { this.goTo(this.data.times[this.data.peak]); }

  step(n) {
    const k = this.current() ?? 0;
    let i = this.samples[clamp(k + n, 0, this.samples.length - 1)].i;
    // at the edge the axis moves along
    if (k + n < 0 || k + n >= this.samples.length) i = clamp(i + Math.sign(n), 0, this.data.times.length - 1);
    this.goTo(this.data.times[i]);
  }

  key(event) {
    const { times, marks } = this.data;
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const far = event.shiftKey ? 10 : 1;
    const keys = {
      ArrowLeft: () => this.step(-far), ArrowRight: () => this.step(far),
      PageDown: () => this.step(-10), PageUp: () => this.step(10),
      Home: () => this.goTo(times[0]), End: () => this.goTo(times.at(-1)),
      "+": () => axis.zoom(1 / 2), "-": () => axis.zoom(2), 0: () => axis.look(0, axis.whole),
      p: () => this.toPeak(),
      o: () => marks.length && this.goTo((marks.find((mark) => mark.at_s > (axis.at ?? -1) + 1e-9) ?? marks[0]).at_s),
      Escape: () => { this.tip.hidden = true; },
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
    // what it says of the time has as many digits as the axis needs
    if (!this.tip.hidden) this.showTip();
  }
}
