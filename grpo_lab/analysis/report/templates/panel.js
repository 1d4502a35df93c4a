"use strict";

// ---- logic: what the choices mean; nothing here touches the page

const sameSet = (one, other) => one.length === other.length && one.every((name) => other.includes(name));
const findCondition = (conditions, view) => conditions.find((condition) => condition.level === view.level && sameSet(condition.on, view.on)) || null;
const optionOf = (group, on) => group.options.find((option) => on.includes(option.trick)) || null;
const listed = (names) => new Intl.ListFormat("en").format(names);

// The controls one has to touch to come from a view to a condition: "x off", "truncation = plain".
function steps(panel, view, condition) {
  const moved = panel.groups.filter((group) => optionOf(group, view.on) !== optionOf(group, condition.on)).map((group) => {
    const to = optionOf(group, condition.on);
    if (group.options.length === 1) return `${group.options[0].name} ${to ? "on" : "off"}`;
    return to ? to.name : `${group.label} = ${group.plain}`;
  });
  return view.level === condition.level ? moved : [...moved, `${panel.factor} = ${condition.level}`];
}

// The combinations that were run and take the fewest steps to reach.
function nearest(panel, view) {
  const away = panel.conditions.map((condition) => ({ condition, moves: steps(panel, view, condition) })).filter(({ moves }) => moves.length);
  const fewest = Math.min(...away.map(({ moves }) => moves.length));
  return away.filter(({ moves }) => moves.length === fewest);
}

// A view in words: "x and y together, without z".
function inWords(panel, view) {
  const on = panel.groups.map((group) => optionOf(group, view.on)).filter(Boolean).map((option) => option.name);
  const off = panel.groups.filter((group) => group.options.length === 1 && !optionOf(group, view.on)).map((group) => group.options[0].name);
  const tricks = on.length ? listed(on) + (on.length > 1 ? " together" : "") : "no trick at all";
  const without = on.length && off.length ? `, without ${listed(off)}` : "";
  return tricks + without + (panel.factor ? `, at ${panel.factor} = ${view.level}` : "");
}

function startView(panel) {
  const control = panel.conditions.find((condition) => condition.arm === panel.control);
  const further = panel.metrics.filter((metric) => !metric.main).concat(panel.metrics, panel.metrics);
  const extra = further.slice(0, 2).map((metric) => metric.name);
  return { level: control ? control.level : panel.levels[0], on: [...panel.plain], axis: panel.axes[0].name, extra };
}

// A view as the part of an address after #, and back; what does not exist there is left as it is at the start.
function viewText(view) {
  const pairs = (name, values) => values.map((value) => [name, value]);
  const all = [["level", view.level], ["axis", view.axis], ...pairs("on", view.on), ...pairs("extra", view.extra)];
  return new URLSearchParams(all).toString();
}

function readView(panel, text) {
  const given = new URLSearchParams(text), start = startView(panel);
  if (!given.has("axis")) return start;
  const known = (value, values, otherwise) => (values.includes(value) ? value : otherwise);
  const names = (entries) => entries.map((entry) => entry.name);
  return {
    level: known(given.get("level"), panel.levels, start.level),
    on: panel.groups.map((group) => optionOf(group, given.getAll("on"))).filter(Boolean).map((option) => option.trick).sort(),
    axis: known(given.get("axis"), names(panel.axes), start.axis),
    extra: start.extra.map((name, place) => known(given.getAll("extra")[place], names(panel.metrics), name)),
  };
}

// A mean curve with one x and one n for every point.
function expanded(curve) {
  const [first, last, number] = curve.grid || [];
  const x = curve.x || Array.from({ length: number }, (_, place) => first + ((last - first) * place) / (number - 1));
  return { ...curve, x, n: Array.isArray(curve.n) ? curve.n : x.map(() => curve.n) };
}

// The mean where every seed is in it, and where fewer are; the second part begins where the first ends.
function parts({ mean, n }) {
  const most = Math.max(...n);
  const where = (holds) => mean.map((value, place) => (holds(place) ? value : null));
  return { all: where((at) => n[at] === most), fewer: where((at) => n[at] < most || n[at + 1] < most) };
}

// Lowest and highest value that any run of any condition has of these metrics, with some space.
function extent(panel, metrics) {
  const runs = panel.conditions.flatMap((condition) => condition.runs);
  const values = metrics.flatMap(({ name, part }) => runs.flatMap((run) => run[part].y[name] || [])).filter((value) => value !== null);
  if (!values.length) return [0, 1];
  const [low, high] = [Math.min, Math.max].map((end) => values.reduce((one, other) => end(one, other)));
  const space = (high - low || Math.abs(high) || 1) * 0.04;
  return [low - space, high + space];
}

