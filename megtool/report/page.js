"use strict";
(async () => {
const root = document.documentElement, byId = id => document.getElementById(id);

async function unpack(element) {
  const bytes = Uint8Array.from(atob(element.textContent), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// ---- theme -------------------------------------------------------------------------------------
const dark = matchMedia("(prefers-color-scheme: dark)");
const style = name => getComputedStyle(root).getPropertyValue("--" + name).trim();
function palette() {
  const out = {sequential: [0, 1, 2, 3, 4].map(i => [i / 4, style("s" + i)]),
    alarm: [[0, style("s0")], [0.001, style("warning")], [1, style("error")]],
    diverging: [[0, style("c0")], [0.5, style("raised")], [1, style("c1")]]};
  for (let i = 0; i < 8; i++) out[i] = style("c" + i);
  for (const name of ["good", "warning", "error", "weak", "back", "band", "line", "accent"])
    out[name] = style(name);
  return out;
}
function paint(value, colors) {
  if (typeof value === "string" && value[0] === "@" && value.slice(1) in colors)
    return colors[value.slice(1)];
  if (Array.isArray(value))
    return value.length && typeof value[0] === "number" ? value : value.map(v => paint(v, colors));
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, paint(v, colors)]));
  return value;
}

// ---- figures -----------------------------------------------------------------------------------
function layoutOf(layout) {
  const axis = {gridcolor: style("line"), linecolor: style("line"), zerolinecolor: style("line"),
    tickcolor: style("line"), automargin: true};
  const out = {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: 'system-ui,-apple-system,"Segoe UI",Roboto,sans-serif', size: 12.5,
      color: style("text")},
    margin: {l: 64, r: 24, t: 30, b: 62}, legend: {font: {size: 12}},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: style("weak"), activecolor: style("accent")}, hoverlabel:
      {bgcolor: style("raised"), bordercolor: style("line"), align: "left", font: {color: style("text"), size: 12.5}},
    ...layout};
  for (const name of ["xaxis", "yaxis"]) {
    out[name] = {...axis, ...layout[name]};
    if (out[name].title) out[name].title = {standoff: 10, ...out[name].title};
  }
  return out;
}
const drawn = new Map();
const CONFIG = {displaylogo: false, displayModeBar: "hover", responsive: true, showTips: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};
function draw(id) {
  const figure = content.figures[id], element = byId(id), colors = palette();
  const chosen = document.querySelector(`select[data-figure="${id}"]`);
  const traces = figure.variants[chosen ? chosen.selectedIndex : 0];
  const first = !drawn.has(id);
  drawn.set(id, traces);
  const done = Plotly.react(element, paint(traces, colors), layoutOf(paint(figure.layout, colors)), CONFIG);
  if (first) listen(element, id);
  return done;
}
function spoken(point) {
  const t = point.data, n = Array.isArray(point.pointNumber) ? point.pointNumber : [point.pointNumber];
  const text = n.reduce((v, i) => v && v[i], t.text);
  if (text) return String(text).replace(/<[^>]*>/g, ", ");
  return [t.name, point.label, point.x, point.y, point.z].filter(v => v !== undefined).join(", ");
}
function listen(element, id) {
  const said = byId(id + "-said");
  element.on("plotly_hover", e => { said.textContent = spoken(e.points[0]); });
  let curve = 0, point = -1;
  element.addEventListener("keydown", e => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[e.key], other = {ArrowDown: 1, ArrowUp: -1}[e.key];
    if (!step && !other || !element._fullLayout._has("cartesian")) return;
    const traces = element.data, type = traces[curve].type;
    if (type === "heatmap") {
      const z = traces[0].z, wide = z[0].length, most = z.length * wide;
      point = (point + (step || 0) + (other || 0) * wide + most) % most;
      const row = Math.floor(point / wide), column = point % wide;
      Plotly.Fx.hover(element, [{curveNumber: 0, pointNumber: [row, column]}]);
      said.textContent = spoken({data: traces[0], pointNumber: [row, column], x: traces[0].x[column],
        y: traces[0].y[row], z: z[row][column]});
    } else {
      if (other) curve = (curve + other + traces.length) % traces.length;
      const most = (traces[curve].x || []).length;
      point = Math.min(Math.max(point + (step || 0), 0), most - 1);
      Plotly.Fx.hover(element, [{curveNumber: curve, pointNumber: point}]);
      const t = traces[curve];
      said.textContent = spoken({data: t, pointNumber: point, x: t.x[point], y: t.y[point]});
    }
    e.preventDefault();
  });
}

