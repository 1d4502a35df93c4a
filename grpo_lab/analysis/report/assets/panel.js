"use strict";

// ---- logic: what the choices mean; nothing here touches the page

function sameSet(one, other) {
  return one.length === other.length && one.every((name) => other.includes(name));
}

function findCell(cells, level, on) {
  return cells.find((cell) => cell.level === level && sameSet(cell.on, on)) || null;
}

function chosenOption(group, on) {
  const option = group.options.find((one) => on.includes(one.trick));
  return option ? option.trick : "";
}

// The tricks that are on once `trick` ("" for none) is chosen in a group.
function withChoice(group, on, trick) {
  const others = on.filter((name) => !group.options.some((option) => option.trick === name));
  return (trick ? [...others, trick] : others).sort();
}

// How many controls one has to touch to come from a view to a cell.
function distance(panel, view, cell) {
  const moved = panel.groups.filter((group) => chosenOption(group, view.on) !== chosenOption(group, cell.on));
  return moved.length + (view.level === cell.level ? 0 : 1);
}

// The combinations that were run and take the fewest controls to reach.
function nearest(panel, view) {
  const away = panel.cells.map((cell) => ({ cell, far: distance(panel, view, cell) })).filter((one) => one.far > 0);
  const least = Math.min(...away.map((one) => one.far));
  return away.filter((one) => one.far === least);
}

