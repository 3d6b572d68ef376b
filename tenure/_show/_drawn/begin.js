// Draws what the page has, and answers to the question mark.

const KEYS = [
  ["Tab", "to the next chart or switch"],
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

const main = document.getElementById("drawn");
const begin = (heading, told) => main.append(make("h2", {}, heading), make("p", { class: "told" }, told));
const box = (kind) => main.appendChild(make("div", { class: `drawn ${kind}` }));
const whenOf = (device) => `after ${device.peak_at_s.toFixed(2)} s`;
const bandsOf = (name, series) => ({
  name, bands: Object.entries(series ?? {}).map(([name, values]) => ({ name, values })).filter(({ values }) => values.some(Boolean)),
});

function chart(title, times, levels, ways, spans, marks) {
  const end = DATA.duration_s ?? times.at(-1);
  new Bands(box("bands"), { title, times, levels, ways, spans, marks, end, peak: levels.indexOf(Math.max(...levels)) });
}

function drawTimeline({ devices, host, scopes = [], ooms = [] }) {
  const spans = scopes.toSorted((a, b) => a.begin_s - b.begin_s);
  for (const device of devices) {
    const ways = ["category", "scope", "line"].map((way) => bandsOf(way, device[`by_${way}`])).filter(({ bands }) => bands.length);
    const title = `${device.device}: ${bytes(device.peak_bytes)} in use at the peak, ${whenOf(device)}`;
    // a snapshot of torch has the sum alone
    const all = ways.length ? ways : [bandsOf("memory", { "in use": device.live_bytes })];
    chart(title, device.times_s, device.live_bytes, all, spans, ooms);
  }
  if (host?.times_s.length) {
    const title = `Host: ${bytes(Math.max(...host.rss_bytes))} resident in the process at most`;
    chart(title, host.times_s, host.rss_bytes, [bandsOf("part", { resident: host.rss_bytes })], [], []);
  }
}

const used = DATA.devices.filter((device) => device.times_s.length);
const atPeak = used.filter((device) => device.at_peak.length);
if (used.length) {
  begin("Memory over time", "How many bytes were in use at each moment. Each band is one category, scope or line, as the "
    + "switch says; bars below the axis are scopes while they were open.");
  main.append(button("Keys ?", "Show the keys", () => help.showModal()));
  drawTimeline({ ...DATA, devices: used });
}
if (atPeak.length) {
  begin("At the peak", "The memory when the most was in use. The wider a box, the more bytes; below a box is what it is made of.");
  for (const device of atPeak) new Flame(box("flame"), { title: `${device.device} ${whenOf(device)}`, rows: device.at_peak });
}
axis.look(0, axis.whole);

const help = make("dialog", { "aria-labelledby": "keys-title" },
  make("h2", { id: "keys-title" }, "Keys"),
  make("table", {}, make("tbody", {}, ...KEYS.map(([key, told]) =>
    make("tr", {}, make("th", { scope: "row" }, ...key.split(" ").map((each) => make("kbd", {}, each))), make("td", {}, told))))),
  make("p", {}, POINTER),
  button("Close", "Close", () => help.close()));
document.body.append(help);
addEventListener("keydown", (event) => {
  if (event.key === "?" && used.length && !help.open && !event.target.matches("input[type=search]")) help.showModal();
});
