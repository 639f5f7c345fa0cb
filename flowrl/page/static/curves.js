"use strict";
// The learning curves: columns of the run that is shown, and of those that it is compared with.

const MOST_LINES = 8;
// From so many columns on there is a field to find one.
const MANY_COLUMNS = 12;
// A column whose values are so many times larger or smaller than the first one's has the right axis.
const FAR = 10;
// Not everyone can keep eight colours apart, so that each line has its own dashes, too.
const DASHES = [[], [8, 4], [2, 3], [9, 3, 2, 3], [15, 5], [5, 2], [1, 5], [12, 3, 2, 3, 2, 3]];
const OVER = { env_steps: "environment steps", updates: "updates", seconds: "seconds" };
const KEPT = "flowrl curves";
const choices = readChoices();

function readChoices() {
  const found = { columns: { return_mean: 0 }, smooth: 0, log: false, over: "env_steps" };
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT)) || {};
    const columns = Object.entries(kept.columns || found.columns).filter(([, slot]) => slot in DASHES);
    found.columns = Object.fromEntries(columns);
    found.smooth = Math.min(0.99, Math.max(0, Number(kept.smooth) || 0));
    found.log = Boolean(kept.log);
    if (kept.over in OVER) found.over = kept.over;
  } catch { /* A page from disk may keep nothing. */ }
  return found;
}

function keepChoices() {
  try { localStorage.setItem(KEPT, JSON.stringify(choices)); } catch { /* The same. */ }
}

// The number that decides on a colour stays with a column or a run for as long as it is chosen.
function freeSlot(taken) {
  return DASHES.findIndex((_, slot) => !taken.includes(slot));
}

function columnsOf(rows) {
  const names = rows.length ? [rows[0], rows[rows.length - 1]].flatMap((row) => Object.keys(row)) : [];
  return [...new Set(names)].sort();
}

function chosenColumns(names) {
  const wanted = Object.keys(choices.columns).sort((a, b) => choices.columns[a] - choices.columns[b]);
  const found = wanted.filter((name) => names.includes(name));
  if (found.length || !wanted.length) return found;
  // Of what was chosen for another run this one may have nothing.
  return names.filter((name) => name === "return_mean").concat(names).slice(0, 1);
}

function drawColumns(names, chosen) {
  const list = $("columns");
  if (list.dataset.names !== names.join()) {
    list.dataset.names = names.join();
    list.replaceChildren(...names.map((name) => {
      const item = element("li"), label = element("label");
      label.append(element("input", { type: "checkbox", value: name }), ` ${name}`);
      item.append(label);
      return item;
    }));
    $("columns-filter").hidden = names.length < MANY_COLUMNS;
    findColumn();
  }
  for (const box of list.querySelectorAll("input")) {
    box.checked = chosen.includes(box.value);
    box.disabled = !box.checked && chosen.length >= MOST_LINES;
  }
}

function findColumn() {
  const asked = $("find-column").value.trim().toLowerCase();
  for (const box of $("columns").querySelectorAll("input")) {
    box.closest("li").hidden = !box.value.toLowerCase().includes(asked);
  }
}

function chooseColumn(name, chosen) {
  const kept = chosenColumns(columnsOf(page.rows)).filter((column) => chosen || column !== name);
  choices.columns = Object.fromEntries(kept.map((column) => [column, choices.columns[column] ?? 0]));
  if (chosen) choices.columns[name] = freeSlot(Object.values(choices.columns));
  keepChoices();
  drawCurve();
}

// Exponential, as TensorBoard does it: without the pull of a first value of zero.
function smoothed(values, weight) {
  let last = 0, count = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = weight * last + (1 - weight) * value;
    count += 1;
    return last / (1 - weight ** count);
  });
}

