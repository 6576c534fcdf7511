"use strict";
// Builds the page from the JSON in #data: {runs: [RUN...], live: seconds} or {list: [...], live: seconds}.
// Text of a run is written with textContent only.

const COLORS = ["#3b6fd4", "#d4622a", "#2f8f4e", "#8a4fbf", "#b8860b", "#c2396b", "#1b8a94", "#6b6f76"];
const CHARTS = [
  ["Loss", /^loss\/train\/total$|^metrics\/eval(\/.*)?\/LanguageCrossEntropy$/, "nats per token"],
  ["Downstream scores", /^metrics\/.*-shot.*Accuracy|^icl\//, "score"],
  ["Bits per byte", /BitsPerByte$/, "bits"],
  ["Learning rate", /^lr-/, ""],
  ["Gradient norm", /^l2_norm\/grad\/global$/, ""],
  ["Tokens per second", /^throughput\/tokens_per_sec$/, ""],
  ["Model FLOP utilization", /^throughput\/device\/mfu/, "fraction of the peak"],
  ["Where the time goes", /^time\/(compute|data|checkpoint|communication|evaluation)$/, "fraction"],
  ["Memory", /^memory\/(current|peak)[a-z_]*$|^system\/(resident|gpu)_mem$/, "GB"],
  ["Machine", /^system\/(cpu_cores|gpu_utilization|gpu_power)$/, ""],
];
const POINTS = /^metrics\/eval|-shot|^icl\/|BitsPerByte$/; // few values: shown as points
const view = { axis: "steps", log: false, smooth: 0 };
let plots = [];

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  made.append(...children);
  return made;
}

function classed(name, className, text, ...children) {
  const made = element(name, text, ...children);
  made.className = className;
  return made;
}

function table(head, rows, className) {
  const body = className ? classed("table", className) : element("table");
  if (head) body.append(element("tr", null, ...head.map((cell) => element("th", cell))));
  for (const row of rows) body.append(element("tr", null, ...row.map((cell) => element("td", cell))));
  return classed("div", "scroll", null, body);
}

function compact(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1e15 || (size < 1e-3 && size > 0)) return value.toExponential(2);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return +(value / (name === "k" ? 1e3 : unit)).toPrecision(4) + name;
  }
  return String(+value.toPrecision(5));
}

// ---- x axis: steps are what is stored; the others follow from them
function toAxis(run, step) {
  if (view.axis === "tokens") return step * run.tokens_per_step;
  if (view.axis === "FLOPs") return step * run.flops_per_step;
  if (view.axis === "hours") return interpolate(run.series["time/train"], step);
  return step;
}

function interpolate(series, at) {
  if (!series || !series[0].length) return at;
  const [steps, values] = series;
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < at) low = middle + 1; else high = middle;
  }
  if (low === 0 || steps[low] === at) return values[low];
  const share = (at - steps[low - 1]) / (steps[low] - steps[low - 1]);
  return values[low - 1] + Math.min(1, share) * (values[low] - values[low - 1]);
}

function smoothed(values) {
  if (!view.smooth) return values;
  let mean = 0, weight = 0; // exponential mean, without a bias at the start
  return values.map((value) => {
    mean = view.smooth * mean + (1 - view.smooth) * value;
    weight = view.smooth * weight + (1 - view.smooth);
    return mean / weight;
  });
}

// ---- charts
function curvesOf(runs, pattern) {
  const curves = [];
  runs.forEach((run, number) => {
    for (const name of Object.keys(run.series).filter((key) => pattern.test(key)).sort()) {
      const [steps, values] = run.series[name];
      const points = POINTS.test(name);
      if (steps.length) {
        curves.push({
          label: runs.length > 1 ? `${run.name}: ${name}` : name, points, run: number,
          data: [steps.map((step) => toAxis(run, step)), points ? values : smoothed(values)],
        });
      }
    }
  });
  return curves;
}

