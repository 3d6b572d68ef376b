// What all drawings share: elements that are made of text alone, numbers in words, colours.

const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
const DATA = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
const SPACE = document.getElementById("space").namespaceURI;
const COLOURS = new Map();

// A name of the program goes in as text, and is never read as markup.
function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "style") for (const key in value) element.style.setProperty(key, value[key]);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}
const make = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SPACE, tag), attributes, children);
const button = (text, label, click) =>
  make("button", { type: "button", "aria-label": label, title: label, click }, text);
const clamp = (value, least, most) => Math.min(Math.max(value, least), most);

// as format_bytes() of tenure spells them
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (; power < 4 && Math.abs(power ? Number(n.toFixed(1)) : n) >= 1024; power++) n /= 1024;
  return `${power ? n.toFixed(1) : n} ${units[power]}`;
}
// made once, because every box of a flame graph uses it
const NUMBERS = new Intl.NumberFormat("en-US");
const count = (n) => NUMBERS.format(n);
const exact = (n) => (Math.abs(n) < 1024 ? bytes(n) : `${bytes(n)} (${count(n)} B)`);
const share = (n, all) => (all > 0 ? `${((100 * n) / all).toFixed(1)} %` : "");

// A name of a category has a colour of its own; another one keeps the colour that it got first.
function colourOf(way, name) {
  if (Object.hasOwn(DATA.named, name)) return DATA.named[name];
  if (!COLOURS.has(way)) COLOURS.set(way, new Map());
  const found = COLOURS.get(way);
  if (!found.has(name)) found.set(name, DATA.others[found.size % DATA.others.length]);
  return found.get(name);
}
const square = (colour) =>
  draw("svg", { class: "square", "aria-hidden": "true" },
    draw("rect", { width: "100%", height: "100%", rx: 2, fill: colour }));
// what is read on a colour
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 130 ? "#000" : "#fff";
}

let nChoices = 0;
// one of several, by radio buttons that look like one switch
function choice(legend, names, chosen) {
  const group = `choice-${nChoices++}`;
  const labels = names.map((name, i) =>
    make("label", {},
      make("input", {
        type: "radio", name: group, value: name, checked: i === 0 ? "" : null,
        change: () => chosen(i),
      }),
      make("span", {}, name)));
  return make("fieldset", { class: "choice" }, make("legend", {}, legend), ...labels);
}

function searchField(label, typed) {
  return make("label", { class: "search" }, make("span", {}, label),
    make("input", { type: "search", input: (event) => typed(event.target.value) }));
}
// whether each word stands in a text
function finds(words) {
  const all = words.toLowerCase().split(/\s+/).filter(Boolean);
  return (text) => all.every((word) => text.includes(word));
}