function linesOf(columns) {
  const runs = [{ label: "this run", slot: 0, rows: page.rows }, ...comparedRuns()];
  const lines = [];
  for (const column of columns) {
    for (const run of runs) {
      const rows = run.rows.filter((row) => Number.isFinite(row[choices.over]));
      const slot = runs.length > 1 ? run.slot : choices.columns[column] ?? 0;
      const names = [runs.length > 1 ? run.label : "", runs.length > 1 && columns.length === 1 ? "" : column];
      lines.push({
        column, slot, label: names.filter(Boolean).join(" · "), side: "left",
        dash: runs.length > 1 && columns.length > 1 ? lines.length : slot,
        xs: rows.map((row) => row[choices.over]), values: rows.map((row) => row[column] ?? null),
      });
    }
  }
  return lines;
}

function setSides(lines) {
  if (choices.log) return;
  const sizes = {};
  for (const line of lines) {
    for (const value of line.values) sizes[line.column] = Math.max(sizes[line.column] ?? 0, Math.abs(value));
  }
  const first = lines.map((line) => sizes[line.column]).find((size) => size > 0);
  for (const line of lines) {
    const size = sizes[line.column];
    if (size > FAR * first || (size > 0 && size < first / FAR)) line.side = "right";
  }
}

// A log scale has no place for what is not above zero.
const onScale = (values) => (choices.log ? values.map((v) => (v > 0 ? v : null)) : values);

function dataOf(lines) {
  return uPlot.join(lines.map((line) => {
    const shown = onScale(smoothed(line.values, choices.smooth));
    return choices.smooth ? [line.xs, onScale(line.values), shown] : [line.xs, shown];
  }));
}

// A value between two gaps would not be seen as a line.
function lonelyPoints(plot, index, shown) {
  if (shown) return null;
  const values = plot.data[index], found = [];
  const empty = (i, step) => {
    while (values[i] === undefined && i >= 0 && i < values.length) i += step;
    return values[i] === null || values[i] === undefined;
  };
  values.forEach((v, i) => { if (Number.isFinite(v) && empty(i - 1, -1) && empty(i + 1, 1)) found.push(i); });
  return found;
}

function shortNumber(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1e4) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
  return size > 0 && size < 1e-3 ? value.toExponential(0) : `${Number(value.toPrecision(4))}`;
}

function optionsOf(lines, width) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const values = (_, splits) => splits.map(shortNumber);
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") }, values };
  const named = (side) => [...new Set(lines.filter((line) => line.side === side).map((line) => line.column))].join(", ").slice(0, 40);
  const axes = [{ ...axis, label: OVER[choices.over] }, { ...axis, scale: "left", label: named("left"), size: 56 }];
  if (named("right")) axes.push({ ...axis, scale: "right", side: 1, grid: { show: false }, label: named("right"), size: 56 });
  const series = [{}];
  for (const line of lines) {
    const drawn = { scale: line.side, stroke: colour(`--line-${line.slot}`), spanGaps: false };
    if (choices.smooth) series.push({ ...drawn, width: 1, alpha: 0.3, points: { show: false } });
    series.push({ ...drawn, width: 2, dash: DASHES[line.dash], points: { filter: lonelyPoints, size: 5 } });
  }
  const scale = { distr: choices.log ? 3 : 1 };
  return {
    width, height: 260, axes, series, legend: { show: false },
    scales: { x: { time: false }, left: scale, right: scale },
    hooks: { setCursor: [showValues], draw: [markMoment] },
  };
}

function drawLegend(lines) {
  $("lines").replaceChildren(...lines.map((line) => {
    const item = element("li"), picture = element("svg:svg", { width: 34, height: 10, "aria-hidden": "true" });
    picture.append(element("svg:path", { d: "M0 5H34", class: `line-${line.slot}`, "stroke-dasharray": DASHES[line.dash].join(" ") }));
    item.append(picture, `${line.label}${line.side === "right" ? " (right axis)" : ""} `, element("b"));
    return item;
  }));
}

