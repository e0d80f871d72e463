"""The look of report.html: its style sheet and the script that draws the figures.

Colours are CSS variables with a light and a dark value; the script reads them when it draws and again when the
reader's setting changes. The policy in the head forbids every request: the page works offline and tells nobody.
"""

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --ink: #14140f; --muted: #63625c; --faint: #8d8c85; --line: #e3e2dc;
  --series-1: #2a6fdb; --series-2: #d9622b; --good: #1a7f37; --warn: #9a5b00; --warn-fill: #fdf1dc;
  --good-fill: #e3f4e6; --code: #f1f0ec;
  --memory-weights: #2a6fdb; --memory-optimizer: #7b5cc4; --memory-gradients: #d9622b; --memory-activations: #2f9e6e;
  --memory-backward: #d4a72c; --memory-other: #9a9992;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121211; --card: #1c1c1a; --ink: #f1f0ea; --muted: #a9a89f; --faint: #7f7e76; --line: #32322e;
    --series-1: #6aa5ff; --series-2: #f08a4b; --good: #6fcf84; --warn: #f0b95a; --warn-fill: #3a2c12;
    --good-fill: #17301c; --code: #262623;
    --memory-weights: #4f86e0; --memory-optimizer: #9a7fe0; --memory-gradients: #e5793f; --memory-activations: #46b386;
    --memory-backward: #e0bb4a; --memory-other: #85847d;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0; }
p { margin: 4px 0 0; }
.caption, .facts { color: var(--muted); font-size: 13px; overflow-wrap: anywhere; }
.title { display: flex; flex-wrap: wrap; align-items: center; gap: 12px; }
.pill { font-size: 12px; padding: 2px 10px; border-radius: 999px; border: 1px solid var(--line); color: var(--muted);
  white-space: nowrap; }