function listed(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}`;
}

// What stands in the controls, in words: "x and y together, without z".
function inWords(panel, view) {
  const known = panel.groups.flatMap((group) => group.options.map((option) => ({ trick: option.trick, name: optionName(group, option) })));
  const others = view.on.filter((trick) => !known.some((one) => one.trick === trick));
  const on = [...known.filter((one) => view.on.includes(one.trick)).map((one) => one.name), ...others];
  const off = panel.groups.filter((group) => group.options.length === 1 && !chosenOption(group, view.on)).map((group) => optionName(group, group.options[0]));
  const what = on.length ? listed(on) + (on.length > 1 ? " together" : "") : "no trick at all";
  const without = on.length && off.length ? `, without ${listed(off)}` : "";
  return `${what}${without}${panel.factor ? `, at ${panel.factor} = ${view.level}` : ""}`;
}

function optionName(group, option) {
  return group.options.length > 1 || option.label !== "on" ? `${group.label} = ${option.label}` : group.label;
}

function withUnit(metric) {
  return metric.unit === "1" || metric.title.includes(metric.unit) ? metric.title : `${metric.title} (${metric.unit})`;
}

// What changes on the way from a view to a cell: "x off, y on".
function steps(panel, view, cell) {
  const moves = panel.groups.flatMap((group) => {
    const from = chosenOption(group, view.on), to = chosenOption(group, cell.on);
    if (from === to) return [];
    if (group.options.length === 1) return [`${optionName(group, group.options[0])} ${to ? "on" : "off"}`];
    const option = group.options.find((one) => one.trick === to);
    return [`${group.label} = ${option ? option.label : group.plain}`];
  });
  return [...moves, ...(view.level === cell.level ? [] : [`${panel.factor} = ${cell.level}`])].join(", ");
}

function startView(panel) {
  const control = panel.cells.find((cell) => cell.arm === panel.control);
  const extra = panel.metrics.filter((metric) => !metric.main).map((metric) => metric.name);
  const level = control ? control.level : panel.levels[0];
  return { level, on: [...panel.plain], axis: panel.axes[0].name, extra: [extra[0] || "", extra[1] || extra[0] || ""] };
}

// A view as the part of an address after #, and back; what does not exist there is left as it is at the start.
function viewText(panel, view) {
  const parts = new URLSearchParams();
  if (panel.levels.length > 1) parts.append("level", view.level);
  (view.on.length ? view.on : [""]).forEach((trick) => parts.append("on", trick));
  parts.append("axis", view.axis);
  view.extra.forEach((metric) => parts.append("extra", metric));
  return parts.toString();
}

function readView(panel, text) {
  const view = startView(panel);
  const parts = new URLSearchParams(text);
  if (panel.levels.includes(parts.get("level"))) view.level = parts.get("level");
  if (panel.axes.some((axis) => axis.name === parts.get("axis"))) view.axis = parts.get("axis");
  if (parts.has("on")) view.on = panel.groups.map((group) => chosenOption(group, parts.getAll("on"))).filter(Boolean).sort();
  parts.getAll("extra").slice(0, 2).forEach((name, place) => {
    if (panel.metrics.some((metric) => metric.name === name)) view.extra[place] = name;
  });
  return view;
}

// A curve with one x and one n for every point.
function expanded(curve) {
  let x = curve.x;
  if (curve.grid) {
    const [first, last, number] = curve.grid;
    x = Array.from({ length: number }, (_, place) => first + ((last - first) * place) / (number - 1));
  }
  return { ...curve, x, n: Array.isArray(curve.n) ? curve.n : x.map(() => curve.n) };
}

// Lowest and highest number that any seed or mean of these metrics has in any cell.
function extent(panel, axis, metrics) {
  let low = Infinity, high = -Infinity;
  const see = (values) => values.forEach((value) => {
    if (value !== null) [low, high] = [Math.min(low, value), Math.max(high, value)];
  });
  for (const cell of panel.cells) {
    for (const metric of metrics) {
      const curve = cell.curves[axis][metric];
      if (!curve) continue;
      see(curve.mean);
      Object.values(curve.seeds).forEach((seed) => see(seed.y || seed));
    }
  }
  if (low > high) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.04;
  return [low - room, high + room];
}

// Round numbers inside a range, about `wanted` of them.
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const found = [];
  for (let place = first; place * step <= high + step * 1e-9; place += 1) found.push(Number((place * step).toPrecision(12)));
  return found;
}

// 250000 -> 250k, 0.004 -> 0.004, 3e12 -> 3T
function short(value) {
  const size = Math.abs(value);
  if (size > 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(1);
  for (const [scale, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= scale) return `${Number((value / scale).toPrecision(4))}${letter}`;
  }
  return `${Number(value.toPrecision(4))}`;
}

// The d of an SVG path through the points that are not null; a gap starts anew.
function linePath(x, y, across, up) {
  let path = "", pen = false;
  y.forEach((value, place) => {
    if (value !== null) path += `${pen ? "L" : "M"}${across(x[place]).toFixed(1)} ${up(value).toFixed(1)}`;
    pen = value !== null;
  });
  return path;
}

function bandPath(x, low, high, across, up) {
  let path = "";
  for (let start = 0; start < x.length; start += 1) {
    if (low[start] === null) continue;
    let stop = start;
    while (stop + 1 < x.length && low[stop + 1] !== null) stop += 1;
    const places = Array.from({ length: stop - start + 1 }, (_, step) => start + step);
    const point = (place, values) => `${across(x[place]).toFixed(1)} ${up(values[place]).toFixed(1)}`;
    path += `M${places.map((place) => point(place, high)).join("L")}L${places.reverse().map((place) => point(place, low)).join("L")}Z`;
    start = stop;
  }
  return path;
}

// The mean in pieces of equally many seeds; a piece begins where the one before ended.
function pieces(curve) {
  const most = Math.max(...curve.n);
  const found = [];
  curve.n.forEach((n, place) => {
    const last = found[found.length - 1];
    if (last && last.n === n) last.to = place;
    else found.push({ n, from: last ? last.to : place, to: place, fewer: n < most });
  });
  return found.filter((piece) => piece.n > 0);
}

// The last point of a line that is not null.
function endOf(x, y) {
  const place = y.reduce((best, value, at) => (value === null ? best : at), -1);
  return place < 0 ? null : { x: x[place], y: y[place] };
}

// One scale for the shares among the main metrics, and for the rewards among them that fit into it; [low, high] by name.
function scales(panel, axis) {
  const main = panel.metrics.filter((metric) => metric.main).map((metric) => metric.name);
  const shares = panel.metrics.filter((metric) => metric.main && metric.unit === "share").map((metric) => metric.name);
  const own = Object.fromEntries(panel.metrics.map(({ name }) => [name, extent(panel, axis, [name])]));
  const [low, high] = extent(panel, axis, shares);
  const room = (high - low) * 0.25;
  const together = main.filter((name) => shares.includes(name) || (own[name][0] > low - room && own[name][1] < high + room));
  const common = extent(panel, axis, together);
  return { ...own, ...Object.fromEntries(together.map((name) => [name, common])) };
}

function nearestPoint(x, value) {
  return x.reduce((best, at, place) => (Math.abs(at - value) < Math.abs(x[best] - value) ? place : best), 0);
}

function pointText(curve, place) {
  const mean = curve.mean[place];
  if (mean === null) return "ended";
  const band = curve.low[place] === null ? "" : ` [${short(curve.low[place])}, ${short(curve.high[place])}]`;
  return `${short(mean)}${band}, n = ${curve.n[place]}`;
}

// ---- page

function start(panel) {
  const find = (id) => document.getElementById(id);
  const seen = new Map();
  let view = fromAddress() || startView(panel);

  function fromAddress() {
    const text = location.hash.slice(1);
    return text.includes("=") ? readView(panel, text) : null;
  }

  function make(name, attributes, ...children) {
    const svg = ["svg", "path", "line", "text", "circle", "rect", "g", "clipPath", "defs"].includes(name);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null) node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  }

  function change(next) {
    view = { ...view, ...next };
    history.replaceState(null, "", `#${viewText(panel, view)}`);
    show();
  }

  function buildControls() {
    const form = find("tricks");
    form.addEventListener("submit", (event) => event.preventDefault());
    if (panel.levels.length > 1) {
      const options = panel.levels.map((level) => ({ value: level, label: level }));
      form.append(choice(panel.factor || "level", "level", options, (level) => change({ level })));
    }
    panel.groups.forEach((group, place) => {
      const pick = (trick) => change({ on: withChoice(group, view.on, trick) });
      if (group.options.length > 1) {
        const plain = { value: "", label: group.plain };
        const options = group.options.map((option) => ({ value: option.trick, label: option.label }));
        form.append(choice(group.label, `group-${place}`, [plain, ...options], pick));
        return;
      }
      const trick = group.options[0].trick;
      const input = make("input", { type: "checkbox", role: "switch", id: `switch-${place}`, "data-trick": trick,
        onchange: (event) => pick(event.target.checked ? trick : "") });
      const detail = group.detail ? [make("span", { class: "detail" }, group.detail)] : [];
      form.append(make("div", { class: "box" }, make("label", {}, input, optionName(group, group.options[0])), ...detail));
    });
    find("axis").append(...panel.axes.map((axis) => make("option", { value: axis.name }, axis.label)));
    for (const [axis, other] of Object.entries(panel.alike)) {
      find("axis").append(make("option", { disabled: "" }, `${axis.replaceAll("_", " ")}: proportional to ${other.replaceAll("_", " ")}`));
    }
    find("axis").addEventListener("change", (event) => change({ axis: event.target.value }));
    find("arm").append(make("option", { value: "" }, "-"), ...panel.cells.map((cell, place) => make("option", { value: place }, name(cell))));
    find("arm").addEventListener("change", (event) => {
      const cell = panel.cells[event.target.value];
      if (cell) change({ level: cell.level, on: cell.on });
    });
    find("reset").addEventListener("click", () => change(startView(panel)));
  }

  function choice(legend, group, options, pick) {
    return make("fieldset", { class: "box" }, make("legend", {}, legend), ...options.map((option) => {
      const input = make("input", { type: "radio", name: group, value: option.value, onchange: () => pick(option.value) });
      return make("label", {}, input, option.label);
    }));
  }

  function name(cell) {
    return panel.levels.length > 1 ? `${cell.arm} (${panel.factor} = ${cell.level})` : cell.arm;
  }

  function showControls(chosen) {
    const form = find("tricks");
    panel.groups.forEach((group, place) => {
      const trick = chosenOption(group, view.on);
      if (group.options.length === 1) form.querySelector(`#switch-${place}`).checked = Boolean(trick);
      else form.querySelectorAll(`input[name="group-${place}"]`).forEach((input) => { input.checked = input.value === trick; });
    });
    form.querySelectorAll('input[name="level"]').forEach((input) => { input.checked = input.value === view.level; });
    find("axis").value = view.axis;
    find("arm").value = chosen ? String(panel.cells.indexOf(chosen)) : "";
  }

  function showWords(chosen, control) {
    const words = inWords(panel, view);
    const lines = [];
    find("nearest").replaceChildren();
    if (chosen) {
      const others = panel.cells.filter((cell) => cell !== chosen && cell.level === view.level && sameSet(cell.on, view.on));
      lines.push(`Shown: ${chosen.arm}${words === chosen.arm ? "" : ` (${words})`}.`);
      if (chosen === control) lines.push("This is the control; switch a trick to compare.");
      if (chosen.collapsed || (control && control.collapsed)) {
        lines.push(`Runs that collapsed end at the cross; from there on the bold line is the mean of the others. In the numbers at the end they count with ${panel.collapsed_as}.`);
      }
      if (others.length) lines.push(`The same tricks were also run as ${listed(others.map((cell) => cell.arm))}.`);
    } else {
      const waiting = findCell(panel.waiting, view.level, view.on);
      lines.push(waiting ? `Not run yet: ${words}. It is declared as ${waiting.arm}, and none of its runs is finished.` : `Not run: ${words}.`);
      const near = nearest(panel, view);
      if (near.length) {
        lines.push(near[0].far === 1 ? "Run, and one switch away:" : `Nothing that was run is one switch away; ${near[0].far} away:`);
        find("nearest").append(...near.map(({ cell }) => make("button", { type: "button", onclick: () => change({ level: cell.level, on: cell.on }) },
          `${steps(panel, view, cell)} → ${name(cell)}`)));
      }
    }
    find("said").replaceChildren(make("p", chosen ? {} : { class: "warning" }, lines.join(" ")));
  }

  function showLegend(chosen, control) {
    const entry = (kind, cell, said) => make("li", { class: kind },
      make("svg", { width: 34, height: 14, "aria-hidden": "true" },
        ...(cell.finished < 3 ? [] : [make("rect", { class: "band", x: 0, y: 1, width: 34, height: 12 })]),
        make("path", { class: "mean", d: "M0 7L34 7" })),
      make("span", {}, `${cell.arm}${said}: n = ${cell.finished} of ${cell.planned} seeds finished, ${cell.collapsed} collapsed`
        + (cell.finished < 3 ? "; no interval" : "")));
    const entries = [];
    if (chosen) entries.push(entry("chosen", chosen, chosen === control ? ", the control" : ""));
    if (control && control !== chosen) entries.push(entry("control", control, ", the control"));
    if (!control) entries.push(make("li", { class: "control" }, `${panel.control}, the control: no finished run here`));
    find("legend").replaceChildren(...entries);
  }

  function drawCurve(plot, kind, curve, across, up) {
    const layer = make("g", { class: kind });
    const last = curve.x[curve.x.length - 1];
    for (const seed of Object.values(curve.seeds)) {
      const [x, y] = [seed.x || curve.x, seed.y || seed];
      layer.append(make("path", { class: "seed", d: linePath(x, y, across, up) }));
      const end = endOf(x, y);
      if (end && end.x < last * 0.999) {
        const [at, high] = [across(end.x), up(end.y)];
        layer.append(make("path", { class: "end", d: `M${at - 4} ${high - 4}L${at + 4} ${high + 4}M${at - 4} ${high + 4}L${at + 4} ${high - 4}` }));
      }
    }
    layer.append(make("path", { class: "band", d: bandPath(curve.x, curve.low, curve.high, across, up) }));
    for (const piece of pieces(curve)) {
      const part = (values) => values.slice(piece.from, piece.to + 1);
      layer.append(make("path", { class: piece.fewer ? "mean fewer" : "mean", d: linePath(part(curve.x), part(curve.mean), across, up) }));
    }
    if (!curve.grid) {
      curve.mean.forEach((value, place) => {
        if (value !== null) layer.append(make("circle", { class: "dot", r: 2.8, cx: across(curve.x[place]), cy: up(value) }));
      });
    }
    plot.append(layer);
  }

  function chart(metric, range, chosen, control, slot) {
    const axis = panel.axes.find((one) => one.name === view.axis);
    const curves = [["control", control], ["chosen", chosen]]
      .filter(([kind, cell]) => cell && !(kind === "control" && cell === chosen) && cell.curves[view.axis][metric.name])
      .map(([kind, cell]) => [kind, expanded(cell.curves[view.axis][metric.name]), cell]);
    const width = Math.max(260, slot.clientWidth || 340), height = 225;
    const left = 48, right = width - 18, top = 8, bottom = height - 38;
    const across = (x) => left + ((right - left) * x) / axis.budget;
    const up = (y) => bottom - ((bottom - top) * (y - range[0])) / (range[1] - range[0]);
    const clip = `clip-${metric.name.replace(/\W/g, "-")}-${slot.dataset.place}`;
    const told = curves.map(([, curve, cell]) => `${cell.arm} ends at ${pointText(curve, curve.x.length - 1)}`).join("; ");
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0",
      "aria-label": `${metric.title} over ${axis.label}: ${told || "nothing was recorded"}` });
    svg.append(make("defs", {}, make("clipPath", { id: clip }, make("rect", { x: left, y: top, width: right - left, height: bottom - top }))));
    for (const tick of ticks(range[0], range[1], 6)) {
      svg.append(make("line", { class: "frame", x1: left, x2: right, y1: up(tick), y2: up(tick) }));
      svg.append(make("text", { x: left - 5, y: up(tick) + 4, "text-anchor": "end" }, short(tick)));
    }
    for (const tick of ticks(0, axis.budget, width > 420 ? 6 : 4)) {
      svg.append(make("line", { class: "frame", x1: across(tick), x2: across(tick), y1: bottom, y2: bottom + 4 }));
      svg.append(make("text", { x: across(tick), y: bottom + 16, "text-anchor": "middle" }, short(tick)));
    }
    svg.append(make("text", { x: (left + right) / 2, y: height - 5, "text-anchor": "middle" }, axis.label));
    const plot = make("g", { "clip-path": `url(#${clip})` });
    curves.forEach(([kind, curve]) => drawCurve(plot, kind, curve, across, up));
    svg.append(plot);
    if (!curves.length) {
      const why = chosen || control ? "not logged by these runs" : "nothing was run";
      svg.append(make("text", { x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" }, why));
    }
    readable(svg, curves, slot, { left, right, top, bottom, across, budget: axis.budget });
    return svg;
  }

  function readable(svg, curves, slot, box) {
    if (!curves.length) return;
    const longest = curves.map(([, curve]) => curve.x).reduce((one, other) => (other.length > one.length ? other : one));
    const readout = slot.querySelector(".readout");
    const cursor = make("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
    let place = longest.length - 1;
    svg.append(cursor);
    const at = (next) => {
      place = Math.min(Math.max(next, 0), longest.length - 1);
      const x = longest[place];
      for (const [key, value] of [["x1", box.across(x)], ["x2", box.across(x)], ["visibility", "visible"]]) cursor.setAttribute(key, value);
      readout.textContent = `at ${short(x)}: ` + [...curves].reverse()
        .map(([, curve, cell]) => `${cell.arm} ${pointText(curve, nearestPoint(curve.x, x))}`).join("; ");
    };
    const gone = () => { cursor.setAttribute("visibility", "hidden"); readout.textContent = ""; };
    svg.addEventListener("pointermove", (event) => {
      const bounds = svg.getBoundingClientRect();
      const x = ((event.clientX - bounds.left - box.left) / (box.right - box.left)) * box.budget;
      at(nearestPoint(longest, x));
    });
    svg.addEventListener("pointerleave", gone);
    svg.addEventListener("blur", gone);
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
      if (!(event.key in moves)) return;
      event.preventDefault();
      at(place + moves[event.key]);
    });
  }

  function slots() {
    if (!seen.has(view.axis)) seen.set(view.axis, scales(panel, view.axis));
    const range = seen.get(view.axis);
    const main = panel.metrics.filter((metric) => metric.main);
    const extra = view.extra.map((wanted) => panel.metrics.find((metric) => metric.name === wanted)).filter(Boolean);
    return [...main.map((metric) => ({ metric, range: range[metric.name], choose: null })),
      ...extra.map((metric, place) => ({ metric, range: range[metric.name], choose: place }))];
  }

  function caption(metric, choose) {
    const meaning = make("span", { class: "meaning" }, metric.meaning);
    if (choose === null) return make("figcaption", {}, make("b", {}, withUnit(metric)), meaning);
    const select = make("select", { id: `extra-${choose}`, onchange: (event) => {
      change({ extra: view.extra.map((one, place) => (place === choose ? event.target.value : one)) });
      find(`extra-${choose}`).focus();
    } }, ...panel.metrics.map((one) => make("option", { value: one.name }, withUnit(one))));
    select.value = metric.name;
    return make("figcaption", {}, make("label", {}, choose ? "another metric" : "a metric of your choice", select), meaning);
  }

  function showCharts(chosen, control) {
    const made = slots().map(({ metric, range: scale, choose }, place) => {
      const slot = make("figure", { class: "chart", "data-place": place, "data-metric": metric.name },
        caption(metric, choose), make("p", { class: "readout" }));
      return [slot, metric, scale];
    });
    find("charts").replaceChildren(...made.map(([slot]) => slot));
    made.forEach(([slot, metric, scale]) => slot.querySelector(".readout").before(chart(metric, scale, chosen, control, slot)));
  }

  function showDifferences(chosen, control) {
    const axis = panel.axes.find((one) => one.name === view.axis);
    if (!chosen) return find("differences").replaceChildren();
    const compared = control && chosen !== control;
    const head = ["metric", chosen.arm, ...(compared ? [control.arm, "difference", "pairs"] : [])];
    const rows = [...new Set(slots().map(({ metric }) => metric))].map((metric) => {
      const [own, difference, pairs] = chosen.final[view.axis][metric.name];
      return [metric.title, own, ...(compared ? [control.final[view.axis][metric.name][0], difference, String(pairs)] : [])];
    });
    const table = make("table", {},
      make("caption", {}, make("span", {}, `At ${axis.at}; brackets: ${panel.brackets}${compared ? ", differences paired by seed" : ""}`)),
      make("thead", {}, make("tr", {}, ...head.map((cell) => make("th", { scope: "col" }, cell)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, make("th", { scope: "row" }, row[0]), ...row.slice(1).map((cell) => make("td", {}, cell))))));
    return find("differences").replaceChildren(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Values in numbers" }, table));
  }

  function show() {
    const chosen = findCell(panel.cells, view.level, view.on);
    const control = panel.cells.find((cell) => cell.arm === panel.control && cell.level === view.level) || null;
    showControls(chosen);
    showWords(chosen, control);
    showLegend(chosen, control);
    showCharts(chosen, control);
    showDifferences(chosen, control);
  }

  buildControls();
  find("panel-body").hidden = false;
  show();
  let width = find("charts").clientWidth;
  window.addEventListener("resize", () => {
    if (find("charts").clientWidth !== width) {
      width = find("charts").clientWidth;
      show();
    }
  });
  window.addEventListener("hashchange", () => {
    const asked = fromAddress();
    if (asked) {
      view = asked;
      show();
    }
  });
  if (location.hash.includes("=")) find("panel").scrollIntoView();
}

if (typeof document !== "undefined") start(JSON.parse(document.getElementById("panel-data").textContent));
if (typeof module !== "undefined") {
  module.exports = { findCell, chosenOption, withChoice, distance, nearest, inWords, steps, startView, viewText, readView,
    expanded, extent, scales, endOf, ticks, short, linePath, bandPath, pieces, nearestPoint, pointText };
}
