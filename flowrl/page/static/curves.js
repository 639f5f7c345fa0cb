"use strict";
// The learning curves.

function columnsOf(rows) {
  const names = new Set();
  for (const row of rows.slice(-50)) for (const [k, v] of Object.entries(row)) if (v !== null) names.add(k);
  return [...names].sort();
}

// A line at the steps of the moment that the graph shows, if that is in the past.
function markMoment(plot) {
  if (!page.moment) return;
  const x = Math.round(plot.valToPos(page.moment.env_steps, "x", true));
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
  const select = $("column");
  const names = columnsOf(page.rows);
  if (names.join() !== [...select.options].map((o) => o.value).join()) {
    const before = select.value || "return_mean";
    select.replaceChildren(...names.map((n) => element("option", { value: n }, n)));
    select.value = names.includes(before) ? before : names[0] || "";
  }
  if (!select.value || page.rows.length < 2) return;
  const data = [page.rows.map((r) => r.env_steps), page.rows.map((r) => r[select.value] ?? null)];
  const width = $("curve").clientWidth;
  if (page.plot && page.plot.column === select.value && page.plot.made.width === width) {
    page.plot.made.setData(data);
    return;
  }
  if (page.plot) page.plot.made.destroy();
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--soft"), line = style.getPropertyValue("--line");
  const axis = { stroke: ink, grid: { stroke: line }, ticks: { stroke: line } };
  const made = new uPlot({
    width, height: 260, scales: { x: { time: false } }, hooks: { draw: [markMoment] },
    axes: [{ ...axis, label: "environment steps" }, axis],
    series: [{ label: "steps" }, { label: select.value, stroke: style.getPropertyValue("--busy"), width: 2, spanGaps: true }],
  }, data, $("curve"));
  page.plot = { column: select.value, made };
}