// One scale for the shares among the main metrics, and for the rewards among them that fit into it; [low, high] by name.
function scales(panel) {
  const own = Object.fromEntries(panel.metrics.map((metric) => [metric.name, extent(panel, [metric])]));
  const main = panel.metrics.filter((metric) => metric.main);
  const [low, high] = extent(panel, main.filter((metric) => metric.unit === "share"));
  const space = (high - low) * 0.25;
  const fits = ({ name, unit }) => unit === "share" || (own[name][0] > low - space && own[name][1] < high + space);
  const together = main.filter(fits), common = extent(panel, together);
  return { ...own, ...Object.fromEntries(together.map(({ name }) => [name, common])) };
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const short = (value) => (value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(1) : compact.format(value));

function nearestPoint(x, value) {
  return x.reduce((best, at, place) => (Math.abs(at - value) < Math.abs(x[best] - value) ? place : best), 0);
}

function pointText({ mean, low, high, n }, place) {
  if (mean[place] === null) return "ended";
  const band = low[place] === null ? "" : ` [${short(low[place])}, ${short(high[place])}]`;
  return `${short(mean[place])}${band}, n = ${n[place]}`;
}

// ---- page

const HEIGHT = 225; // pixels

function start(panel) {
  const find = (id) => document.getElementById(id);
  const form = find("panel-form"), extras = [...form.querySelectorAll(".extra")], ranges = scales(panel);
  const metrics = Object.fromEntries(panel.metrics.map((metric) => [metric.name, metric]));
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  let view, plots = [];

  function make(tag, properties, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  }

  const go = (condition) => change({ ...view, level: condition.level, on: condition.on });
  const conditionName = (condition) => (panel.levels.length > 1 ? `${condition.arm} (${panel.factor} = ${condition.level})` : condition.arm);

  function change(next) {
    view = next;
    history.replaceState(null, "", `#${viewText(view)}`);
    show();
  }

  function readForm() {
    const tricks = [...form.querySelectorAll(".trick:checked")].map((input) => input.value).filter(Boolean);
    const level = form.elements.level ? form.elements.level.value : panel.levels[0];
    return { level, on: tricks.sort(), axis: find("axis").value, extra: extras.map((select) => select.value) };
  }

  function fillForm(chosen) {
    // Of a choice the first input, "", is checked until one of the others is.
    for (const input of form.querySelectorAll(".trick")) input.checked = input.value === "" || view.on.includes(input.value);
    for (const input of form.querySelectorAll("[name=level]")) input.checked = input.value === view.level;
    extras.forEach((select, place) => { select.value = view.extra[place]; });
    find("axis").value = view.axis;
    find("arm").value = chosen ? panel.conditions.indexOf(chosen) : "";
  }

  function messageOf(chosen, control) {
    const words = inWords(panel, view);
    if (!chosen) {
      const waiting = findCondition(panel.waiting, view), far = nearest(panel, view)[0];
      const what = waiting ? `Not run yet: ${words}. It is declared as ${waiting.arm}, and none of its runs is finished.` : `Not run: ${words}.`;
      if (!far) return what;
      return `${what} ${far.moves.length === 1 ? "Run, and one switch away:" : `Nothing that was run is one switch away; ${far.moves.length} away:`}`;
    }
    const alike = panel.conditions.filter((condition) => condition !== chosen && condition.level === view.level && sameSet(condition.on, view.on));
    const collapsed = chosen.collapsed || (control && control.collapsed);
    return [
      `Shown: ${chosen.arm}${words === chosen.arm ? "" : ` (${words})`}.`,
      chosen === control ? "This is the control; switch a trick to compare." : "",
      collapsed ? "Runs that collapsed end at the cross; from there on the bold line is the mean of the others. "
        + `In the numbers at the end they count with ${panel.collapsed_as}.` : "",
      alike.length ? `The same tricks were also run as ${listed(alike.map((condition) => condition.arm))}.` : "",
    ].filter(Boolean).join(" ");
  }

  function showMessage(chosen, control) {
    find("message").replaceChildren(make("p", { className: chosen ? "" : "warning" }, messageOf(chosen, control)));
    find("nearest").replaceChildren(...(chosen ? [] : nearest(panel, view)).map(({ condition, moves }) =>
      make("button", { type: "button", onclick: () => go(condition) }, `${moves.join(", ")} → ${conditionName(condition)}`)));
  }

  function showLegend(shown, control) {
    const entries = [...shown].reverse().map(([kind, condition]) => make("li", { className: kind },
      make("span", { className: "line" }),
      `${condition.arm}${condition === control ? ", the control" : ""}: n = ${condition.finished} of ${condition.planned} seeds finished, `
        + `${condition.collapsed} collapsed${condition.finished < 3 ? "; no interval" : ""}`));
    if (!control) entries.push(make("li", { className: "control" }, `${panel.control}, the control: no finished run here`));
    find("legend").replaceChildren(...entries);
  }

  // The tables that uPlot.join takes, how the lines of each look, and the bands between two of them.
  function layers(metric, curves) {
    const tables = [], nulls = [], series = [{}], bands = [];
    const add = (table, keep, looks) => {
      tables.push(table);
      nulls.push(table.map(() => keep)); // uPlot: 1 breaks a line at null, 0 goes on to the next value
      series.push(...looks.map((look) => ({ points: { show: false }, ...look })));
    };
    for (const [kind, condition, curve] of curves) {
      const stroke = colour(kind), dash = kind === "control" ? [7, 4] : [], { all, fewer } = parts(curve);
      for (const { [metric.part]: run } of condition.runs) {
        if (run.y[metric.name]) add([run.x[view.axis], run.y[metric.name]], 0, [{ stroke: `${stroke}66`, width: 0.8 }]);
      }
      bands.push({ series: [series.length + 1, series.length], fill: `${stroke}2b` });
      const points = { show: !curve.grid, size: 6, fill: stroke };
      add([curve.x, curve.low, curve.high, all, fewer], 1,
        [{ width: 0 }, { width: 0 }, { stroke, width: 2.4, dash, points }, { stroke, width: 2.4, dash: [2, 3], points }]);
    }
    return { data: uPlot.join(tables, nulls), series, bands };
  }

  // A cross where a run stopped before the mean curves end.
  function drawCrosses(plot, metric, curves) {
    Object.assign(plot.ctx, { font: `${14 * devicePixelRatio}px system-ui`, textAlign: "center", textBaseline: "middle" });
    for (const [kind, condition, curve] of curves) {
      plot.ctx.fillStyle = colour(kind);
      for (const { [metric.part]: run } of condition.runs) {
        const values = run.y[metric.name] || [], at = values.findLastIndex((value) => value !== null), x = run.x[view.axis][at];
        if (x < curve.x[curve.x.length - 1] * 0.999) plot.ctx.fillText("\u2715", plot.valToPos(x, "x", true), plot.valToPos(values[at], "y", true));
      }
    }
  }

  function draw(figure, shown) {
    const metric = metrics[figure.dataset.metric], axis = panel.axes.find((one) => one.name === view.axis);
    const place = figure.querySelector(".plot"), readout = figure.querySelector(".readout");
    const curves = shown.filter(([, condition]) => condition.means[view.axis][metric.name])
      .map(([kind, condition]) => [kind, condition, expanded(condition.means[view.axis][metric.name])]);
    readout.textContent = curves.length ? "" : shown.length ? "not logged by these runs" : "nothing was run";
    const ends = curves.map(([, condition, curve]) => `${condition.arm} ends at ${pointText(curve, curve.x.length - 1)}`);
    place.setAttribute("aria-label", `${metric.title} over ${axis.label}: ${ends.join("; ") || readout.textContent}`);
    place.onkeydown = null;
    if (!curves.length) return;
    const read = (plot) => {
      const x = plot.cursor.left < 0 ? null : plot.posToVal(plot.cursor.left, "x");
      const values = () => [...curves].reverse().map(([, condition, curve]) => `${condition.arm} ${pointText(curve, nearestPoint(curve.x, x))}`);
      readout.textContent = x === null ? "" : `at ${short(x)}: ${values().join("; ")}`;
    };
    const line = { stroke: colour("soft"), font: "11px system-ui", labelFont: "11px system-ui", values: (_, ticks) => ticks.map(short) };
    const rule = { stroke: colour("line"), width: 1 };
    const { data, series, bands } = layers(metric, curves);
    const plot = new uPlot({
      width: place.clientWidth, height: HEIGHT, series, bands, legend: { show: false },
      scales: { x: { time: false, range: [0, axis.budget] }, y: { range: ranges[metric.name] } },
      axes: [{ ...line, label: axis.label, labelSize: 16, size: 26, grid: { show: false }, ticks: rule }, { ...line, size: 48, grid: rule, ticks: rule }],
      cursor: { y: false, drag: { x: false }, points: { show: false }, sync: { key: "panel" } },
      hooks: { setCursor: [read], draw: [(drawn) => drawCrosses(drawn, metric, curves)] },
    }, data, place);
    place.onkeydown = (event) => moveCursor(event, plot, curves);
    place.onblur = () => plot.setCursor({ left: -10, top: -10 });
    plots.push(plot);
  }

  // Arrow keys go from point to point of the curve with the most points.
  function moveCursor(event, plot, curves) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const x = curves.map(([, , curve]) => curve.x).reduce((one, other) => (other.length > one.length ? other : one));
    const from = plot.cursor.left < 0 ? x.length - 1 : nearestPoint(x, plot.posToVal(plot.cursor.left, "x"));
    const to = Math.min(Math.max(from + moves[event.key], 0), x.length - 1);
    plot.setCursor({ left: plot.valToPos(x[to], "x"), top: 0 });
  }

  function showCharts(shown) {
    plots.forEach((plot) => plot.destroy());
    plots = [];
    extras.forEach((select) => {
      const figure = select.closest(".chart");
      figure.dataset.metric = select.value;
      figure.querySelector(".meaning").textContent = metrics[select.value].meaning;
    });
    for (const figure of find("charts").querySelectorAll("[data-metric]")) draw(figure, shown);
  }

  function showDifferences(chosen, control) {
    if (!chosen) return find("differences").replaceChildren();
    const { at } = panel.axes.find((one) => one.name === view.axis), compared = control && chosen !== control;
    const named = [...new Set([...panel.metrics.filter((metric) => metric.main), ...view.extra.map((name) => metrics[name])])];
    const rows = named.map(({ name, title }) => {
      const [own, difference, pairs] = chosen.final[view.axis][name];
      return [title, own, ...(compared ? [control.final[view.axis][name][0], difference, String(pairs)] : [])];
    });
    const head = ["metric", chosen.arm, ...(compared ? [control.arm, "difference", "pairs"] : [])];
    const line = (cells, first) => make("tr", {}, ...cells.map((cell, place) => make(place ? "td" : "th", place ? {} : { scope: first }, cell)));
    return find("differences").replaceChildren(make("table", {},
      make("caption", {}, make("span", {}, `At ${at}; brackets: ${panel.brackets}${compared ? ", differences paired by seed" : ""}`)),
      make("thead", {}, make("tr", {}, ...head.map((cell) => make("th", { scope: "col" }, cell)))),
      make("tbody", {}, ...rows.map((row) => line(row, "row")))));
  }

  function show() {
    const chosen = findCondition(panel.conditions, view);
    const control = panel.conditions.find((condition) => condition.arm === panel.control && condition.level === view.level) || null;
    const shown = [["control", control], ["chosen", chosen]].filter(([kind, condition]) => condition && !(kind === "control" && condition === chosen));
    fillForm(chosen);
    showMessage(chosen, control);
    showLegend(shown, control);
    showCharts(shown);
    showDifferences(chosen, control);
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    change(startView(panel));
  });
  form.addEventListener("change", (event) => {
    const condition = event.target.id === "arm" ? panel.conditions[event.target.value] : null;
    if (condition) go(condition);
    else change(readForm());
  });
  const open = () => { view = readView(panel, location.hash.slice(1)); show(); };
  const printed = (on) => { document.documentElement.classList.toggle("print", on); show(); };
  addEventListener("hashchange", () => { if (location.hash.includes("=")) open(); });
  addEventListener("beforeprint", () => printed(true));
  addEventListener("afterprint", () => printed(false));
  addEventListener("resize", () => plots.forEach((plot) => plot.setSize({ width: plot.root.parentNode.clientWidth, height: HEIGHT })));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  form.hidden = false;
  open();
  if (location.hash.includes("=")) find("panel").scrollIntoView();
}

// What the filter `packed` of the templates made of the numbers.
function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

if (typeof document !== "undefined") unpacked(document.getElementById("panel-data").textContent).then(start);
else module.exports = { findCondition, nearest, inWords, steps, startView, viewText, readView, expanded, parts, extent, scales, short, nearestPoint, pointText, unpacked };