function markLines(runs) {
  return { hooks: { draw: (plot) => {
    const context = plot.ctx;
    for (const run of runs) for (const [batch, kind] of run.marks) {
      const x = Math.round(plot.valToPos(toAxis(run, batch), "x", true));
      if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
      context.save();
      context.strokeStyle = { failure: "#d33", restart: "#38a" }[kind] || "#e90";
      context.setLineDash([4, 4]);
      context.beginPath();
      context.moveTo(x, plot.bbox.top);
      context.lineTo(x, plot.bbox.top + plot.bbox.height);
      context.stroke();
      context.restore();
    }
  } } };
}

function draw(holder, title, unit, curves, runs) {
  const joined = uPlot.join(curves.map((curve) => curve.data));
  const shown = (plot, value) => compact(value);
  const options = {
    width: holder.clientWidth || 500, height: 260, cursor: { drag: { x: true, y: false }, focus: { prox: 24 } },
    scales: { x: { time: false }, y: { distr: view.log ? 3 : 1 } },
    axes: [
      { values: (plot, ticks) => ticks.map(compact), label: view.axis, labelSize: 18, size: 34 },
      { values: (plot, ticks) => ticks.map(compact), label: unit || undefined, labelSize: unit ? 18 : 0, size: 56 },
    ],
    series: [{ label: view.axis, value: shown }, ...curves.map((curve, number) => ({
      label: curve.label, stroke: COLORS[number % COLORS.length], width: curve.points ? 1 : 1.5, value: shown,
      spanGaps: true, points: { show: curve.points, size: 6 },
    }))],
    plugins: [markLines(runs)],
  };
  if (view.log) joined.forEach((column, i) => { if (i) joined[i] = column.map((v) => (v > 0 ? v : null)); });
  const plot = new uPlot(options, joined, holder);
  plot.root.dataset.title = title;
  plots.push([plot, holder]);
}

function drawAll(runs, holder) {
  for (const [plot] of plots) plot.destroy();
  plots = [];
  holder.replaceChildren();
  const charts = CHARTS.map(([title, pattern, unit]) => [element("div"), title, unit, curvesOf(runs, pattern)])
    .filter(([, , , curves]) => curves.length);
  // all places first: the width of one depends on how many there are
  for (const [place, title] of charts) holder.append(classed("section", "chart", null, element("h3", title), place));
  for (const [place, title, unit, curves] of charts) draw(place, title, unit, curves, runs);
}

function controls(redraw) {
  const axis = element("select");
  for (const name of ["steps", "tokens", "hours", "FLOPs"]) axis.append(element("option", name));
  axis.value = view.axis;
  axis.onchange = () => { view.axis = axis.value; redraw(); };
  const log = element("input");
  Object.assign(log, { type: "checkbox", checked: view.log, onchange: () => { view.log = log.checked; redraw(); } });
  const smooth = element("input");
  Object.assign(smooth, { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth,
    oninput: () => { view.smooth = +smooth.value; redraw(); } });
  return classed("div", "controls", null,
    element("label", "x axis ", axis), element("label", "log y ", log), element("label", "smooth ", smooth),
    classed("span", "soft", "drag to zoom, double-click to reset, click a name to hide it"));
}

// ---- tables
function figures(run) {
  const holder = classed("div", "figures");
  const last = run.last, of = run.total ? ` of ${run.total.toLocaleString("en")}` : "";
  const lines = [["state", run.state], ["step", `${(last["time/batch"] || 0).toLocaleString("en")}${of}`]];
  const add = (label, key, digits) => { if (key in last) lines.push([label, digits ? last[key].toFixed(digits) : compact(last[key])]); };
  add("training loss", "loss/train/total", 4);
  add("validation loss", "metrics/eval/LanguageCrossEntropy", 4);
  add("tokens per second", "throughput/tokens_per_sec");
  add("tokens", "time/token");
  for (const [label, value] of lines) holder.append(classed("div", "figure", null, classed("span", "soft", label), element("b", value)));
  return holder;
}