.good { color: var(--good); background: var(--good-fill); border-color: transparent; }
.warn { color: var(--warn); background: var(--warn-fill); border-color: transparent; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.keys { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px; margin-top: 24px; }
.key { padding: 12px 16px; }
.key b { display: block; font-size: 22px; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.key span { color: var(--muted); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 9px 16px; text-align: left; border-bottom: 1px solid var(--line); vertical-align: baseline; }
tr:last-child td { border-bottom: 0; }
th { color: var(--muted); font-weight: 500; font-size: 13px; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td:first-child { white-space: nowrap; }
td.note { color: var(--muted); font-size: 13px; min-width: 14em; overflow-wrap: anywhere; }
.gauge { display: inline-block; position: relative; width: 72px; height: 6px; margin-left: 10px; border-radius: 3px;
  background: var(--line); vertical-align: middle; }
.gauge::before { content: ""; position: absolute; left: 33.9%; width: 32.2%; height: 6px;
  background: var(--good-fill); }
.gauge i { position: absolute; top: -3px; width: 4px; height: 12px; margin-left: -2px; border-radius: 2px;
  background: var(--good); }
.gauge i.off { background: var(--warn); }
.head { padding: 16px 16px 8px; }
.chart + .card, .card + .chart { margin-top: 16px; }
.plain th, .plain td { padding: 6px 16px; font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.charts > .card { margin-top: 0; }
.chart { margin: 0; padding: 16px 16px 6px; min-width: 0; }
.wide { grid-column: 1 / -1; }
.chart header { display: flex; justify-content: space-between; align-items: flex-start; gap: 12px; }
.plot { height: 240px; margin-top: 4px; }
.wide .plot { height: 340px; }
button { font: inherit; font-size: 13px; color: var(--ink); background: var(--code); border: 1px solid var(--line);
  border-radius: 6px; padding: 4px 10px; cursor: pointer; white-space: nowrap; }
button:focus-visible, summary:focus-visible { outline: 2px solid var(--series-1); outline-offset: 2px; }
.sample { padding: 14px 16px; margin: 12px 0 0; }
pre { margin: 8px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; font: 13px/1.55
  ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; max-height: 28em; overflow-y: auto; }
details { padding: 12px 16px; }
summary { cursor: pointer; font-weight: 500; }
footer { margin-top: 40px; color: var(--faint); font-size: 13px; }
@media (max-width: 720px) {
  main { padding: 20px 14px 48px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .keys { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .wide .plot { height: 260px; }
  .gauge, th.note, td.note:empty { display: none; }
  tr { display: grid; grid-template-columns: 1.3fr 1fr 1fr 3.4em; padding: 8px 12px; gap: 2px 8px;
    border-bottom: 1px solid var(--line); }
  tbody tr:last-child { border-bottom: 0; }
  th, td { padding: 0; border: 0; }
  td.note { grid-column: 1 / -1; min-width: 0; }
}
"""

SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const logX = {};

function color(name) { return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim(); }

function traceOf(trace) {
  const style = color(trace.color);
  if (trace.stack || trace.step) return areaOf(trace, style);
  return { type: "scatter", mode: trace.mode, name: trace.name, x: trace.x, y: trace.y, text: trace.text,
    line: { color: style, width: trace.width }, marker: { color: style, size: 7 },
    hovertemplate: (trace.text ? "%{text}: " : "") + "%{y:.4~g}<extra>" + trace.name + "</extra>" };
}

// A stacked category, or the line over them that tells more in its text.
function areaOf(trace, style) {
  const area = { type: "scatter", mode: trace.mode, name: trace.name, x: trace.x, y: trace.y, text: trace.text,
    line: { color: style, width: trace.width, shape: "hv" },
    hovertemplate: "%{y:.4~g}" + (trace.text ? "<br>%{text}" : "") + "<extra>" + trace.name + "</extra>" };
  return trace.stack ? Object.assign(area, { stackgroup: "all", fillcolor: style }) : area;
}

// Stretches of x: every second one shaded, each named where there is room.
function spansOf(figure) {
  const end = Math.max(...figure.traces.flatMap((trace) => trace.x));
  const wide = figure.spans.filter((span) => span.x1 - span.x0 > 0.06 * end);
  return {
    shapes: wide.flatMap((span) => [span.x0, span.x1]).map((x) => ({ type: "line", yref: "paper", y0: 0, y1: 1, x0: x,
      x1: x, line: { color: color("faint"), width: 1, dash: "dot" } })),
    annotations: wide.map((span) => ({ x: (span.x0 + span.x1) / 2, yref: "paper", y: 1, yanchor: "bottom",
      text: span.label, showarrow: false, font: { size: 12, color: color("muted") } })) };
}

function axis(title) {
  return { title: { text: title, font: { size: 12 }, standoff: 8 }, gridcolor: color("line"), zeroline: false,
    linecolor: color("line"), tickfont: { size: 11 }, automargin: true };
}

// Ticks of a logarithmic axis: at 1, 2 and 5 within two decades, at powers of ten beyond.
function digitsOf(figure) {
  const values = figure.traces.flatMap((trace) => trace.y).filter((y) => y > 0);
  return Math.max(...values) / Math.min(...values) > 100 ? 1 : "D2";
}

function layoutOf(figure) {
  const x = axis(figure.x_title), y = axis(figure.y_title);
  if (logX[figure.name] || figure.name === "position") { x.type = "log"; x.dtick = 1; }
  if (figure.log_y) { y.type = "log"; y.dtick = digitsOf(figure); y.exponentformat = "power"; }
  if (figure.from_zero) y.rangemode = "tozero";
  if (figure.name === "mfu") y.tickformat = ".0%";
  if (figure.name === "tokens_per_s") y.tickformat = "~s";
  const shapes = figure.hlines.map((line) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: line.y, y1: line.y,
    line: { color: color("muted"), width: 1.5, dash: "dash" } }));
  const annotations = figure.hlines.map((line) => ({ xref: "paper", x: 1, xanchor: "right", y: line.y,
    yanchor: "bottom", text: line.label, showarrow: false, font: { size: 12, color: color("muted") } }));
  // Lines of a shape do not stretch the axis.
  if (figure.hlines.length) {
    const values = figure.traces.flatMap((trace) => trace.y).concat(figure.hlines.map((line) => line.y));
    y.range = [0, 1.15 * Math.max(...values)];
  }
  if (figure.spans.length) {
    const spans = spansOf(figure);
    shapes.push(...spans.shapes);
    annotations.push(...spans.annotations);
  }
  // Where curves fill the plot, a legend inside would lie on them.
  const filled = figure.from_zero && figure.traces.length > 1 || figure.traces.some((trace) => trace.stack);
  return { margin: { l: 48, r: 12, t: figure.spans.length ? 24 : 8, b: 36 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("muted"), family: "inherit" }, xaxis: x, yaxis: y, shapes, annotations,
    hovermode: figure.name === "position" ? "closest" : "x unified",
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink") } },
    showlegend: figure.traces.length > 1,
    legend: Object.assign({ font: { size: 12, color: color("ink") }, bgcolor: "rgba(0,0,0,0)" },
      filled ? { orientation: "h", x: 0, y: figure.wide ? -0.18 : -0.24 } : { x: 1, xanchor: "right", y: 1 }) };
}

function draw(figure) {
  Plotly.react("plot-" + figure.name, figure.traces.map(traceOf), layoutOf(figure),
    { responsive: true, displayModeBar: false });
}

function drawAll() { figures.forEach(draw); }

for (const button of document.querySelectorAll("button[data-figure]")) {
  button.addEventListener("click", () => {
    const name = button.dataset.figure;
    logX[name] = !logX[name];
    button.setAttribute("aria-pressed", String(logX[name]));
    button.textContent = logX[name] ? "linear steps" : "logarithmic steps";
    draw(figures.find((figure) => figure.name === name));
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
"""
