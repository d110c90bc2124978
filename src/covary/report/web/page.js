"use strict";
// Plots with zoom, values and hidden lines, by mouse, touch or keyboard; sortable tables; a light and a dark theme.

let data = JSON.parse(document.getElementById("data").textContent);
const KEPT = `covary ${location.pathname}`; // the reader's choices are saved per page
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const saved = recall();
const view = {
  x: saved.x || "round",
  logX: saved.logX ?? data.log_x,
  hidden: new Set(saved.hidden || []),
  range: null, // of x, shared by all plots
};

function recall() {
  try { return JSON.parse(sessionStorage.getItem(KEPT)) || {}; } catch { return {}; }
}

function remember() {
  const kept = { x: view.x, logX: view.logX, hidden: [...view.hidden] };
  try { sessionStorage.setItem(KEPT, JSON.stringify(kept)); } catch { /* a page opened from a file has no storage */ }
}

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "rect", "circle", "title", "clipPath"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9) return +(value / 1e9).toPrecision(3) + " G";
  if (size >= 1e6) return +(value / 1e6).toPrecision(3) + " M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(3) + " k";
  return size < 1e-3 ? value.toExponential(1).replace(".0e", "e").replace("e-", "e−") : String(+value.toPrecision(4));
}

// A scale maps values to [0, 1] and back.
function scale(low, high, log) {
  const to = log ? Math.log10 : (v) => v, back = log ? (v) => 10 ** v : (v) => v;
  const a = to(low), span = to(high) - a || 1;
  return { at: (v) => (to(v) - a) / span, back: (u) => back(a + u * span), low, high, log };
}

function ticks({ low, high, log }, count) {
  if (log) {
    const decades = Math.log10(high / low);
    const steps = decades > 6 ? [1] : decades > 2 ? [1, 3] : [1, 2, 5], found = [];
    const every = Math.max(1, Math.ceil(decades / count));
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += every)
      for (const step of steps) found.push(step * 10 ** e);
    const inside = found.filter((t) => t >= low * 0.999 && t <= high * 1.001);
    if (inside.length > 1) return inside;
  }
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((s) => s * power >= rough) * power, found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-6; t += step) found.push(+t.toPrecision(12));
  return found;
}

const styleOf = (line) => ({ stroke: `var(--line-${line.style % 8})`, "stroke-dasharray": DASHES[line.dash] });

function swatch(line) {
  const svg = element("svg", { width: 26, height: 10, "aria-hidden": "true" });
  svg.append(element("line", { x1: 1, x2: 25, y1: 5, y2: 5, "stroke-width": 2.5, ...styleOf(line) }));
  return svg;
}

// One plot: a metric of one panel's lines.
class Plot {
  constructor(panel, metric) {
    this.panel = panel; this.metric = metric;
    this.lines = panel.lines.filter((line) => line.values[metric.key]);
    this.svg = element("svg", { class: "plot", tabindex: 0, role: "application" });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.spoken = element("div", { class: "skip", "aria-live": "polite" });
    const name = panel.heading ? `${panel.heading}: ${metric.title}` : metric.title;
    this.svg.setAttribute("aria-label",
      `${name}. Arrow keys read values, plus and minus zoom, 0 shows everything.`);
    const heading = panel.heading ? [element("figcaption", {}, panel.heading)] : [];
    this.figure = element("figure", {}, ...heading, this.svg, this.tip, this.spoken);
    this.svg.addEventListener("pointermove", (e) => this.moved(e));
    this.svg.addEventListener("pointerleave", () => this.show(null));
    this.svg.addEventListener("pointerdown", (e) => this.pressed(e));
    this.svg.addEventListener("pointerup", (e) => this.released(e));
    this.svg.addEventListener("pointercancel", () => { this.from = null; });
    this.svg.addEventListener("dblclick", () => zoom(null));
    this.svg.addEventListener("keydown", (e) => this.key(e));
    this.svg.addEventListener("blur", () => this.show(null));
  }

  points(line) { // [x, mean, low, high] of the measured rounds
    const value = line.values[this.metric.key], xs = line[view.x], found = [];
    for (let i = 0; i < xs.length; i++) {
      const x = xs[i], y = value.mean[i];
      if (y === null || x === null || (this.log && y <= 0) || (view.logX && x <= 0)) continue;
      found.push([x, y, value.low ? value.low[i] : y, value.high ? value.high[i] : y]);
    }
    return found;
  }

