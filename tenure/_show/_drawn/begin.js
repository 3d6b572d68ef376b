// Draws what the page has, and answers to the question mark.

const KEYS = [
  ["Tab", "to the next chart, switch, table"],
  ["← →", "in a chart: a moment back, a moment on; with Shift ten"],
  ["Home End", "in a chart: the first moment, the last one"],
  ["+ − 0", "in a chart: zoom in, zoom out, the whole run"],
  ["p", "in a chart: to the peak"],
  ["o", "in a chart: to the next time that memory ran out"],
  ["↑ ↓ ← →", "in a flame graph: to what is around, inside, beside"],
  ["Enter Backspace Esc", "in a flame graph: zoom in, out by a level, show all"],
  ["?", "these keys"],
];
const POINTER = "With the pointer: drag over a chart to zoom in, double-click to see the whole run, turn the wheel with "
  + "Ctrl to zoom. All charts move together. A name below a chart shows its band alone.";

const kinds = { bands: Bands, flame: Flame, grid: Grid };
for (const box of document.querySelectorAll("[data-drawing]")) {
  const data = DATA.drawings[Number(box.dataset.drawing)];
  new kinds[data.kind](box, data);
}
axis.look(0, axis.whole);

const help = make("dialog", { "aria-labelledby": "keys-title" },
  make("h2", { id: "keys-title" }, "Keys"),
  make("table", {}, make("tbody", {}, ...KEYS.map(([key, told]) =>
    make("tr", {}, make("th", { scope: "row" }, ...key.split(" ").map((each) => make("kbd", {}, each))), make("td", {}, told))))),
  make("p", {}, POINTER),
  button("Close", "Close", () => help.close()));
document.body.append(help);
document.getElementById("ask").addEventListener("click", () => help.showModal());
addEventListener("keydown", (event) => {
  if (event.key === "?" && !help.open && !event.target.matches("input[type=search]")) help.showModal();
});