function runTables(run, several) {
  const parts = several ? [element("h2", run.name)] : [];
  parts.push(element("h2", "What was run"), table(null, Object.entries(run.summary)));
  if (run.checkpoints.length) parts.push(element("h2", "Checkpoints"), table(["step", "size", "saved"], run.checkpoints));
  if (run.marks.length) parts.push(element("h2", "Anomalies, failures and restarts"), table(["batch", "kind", "what"], run.marks));
  for (const { title, rows } of run.profiles) parts.push(element("h2", title), table(["category", "time per step", "share"], rows));
  if (run.generated.length) {
    parts.push(element("h2", "Samples generated at checkpoints"), table(["batch", "prompt", "most likely continuation"], run.generated, "texts"));
  }
  const scores = Object.entries(run.last).filter(([name]) => /-shot/.test(name));
  if (scores.length) parts.push(element("h2", "Downstream scores"), table(["metric", "last value"], scores.map(([n, v]) => [n, compact(v)])));
  const changed = Object.entries(run.changed.keys || {});
  if (changed.length && !several) {
    parts.push(element("h2", `Config: what differs from ${run.changed.of}`),
      table(["key", "there", "here"], changed.map(([key, [there, here]]) => [key, there, here])));
  }
  const all = element("details", null, element("summary", "The whole config"), table(["key", "value"], Object.entries(run.config)));
  parts.push(all);
  return parts;
}

function configDiff(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  const rows = keys.map((key) => [key, ...runs.map((run) => run.config[key] ?? "")])
    .filter(([, first, ...others]) => others.some((value) => value !== first));
  return [element("h2", "Config: what differs"), table(["key", ...runs.map((run) => run.name)], rows)];
}

// ---- pages
function showRuns(content) {
  const { runs } = content, page = document.getElementById("page"), charts = classed("div", "charts");
  const redraw = () => drawAll(runs, charts);
  document.title = runs.map((run) => run.name).join(", ") + " | ingot report";
  page.replaceChildren(element("h1", runs.map((run) => run.name).join(", ")),
    classed("div", "soft", runs.map((run) => run.folder).join(", ")),
    ...runs.flatMap((run) => [...(runs.length > 1 ? [element("h3", run.name)] : []), figures(run)]),
    controls(redraw), charts, ...(runs.length > 1 ? configDiff(runs) : []),
    ...runs.flatMap((run) => runTables(run, runs.length > 1)));
  redraw();
}

function sparkline(values) {
  const canvas = classed("canvas", "small");
  Object.assign(canvas, { width: 320, height: 68 });
  const context = canvas.getContext("2d"), low = Math.min(...values), high = Math.max(...values);
  context.strokeStyle = COLORS[0];
  context.lineWidth = 2;
  values.forEach((value, i) => {
    const x = (i / Math.max(1, values.length - 1)) * 316 + 2, y = 64 - ((value - low) / (high - low || 1)) * 60;
    if (i) context.lineTo(x, y); else context.moveTo(x, y);
  });
  context.stroke();
  return canvas;
}

function showList(content) {
  const body = element("table");
  body.append(element("tr", null, ...["run", "state", "step", "loss", "curve"].map((cell) => element("th", cell))));
  for (const run of content.list) {
    const link = element("a", run.name);
    link.href = run.link;
    const loss = run.loss === null ? "" : run.loss.toFixed(4);
    body.append(element("tr", null, element("td", null, link), element("td", run.state), element("td", String(run.step)),
      element("td", loss), element("td", null, sparkline(run.curve))));
  }
  document.title = "Runs | ingot report";
  document.getElementById("page").replaceChildren(element("h1", "Runs"), classed("div", "scroll", null, body));
}

const show = (content) => (content.list ? showList(content) : showRuns(content));
const start = JSON.parse(document.getElementById("data").textContent);
let last = JSON.stringify(start);
show(start);
window.addEventListener("resize", () => { for (const [plot, holder] of plots) plot.setSize({ width: holder.clientWidth, height: 260 }); });
if (start.live) {
  setInterval(async () => {
    try {
      const text = await (await fetch("data.json", { cache: "no-store" })).text();
      if (text !== last) { last = text; const at = window.scrollY; show(JSON.parse(text)); window.scrollTo(0, at); }
    } catch { document.title = "(not connected) " + document.title.replace("(not connected) ", ""); }
  }, start.live * 1000);
}