  draw() {
    const wide = Math.max(260, Math.round(this.svg.getBoundingClientRect().width) || 360);
    const tall = Math.round(Math.min(340, Math.max(220, wide * 0.62)));
    const box = { left: 52, right: wide - 12, top: 12, bottom: tall - 36 };
    Object.assign(this, { wide, tall, box });
    const all = this.lines.flatMap((line) => line.values[this.metric.key].mean).filter((v) => v !== null);
    this.log = this.metric.log && all.some((v) => v > 0);
    this.shown = this.lines.filter((line) => !view.hidden.has(line.name)).map((line) => ({ line, points: this.points(line) }));
    const xs = this.lines.flatMap((line) => this.points(line).map((p) => p[0]));
    this.whole = [xs.reduce((a, b) => Math.min(a, b), Infinity), xs.reduce((a, b) => Math.max(a, b), -Infinity)];
    if (!Number.isFinite(this.whole[0])) this.whole = [0, 1]; // no values for this x
    if (!(this.whole[0] < this.whole[1])) this.whole = [this.whole[1] / 2, this.whole[1] * 1.5 || 1];
    const range = (view.range || this.whole).map((v) => Math.min(Math.max(v, this.whole[0]), this.whole[1]));
    const [x0, x1] = range[0] < range[1] ? range : this.whole;
    this.x = scale(x0, x1, view.logX && x0 > 0);
    const inside = this.shown.flatMap(({ points }) => points.filter((p) => p[0] >= x0 && p[0] <= x1));
    const lows = inside.map((p) => (this.log && p[2] <= 0 ? p[1] : p[2])), highs = inside.map((p) => p[3]);
    const target = this.metric.target;
    if (target !== null && !this.log) highs.push(target);
    let low = lows.reduce((a, b) => Math.min(a, b), Infinity), high = highs.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!(low <= high)) [low, high] = this.log ? [0.1, 1] : [0, 1];
    const air = this.log ? (high / low) ** 0.04 || 1.1 : (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    this.y = this.log ? scale(low / air, high * air * (low === high ? 1.1 : 1), true) : scale(low - air, high + air, false);
    this.paint();
  }

  px(x) { return this.box.left + this.x.at(x) * (this.box.right - this.box.left); }
  py(y) { return this.box.bottom - this.y.at(y) * (this.box.bottom - this.box.top); }