// The legend has the values under the pointer, or else the last ones.
function showValues(plot) {
  const step = choices.smooth ? 2 : 1, items = [...$("lines").children], pointed = plot.cursor.idx ?? null;
  items.forEach((item, i) => {
    const values = plot.data[step * (i + 1)] || [];
    let at = pointed ?? values.length - 1;
    while (at > 0 && (values[at] === undefined || (pointed === null && values[at] === null))) at -= 1;
    item.querySelector("b").textContent = amount(values[at]);
  });
}

function curveNote(lines, every) {
  if (!every.length) return page.rows.length ? "Choose a column." : "";
  if (every.length > lines.length) return `At most ${MOST_LINES} lines are drawn: ${every.length - lines.length} are not.`;
  if (choices.log && !lines.some((line) => line.values.some((v) => v > 0))) return "No value is above 0, as a log scale needs it.";
  return "";
}

// Where that moment is on the axis that was chosen.
const momentOver = () => page.moment.row[choices.over] ?? page.moment.env_steps;

// A line at the steps of the moment that the graph shows, if that is in the past.
function markMoment(plot) {
  if (!page.moment) return;
  const x = Math.round(plot.valToPos(momentOver(), "x", true));
  const { left, top, width, height } = plot.bbox;
  if (x < left || x > left + width) return;
  plot.ctx.save();
  plot.ctx.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--use");
  plot.ctx.lineWidth = 2 * devicePixelRatio;
  plot.ctx.beginPath();
  plot.ctx.moveTo(x, top);
  plot.ctx.lineTo(x, top + height);
  plot.ctx.stroke();
  plot.ctx.restore();
}

function drawCurve() {
  const names = columnsOf(page.rows);
  const chosen = chosenColumns(names);
  drawColumns(names, chosen);
  const every = linesOf(chosen);
  const lines = every.slice(0, MOST_LINES);
  const note = curveNote(lines, every);
  if ($("curve-note").textContent !== note) $("curve-note").textContent = note;
  const width = $("curve").clientWidth;
  setSides(lines);
  const key = JSON.stringify([
    width, { ...choices, smooth: choices.smooth > 0 }, lines.map((line) => [line.label, line.side, line.slot, line.dash]),
  ]);
  const data = lines.some((line) => line.xs.length > 1) ? dataOf(lines) : null;
  if (page.plot && page.plot.key === key && data) {
    updateCurve(page.plot.made, data);
    return;
  }
  if (page.plot) page.plot.made.destroy();
  page.plot = null;
  drawLegend(lines);
  if (!data) return;
  page.plot = { key, made: new uPlot(optionsOf(lines, width), data, $("curve")) };
  showValues(page.plot.made);
}

// Whoever has zoomed in stays where they are.
function updateCurve(plot, data) {
  const { min, max } = plot.scales.x, [xs] = plot.data;
  const zoomed = min > xs[0] || max < xs[xs.length - 1];
  plot.batch(() => {
    plot.setData(data);
    if (zoomed) plot.setScale("x", { min, max });
  });
  showValues(plot);
}

function drawBy(what, value) {
  choices[what] = value;
  keepChoices();
  $("smooth-value").textContent = `${choices.smooth}`;
  drawCurve();
}

$("over").replaceChildren(...Object.entries(OVER).map(([name, text]) => element("option", { value: name }, text)));
$("over").value = choices.over;
$("log").checked = choices.log;
$("smooth").value = choices.smooth;
$("smooth-value").textContent = `${choices.smooth}`;
$("over").addEventListener("change", () => drawBy("over", $("over").value));
$("log").addEventListener("change", () => drawBy("log", $("log").checked));
$("smooth").addEventListener("input", () => drawBy("smooth", Number($("smooth").value)));
$("columns").addEventListener("change", (event) => chooseColumn(event.target.value, event.target.checked));
$("find-column").addEventListener("input", findColumn);
onWidth("curve", () => { if (page.plot) drawCurve(); });