// ---- tables ------------------------------------------------------------------------------------
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
function bytes(n) {
  let unit = 0;
  while (Math.abs(n) >= 1024 && unit < 5) { n /= 1024; unit++; }
  return (unit ? n.toFixed(1) : n) + " " + UNITS[unit];
}
function shown(value, kind) {
  if (value === null || value === undefined) return "-";
  if (kind === "bytes") return bytes(value);
  if (kind === "count") return value.toLocaleString("en-US");
  if (kind === "share") return (100 * value).toFixed(value && value < 0.001 ? 4 : 2) + " %";
  if (kind === "number") return typeof value === "number" ? String(+value.toPrecision(4)) : String(value);
  return String(value);
}
function spark(bins) {
  const [, negative, zero, positive] = bins;
  const all = [...negative].reverse().concat([zero], positive);
  const wide = Math.ceil(all.length / 24), sums = [];
  for (let i = 0; i < all.length; i += wide) sums.push(all.slice(i, i + wide).reduce((a, b) => a + b, 0));
  const most = Math.max(...sums, 1);
  return sums.map(n => n ? "▁▂▃▄▅▆▇█"[Math.min(7, Math.floor(8 * n / most))] : " ").join("");
}
function histogram(title, bins) {
  const [first, negative, zero, positive] = bins;
  const marks = [...negative].map((n, i) => [-1, first + i, n]).reverse()
    .concat([[0, 0, zero]], positive.map((n, i) => [1, first + i, n]));
  const total = marks.reduce((a, m) => a + m[2], 0) || 1;
  const name = m => m[0] ? (m[0] < 0 ? "-" : "") + (2 ** m[1]).toPrecision(3).replace(/\.?0+(e|$)/, "$1") : "0";
  byId("detail-title").textContent = title;
  byId("detail").showModal();
  const ticks = marks.map((m, i) => i).filter(i => i % Math.ceil(marks.length / 14) === 0);
  Plotly.react(byId("detail-plot"), paint([{type: "bar", x: marks.map((m, i) => i), y: marks.map(m => m[2] / total),
    marker: {color: marks.map(m => m[0] ? "@0" : "@7")}, text: marks.map(m =>
      (m[0] ? `${name(m)} to ${name([m[0], m[1] + 1])}` : "0") + `: ${m[2].toLocaleString("en-US")} (${(100 * m[2] / total).toFixed(2)} %)`),
    textposition: "none", hovertemplate: "%{text}<extra></extra>"}], palette()),
    layoutOf({bargap: 0.04, xaxis: {tickvals: ticks, ticktext: ticks.map(i => name(marks[i])), title: {text: "value"}},
      yaxis: {title: {text: "share of elements"}, tickformat: ".1%"}}), CONFIG);
}
function makeTable(id) {
  const {columns, rows} = content.tables[id], table = byId(id), more = byId(id + "-more");
  const input = document.querySelector(`input[data-table="${id}"]`);
  const texts = rows.map(r => r.filter((_, i) => columns[i][1] !== "bins").join(" ").toLowerCase());
  let order = rows.map((_, i) => i), limit = 100, by = -1, up = true;
  const head = table.createTHead().insertRow(), body = table.createTBody();
  columns.forEach(([name, kind], i) => {
    const cell = document.createElement("th"), button = document.createElement("button");
    cell.className = kind;
    cell.scope = "col";
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => { up = by === i ? !up : kind === "text" || kind === "code"; by = i; refresh(); });
    cell.append(button);
    head.append(cell);
  });
  function refresh() {
    const words = input ? input.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
    order = rows.map((_, i) => i).filter(i => words.every(w => texts[i].includes(w)));
    if (by >= 0) order.sort((a, b) => {
      const x = rows[a][by], y = rows[b][by];
      const d = typeof x === "number" && typeof y === "number" ? x - y
        : (typeof y === "number") - (typeof x === "number") || String(x).localeCompare(String(y), "en", {numeric: true});
      return up ? d : -d;
    });
    [...head.cells].forEach((c, i) => c.setAttribute("aria-sort", i !== by ? "none" : up ? "ascending" : "descending"));
    body.replaceChildren(...order.slice(0, limit).map(line));
    byId(id + "-count").textContent = (order.length === rows.length ? "" : order.length.toLocaleString("en-US") + " of ")
      + rows.length.toLocaleString("en-US") + (rows.length === 1 ? " row" : " rows");
    more.hidden = order.length <= limit;
    if (!more.hidden) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Show 1,000 more rows";
      button.addEventListener("click", () => { limit += 1000; refresh(); });
      more.replaceChildren(button);
    }
  }
  function line(i) {
    const row = document.createElement("tr");
    rows[i].forEach((value, j) => {
      const cell = row.insertCell(), kind = columns[j][1];
      cell.className = kind;
      if (kind === "bins" && value) {
        const button = document.createElement("button");
        button.type = "button";
        button.className = "spark";
        button.textContent = spark(value);
        button.setAttribute("aria-label", "Histogram of " + rows[i][0]);
        button.addEventListener("click", () => histogram(String(rows[i][0]), value));
        cell.append(button);
      } else if (kind === "tone") {
        const chip = document.createElement("span");
        chip.className = "chip " + value;
        chip.textContent = value;
        cell.append(chip);
      } else {
        cell.textContent = shown(value, kind);
        if (kind === "text" && cell.textContent.length > 60) cell.classList.add("wrap");
      }
    });
    return row;
  }
  if (input) input.addEventListener("input", () => { limit = 100; refresh(); });
  refresh();
}