  paint() {
    const { box, svg } = this, clip = `clip-${plots.indexOf(this)}`;
    svg.setAttribute("viewBox", `0 0 ${this.wide} ${this.tall}`);
    svg.replaceChildren();
    for (const t of ticks(this.y, 5)) {
      svg.append(element("line", { class: "grid", x1: box.left, x2: box.right, y1: this.py(t), y2: this.py(t) }),
        element("text", { x: box.left - 6, y: this.py(t) + 4, "text-anchor": "end" }, short(t)));
    }
    let free = -Infinity; // leaves out labels that would overlap
    for (const t of ticks(this.x, Math.max(3, Math.round(this.wide / 90)))) {
      const at = this.px(t), text = short(t);
      svg.append(element("line", { class: "grid", x1: at, x2: at, y1: box.top, y2: box.bottom }));
      if (at - text.length * 3.3 < free) continue;
      free = at + text.length * 3.3 + 6;
      svg.append(element("text", { x: at, y: box.bottom + 16, "text-anchor": "middle" }, text));
    }
    const middle = (box.left + box.right) / 2;
    svg.append(element("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
      element("text", { x: middle, y: this.tall - 4, "text-anchor": "middle" },
        view.x === "round" ? "rounds" : "bytes sent, both ways"));
    const area = { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top };
    svg.append(element("clipPath", { id: clip }, element("rect", area)));
    const drawn = element("g", { "clip-path": `url(#${clip})` });
    const target = this.metric.target;
    if (target !== null && this.y.low <= target && target <= this.y.high)
      drawn.append(element("line", { class: "target", x1: box.left, x2: box.right, y1: this.py(target), y2: this.py(target) }));
    for (const { line, points } of this.shown) {
      if (!points.length) continue;
      const at = (p, k) => `${this.px(p[0]).toFixed(1)},${this.py(this.log && p[k] <= 0 ? p[1] : p[k]).toFixed(1)}`;
      if (line.values[this.metric.key].low) {
        const edge = [...points.map((p) => at(p, 3)), ...points.map((p) => at(p, 2)).reverse()];
        drawn.append(element("path", { class: "band", d: `M${edge.join("L")}Z`, fill: styleOf(line).stroke }));
      }
      if (points.length === 1) {
        const [x, y] = at(points[0], 1).split(",");
        drawn.append(element("circle", { cx: x, cy: y, r: 3, fill: styleOf(line).stroke }));
      }
      const path = { class: "line", d: `M${points.map((p) => at(p, 1)).join("L")}`, "data-line": line.name, ...styleOf(line) };
      drawn.append(element("path", path));
    }
    svg.append(drawn);
    this.cursor = element("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
    this.chosen = element("rect", { class: "chosen", y: box.top, height: area.height, width: 0, visibility: "hidden" });
    svg.append(this.chosen, this.cursor);
  }

  where(event) { // the x under the pointer
    const frame = this.svg.getBoundingClientRect();
    const u = ((event.clientX - frame.left) * (this.wide / frame.width) - this.box.left) / (this.box.right - this.box.left);
    return this.x.back(Math.min(1, Math.max(0, u)));
  }

  moved(event) {
    const x = this.where(event);
    this.show(x);
    if (this.from == null) return;
    const [a, b] = [this.px(this.from), this.px(x)].sort((p, q) => p - q);
    for (const [key, value] of Object.entries({ x: a, width: b - a, visibility: "visible" })) this.chosen.setAttribute(key, value);
  }

  pressed(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    this.from = this.where(event);
    this.svg.setPointerCapture(event.pointerId);
  }

  released(event) {
    if (this.from == null) return;
    const ends = [this.from, this.where(event)].sort((a, b) => a - b);
    this.from = null;
    this.chosen.setAttribute("visibility", "hidden");
    if (this.px(ends[1]) - this.px(ends[0]) > 6) zoom(ends);
  }

  key(event) {
    const at = this.reading ?? (view.logX && this.x.low > 0 ? Math.sqrt(this.x.low * this.x.high) : (this.x.low + this.x.high) / 2);
    const step = { ArrowLeft: -0.02, ArrowRight: 0.02 }[event.key];
    if (step) {
      this.show(this.x.back(Math.min(1, Math.max(0, this.x.at(at) + step))));
      this.spoken.textContent = this.tip.textContent;
    } else if (event.key === "+" || event.key === "=") zoomBy(0.5, this, at);
    else if (event.key === "-") zoomBy(2, this, at);
    else if (event.key === "0" || event.key === "Escape") zoom(null);
    else return;
    event.preventDefault();
  }

  show(x) { // the values at x
    this.reading = x;
    this.tip.hidden = x === null;
    this.cursor.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x === null) return;
    const read = this.shown.map(({ line, points }) => {
      const nearest = points.reduce((best, p) => (best && Math.abs(best[0] - x) <= Math.abs(p[0] - x) ? best : p), null);
      return { line, nearest };
    }).filter(({ nearest }) => nearest).sort((a, b) => b.nearest[1] - a.nearest[1]);
    const round = read.length && view.x === "round" ? read[0].nearest[0] : x;
    this.cursor.setAttribute("x1", this.px(round));
    this.cursor.setAttribute("x2", this.px(round));
    const head = view.x === "round" ? `round ${Math.round(round)} ` : `${short(x)}B sent `;
    this.tip.replaceChildren(element("b", {}, head), ...read.map(({ line, nearest }) =>
      element("span", {}, swatch(line), `${line.name} `, element("i", {}, short(nearest[1]) + " "))));
    const share = this.px(round) / this.wide;
    this.tip.style.left = share < 0.5 ? `calc(${100 * share}% + 12px)` : "auto";
    this.tip.style.right = share < 0.5 ? "auto" : `calc(${100 * (1 - share)}% + 12px)`;
  }
}

const plots = [];

function zoom(range) {
  view.range = range;
  redraw();
}

function zoomBy(factor, plot = plots[0], at = null) {
  if (!plot) return;
  const u = at === null ? 0.5 : plot.x.at(at);
  const ends = [u - (u * factor), u + (1 - u) * factor].map((end) => plot.x.back(end));
  const [low, high] = [Math.max(ends[0], plot.whole[0]), Math.min(ends[1], plot.whole[1])];
  zoom(low <= plot.whole[0] && high >= plot.whole[1] ? null : [low, high]);
}

function redraw() {
  for (const plot of plots) plot.draw();
  for (const button of document.querySelectorAll(".legend button"))
    button.setAttribute("aria-pressed", String(!view.hidden.has(button.dataset.line)));
  remember();
}

function drawEverything(place) {
  const legend = document.getElementById("legend"), names = new Map();
  plots.length = 0;
  place.replaceChildren();
  legend.replaceChildren();
  for (const panel of data.panels) for (const line of panel.lines) names.has(line.name) || names.set(line.name, line);
  for (const [name, line] of names) {
    const button = element("button", { type: "button", "data-line": name }, swatch(line), name);
    button.addEventListener("click", () => {
      if (!view.hidden.delete(name)) view.hidden.add(name);
      redraw();
    });
    legend.append(button);
  }
  for (const metric of data.metrics) {
    const row = element("div", { class: "panels" });
    for (const panel of data.panels) {
      const plot = new Plot(panel, metric);
      if (!plot.lines.length) continue;
      plots.push(plot);
      row.append(plot.figure);
    }
    place.append(element("div", {}, element("h3", {}, metric.title), element("p", { class: "note" }, metric.about), row));
  }
  place.classList.toggle("two", data.panels.length === 1);
  const sent = data.panels.some((panel) => panel.lines.some((line) => line.sent.some((bytes) => bytes)));
  document.getElementById("by").hidden = !sent;
  if (!sent) view.x = "round";
  redraw();
}

function controls(place) {
  for (const radio of document.querySelectorAll("input[name=x]")) {
    radio.checked = radio.value === view.x;
    radio.addEventListener("change", () => { view.x = radio.value; zoom(null); });
  }
  const log = document.getElementById("log-x");
  log.checked = view.logX;
  log.addEventListener("change", () => { view.logX = log.checked; redraw(); });
  document.getElementById("zoom-in").addEventListener("click", () => zoomBy(0.5));
  document.getElementById("zoom-out").addEventListener("click", () => zoomBy(2));
  document.getElementById("zoom-all").addEventListener("click", () => zoom(null));
  let waiting = 0;
  new ResizeObserver(() => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redraw); }).observe(place);
}

function sortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector("button")?.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const number = (text) => (text === "" ? Infinity : Number(text));
      const rows = [...body.rows].sort((a, b) => {
        const [p, q] = [value(a), value(b)];
        const order = Number.isNaN(number(p)) || Number.isNaN(number(q)) ? p.localeCompare(q) : number(p) - number(q) || 0;
        return up ? order : -order;
      });
      body.append(...rows);
    });
  });
}

function themed() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const label = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Use ${dark() ? "light" : "dark"} colours`); };
  try { if (localStorage.getItem("covary-theme")) root.dataset.theme = localStorage.getItem("covary-theme"); } catch { /* from a file */ }
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("covary-theme", root.dataset.theme); } catch { /* from a file */ }
    label();
  });
  label();
}

function copying() {
  for (const button of document.querySelectorAll(".copy"))
    button.onclick = async () => {
      try { await navigator.clipboard.writeText(button.parentElement.querySelector("pre").textContent.trim()); button.textContent = "Copied"; }
      catch { button.textContent = "Select the text to copy it"; }
    };
}

async function watch() { // while the report is served, loads every new version
  for (;;) {
    await new Promise((wake) => setTimeout(wake, 1500));
    try {
      const answer = await fetch("version", { cache: "no-store" });
      if (!answer.ok || (await answer.text()) === data.version) continue;
      const newer = await fetch("/", { cache: "no-store" });
      if (newer.ok) renew(new DOMParser().parseFromString(await newer.text(), "text/html"));
    } catch { /* the server does not answer: keep the page and try again */ }
  }
}

function renew(newer) { // replaces what has changed, and keeps what the reader has hidden, zoomed, sorted or opened
  const fresh = newer.getElementById("data");
  if (!fresh) return;
  const drawn = document.getElementById("plots"), focused = plots.findIndex((plot) => plot.svg === document.activeElement);
  const pressed = document.activeElement?.dataset?.line;
  if (!drawn !== !newer.getElementById("plots")) return location.reload(); // the first curves have appeared, or the last have gone
  data = JSON.parse(fresh.textContent);
  document.querySelector(".lead").replaceWith(newer.querySelector(".lead"));
  for (const section of newer.querySelectorAll("main > section:not(#curves)")) {
    const old = document.getElementById(section.id);
    if (!old) return location.reload();
    if (old.innerHTML === section.innerHTML) continue;
    const button = [...old.querySelectorAll("button, summary")].indexOf(document.activeElement);
    const open = [...old.querySelectorAll("details")].map((each) => each.open);
    const sorted = [...old.querySelectorAll("table.sortable")].map((each) => {
      const heads = [...each.tHead.rows[0].cells];
      const at = heads.findIndex((head) => head.hasAttribute("aria-sort"));
      return at < 0 ? null : [at, heads[at].getAttribute("aria-sort")];
    });
    old.replaceWith(section);
    [...section.querySelectorAll("details")].forEach((each, at) => { each.open = open[at] ?? false; });
    [...section.querySelectorAll("table.sortable")].forEach((each, number) => {
      sortable(each);
      const [at, way] = sorted[number] ?? [null];
      for (let press = 0; at !== null && press < (way === "ascending" ? 1 : 2); press++)
        each.tHead.rows[0].cells[at].querySelector("button").click();
    });
    if (button >= 0) section.querySelectorAll("button, summary")[button]?.focus();
  }
  copying();
  if (!drawn) return;
  drawEverything(drawn);
  if (focused >= 0) plots[focused]?.svg.focus();
  else if (pressed) document.querySelector(`.legend button[data-line="${CSS.escape(pressed)}"]`)?.focus();
}

const place = document.getElementById("plots");
if (place) { drawEverything(place); controls(place); }
document.querySelectorAll("table.sortable").forEach(sortable);
themed();
copying();
if (data.version !== null) watch();
