// The axis of time that all charts of a page share: what they show of it, and where the cursor is.

const axis = {
  begin: 0,
  end: 1e-6,
  whole: 1e-6,
  at: null,
  charts: [],

  add(chart, end) {
    this.charts.push(chart);
    this.end = this.whole = Math.max(end, this.whole);
  },
  look(begin, end) {
    const length = clamp(end - begin, this.whole / 1e6, this.whole);
    this.begin = clamp(begin, 0, this.whole - length);
    this.end = this.begin + length;
    for (const chart of this.charts) chart.draw();
  },
  zoom(factor, around = this.at) {
    const centre = around ?? (this.begin + this.end) / 2;
    this.look(centre - (centre - this.begin) * factor, centre + (this.end - centre) * factor);
  },
  // the cursor; what it stands on is brought into sight
  moveTo(at) {
    this.at = at;
    const length = this.end - this.begin;
    if (at < this.begin || at > this.end) this.look(at - length / 2, at + length / 2);
    else for (const chart of this.charts) chart.showCursor();
  },
  digits() {
    return clamp(Math.ceil(-Math.log10((this.end - this.begin) / 500)), 0, 7);
  },
  seconds(at) {
    return `${at.toFixed(Math.max(this.digits(), 2))} s`;
  },
};

// round steps, of which about so many make up a length; an hour is cut otherwise than a second
const CLOCK = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
function stepOf(length, n) {
  const raw = length / n;
  if (raw > 30) return CLOCK.find((step) => step >= raw) ?? 86400 * Math.ceil(raw / 86400);
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((times) => times * power >= raw);
}
function tickText(at, step) {
  if (step < 60) return `${at.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)))} s`;
  const minutes = Math.round(at / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
function ticksOf(begin, end, step) {
  const ticks = [];
  for (let i = Math.ceil(begin / step - 1e-9); i * step <= end; i++) ticks.push(i * step);
  return ticks;
}
// steps of bytes are powers of two
function stepOfBytes(most, n) {
  return 2 ** Math.ceil(Math.log2(Math.max(most, n) / n));
}