// ---- start -------------------------------------------------------------------------------------
const content = JSON.parse(await unpack(byId("content")));
Object.keys(content.tables).forEach(makeTable);
const library = document.createElement("script");
library.textContent = await unpack(byId("library"));
document.head.append(library);

const waiting = new Set(Object.keys(content.figures));
async function drawAll() { for (const id of [...waiting]) { waiting.delete(id); await draw(id); } }
const visible = [...waiting].filter(id => byId(id).getBoundingClientRect().top < innerHeight * 1.2);
for (const id of visible) { waiting.delete(id); await draw(id); }
root.dataset.ready = String(Math.round(performance.now()));
const idle = window.requestIdleCallback || (f => setTimeout(f, 60));
(function next() {
  const [id] = waiting;
  if (id === undefined) { root.dataset.complete = "yes"; return; }
  waiting.delete(id);
  draw(id).then(() => idle(next));
})();

const repaint = () => drawn.forEach((_, id) => draw(id));
document.querySelectorAll("select[data-figure]").forEach(s =>
  s.addEventListener("change", () => draw(s.dataset.figure)));
byId("theme").addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  root.dataset.theme = isDark ? "light" : "dark";
  repaint();
});
dark.addEventListener("change", () => { delete root.dataset.theme; repaint(); });
byId("close").addEventListener("click", () => byId("detail").close());
byId("print").addEventListener("click", () => print());
byId("save").addEventListener("click", async () => {
  const element = byId("report"), link = document.createElement("a");
  const text = element.type === "application/json" ? element.textContent : await unpack(element);
  link.href = URL.createObjectURL(new Blob([text], {type: "application/json"}));
  link.download = "report.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});
let before = null;
addEventListener("beforeprint", () => { before = root.dataset.theme || ""; root.dataset.theme = "light"; drawAll(); repaint(); });
addEventListener("afterprint", () => { if (before) root.dataset.theme = before; else delete root.dataset.theme; repaint(); });
})().catch(error => {
  const note = document.createElement("p");
  note.textContent = "The figures and tables need a browser of 2023 or later: " + error;
  document.getElementById("main").prepend(note);
  throw error;
});
