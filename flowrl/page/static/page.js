// The page of one run: it asks for the facts once, and then listens to what is new.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);
const page = { rows: [], chosen: null, now: null, facts: null, plot: null, events: [] };

function element(name, attributes = {}, text = "") {
  const made = name.startsWith("svg:")
    ? document.createElementNS(SVG, name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}

function amount(x) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  if (size >= 10000 || Number.isInteger(x)) return Math.round(x).toLocaleString("en");
  return size >= 100 ? x.toFixed(0) : x.toPrecision(3);
}

const percent = (x) => `${Math.round(100 * x)} %`;

// -- the graph

function drawGraph(graph) {
  const [wide, high] = graph.size;
  const [boxWide, boxHigh] = graph.box;
  const svg = element("svg:svg", {
    viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "group", "aria-label": graph.name,
  });
  const defs = element("svg:defs");
  for (const kind of ["edge", "use"]) {
    const marker = element("svg:marker", {
      id: `tip-${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto",
    });
    marker.append(element("svg:path", { d: "M0 0L8 4L0 8z", class: `tip ${kind}` }));
    defs.append(marker);
  }
  svg.append(defs);
  for (const kind of ["edge", "use"]) {
    for (const line of graph[`${kind}s`]) {
      svg.append(element("svg:path", { d: line.path, class: kind, "marker-end": `url(#tip-${kind})` }));
    }
  }
  for (const edge of graph.edges) {
    const from = graph.nodes.find((n) => n.name === edge.from).spot;
    const to = graph.nodes.find((n) => n.name === edge.to).spot;
    svg.append(element("svg:text", {
      class: "flow", x: (from[0] + boxWide + to[0]) / 2, y: (from[1] + to[1]) / 2 + boxHigh / 2 - 6,
      "data-edge": `${edge.from} ${edge.to}`,
    }));
  }
  for (const part of [...graph.nodes, ...graph.resources]) {
    const [x, y] = part.spot;
    const group = element("svg:g", { class: "node", tabindex: 0, role: "button", "data-name": part.name });
    group.append(element("svg:rect", { class: "box", x, y, width: boxWide, height: boxHigh, rx: 8 }));
    group.append(element("svg:rect", { class: "bar", x: x + 8, y: y + boxHigh - 6, width: 0, height: 3, rx: 1.5 }));
    group.append(element("svg:text", { x: x + boxWide / 2, y: y + 19 }, part.name));
    group.append(element("svg:text", { class: "kind", x: x + boxWide / 2, y: y + 34 }, part.kind));
    group.addEventListener("click", () => choose(part.name));
    group.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(part.name); }
    });
    svg.append(group);
  }
  $("picture").replaceChildren(svg);
}

function colourGraph(now) {
  const boxWide = page.facts.graph.box[0];
  for (const group of document.querySelectorAll("g.node")) {
    const name = group.dataset.name;
    const node = now.nodes[name];
    const state = node ? node.state : now.bottleneck && now.bottleneck.where.split(", ")[0] === name ? "bottleneck" : "";
    group.setAttribute("class", ["node", state, page.chosen === name ? "chosen" : ""].join(" ").trim());
    const busy = node ? node.busy : 0;
    group.querySelector("rect.bar").setAttribute("width", Math.max(0, Math.min(1, busy)) * (boxWide - 16));
    group.setAttribute("aria-label", node ? `${name}: ${state}, ${percent(node.busy)} busy` : name);
  }
  for (const edge of now.edges) {
    const label = document.querySelector(`[data-edge="${edge.from} ${edge.to}"]`);
    if (!label) continue;
    label.textContent = `${amount(edge.items)}/s`;
    if ("level" in edge) {
      document.querySelector(`g.node[data-name="${edge.to}"] text.kind`).textContent = `${edge.level} of ${edge.capacity} items`;
    }
  }
}

// -- what was chosen

function choose(name) {
  page.chosen = name;
  showChosen();
  if (page.now) colourGraph(page.now);
}

function table(pairs) {
  const made = element("table");
  for (const [name, value] of pairs) {
    const row = element("tr");
    row.append(element("td", {}, name), element("td", { class: "number" }, value));
    made.append(row);
  }
  return made;
}

function showChosen() {
  const { graph } = page.facts;
  const part = [...graph.nodes, ...graph.resources].find((x) => x.name === page.chosen);
  if (!part) return;
  const found = [element("h2", {}, `${part.name} · ${part.kind}`)];
  const node = page.now && page.now.nodes[part.name];
  if (node) {
    found.push(table([
      ["busy", percent(node.busy)], ["starved", percent(node.starved)],
      ["blocked", `${percent(node.blocked)}, back-pressure ${node.pressure}`],
      ...Object.entries(node.kinds).map(([kind, x]) => [`· ${kind}`, percent(x)]),
    ]));
  }
  found.push(element("p", {}, part.doc.split("\n\n")[0]));
  if (part.text) found.push(element("p", {}, part.text));
  found.push(element("h2", {}, "settings"), table(Object.entries(part.settings)));
  $("chosen").replaceChildren(...found);
}

// -- curves

function columnsOf(rows) {
  const names = new Set();
  for (const row of rows.slice(-50)) for (const [k, v] of Object.entries(row)) if (v !== null) names.add(k);
  return [...names].sort();
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
    width, height: 260, scales: { x: { time: false } },
    axes: [{ ...axis, label: "environment steps" }, axis],
    series: [{ label: "steps" }, { label: select.value, stroke: style.getPropertyValue("--busy"), width: 2, spanGaps: true }],
  }, data, $("curve"));
  page.plot = { column: select.value, made };
}

// -- controls

const VERBS = { pause: "pause", go_on: "go on", snapshot: "snapshot now", stop: "stop" };

async function ask(verb) {
  if (verb === "stop" && !confirm("End this run after its next row?")) return;
  await fetch(`/runs/${page.run}/${verb}`, { method: "POST" });
}

function drawControls(verbs) {
  $("controls").replaceChildren(...verbs.map((verb) => {
    const button = element("button", { type: "button", "data-verb": verb }, VERBS[verb]);
    button.addEventListener("click", () => ask(verb));
    return button;
  }));
}

function enableControls(state) {
  for (const button of document.querySelectorAll("[data-verb]")) {
    const verb = button.dataset.verb;
    button.disabled = !["running", "paused"].includes(state)
      || (verb === "pause" && state === "paused") || (verb === "go_on" && state === "running");
  }
}

// -- news

function showNumbers(news) {
  const last = page.rows[page.rows.length - 1] || {};
  const goes = ["starting", "running", "paused", "killed"].includes(news.state);
  $("state").textContent = goes ? news.state : `ended: ${news.state}`;
  enableControls(news.state);
  $("steps").textContent = amount(last.env_steps);
  $("updates").textContent = amount(last.updates);
  $("return").textContent = amount(last.return_mean);
  $("speed").textContent = amount(news.now.steps_per_second);
  const b = news.now.bottleneck;
  $("why").textContent = b
    ? `Bottleneck: ${b.where}, ${percent(b.share)} of the time. ${b.why} ${b.advice}`
    : "Nothing was measured yet.";
}

function showLists(news) {
  $("whatif").replaceChildren(...news.now.what_if.map((w) => {
    const speed = w.steps_per_second === null ? "" : `: ${amount(w.steps_per_second)} steps/s`;
    const item = element("li", {}, `${w.change}${speed}`);
    item.append(element("small", {}, w.because));
    return item;
  }));
  const workers = Object.values(news.now.workers).flat();
  $("workers").replaceChildren(...(workers.length ? workers.map((w) => {
    const item = element("li");
    item.append(element("span", {}, w.name), element("meter", { min: 0, max: 1, value: w.busy, "aria-label": `${w.name} busy` }), element("span", {}, percent(w.busy)));
    return item;
  }) : [element("li", {}, "They are in the process of the run.")]));
  page.events.push(...news.events);
  page.events.splice(0, Math.max(0, page.events.length - 500));
  if (news.events.length) {
    $("events").replaceChildren(...page.events.slice().reverse().map((e) => {
      const item = element("li", { class: e.kind });
      item.append(element("time", {}, new Date(1000 * e.time).toLocaleTimeString()), ` ${e.text}`);
      return item;
    }));
  }
}

function take(news) {
  if (news.again) page.rows = [];
  if (news.fresh) page.events = [];
  page.rows.push(...news.rows);
  // Long runs are thinned and not cut.
  if (page.rows.length > 4000) page.rows = page.rows.filter((_, i, all) => i % 2 === (all.length - 1) % 2);
  page.now = news.now;
  showNumbers(news);
  colourGraph(news.now);
  showLists(news);
  if (page.chosen) showChosen();
  drawCurve();
}

function drawRuns(runs) {
  const list = $("runs");
  list.hidden = runs.length < 2;
  list.replaceChildren(...runs.map((run) => element("option", { value: run.id }, `${run.name} · ${run.state}`)));
  list.value = page.run;
}

$("runs").addEventListener("change", () => { location.hash = $("runs").value; location.reload(); });

function show(facts) {
  page.facts = facts;
  document.title = `${facts.graph.name} · flowrl`;
  $("name").textContent = facts.graph.name;
  if (facts.path) $("name").title = facts.path;
  drawGraph(facts.graph);
  drawControls(facts.verbs);
}

async function begin() {
  let runs = [];
  // Resources are opened before a run begins.
  for (;;) {
    runs = await (await fetch("/runs")).json();
    if (runs.length) break;
    $("state").textContent = "starting";
    await new Promise((done) => setTimeout(done, 500));
  }
  const asked = decodeURIComponent(location.hash.slice(1));
  page.run = runs.some((run) => run.id === asked) ? asked : runs[0].id;
  drawRuns(runs);
  show(await (await fetch(`/runs/${page.run}`)).json());
  const stream = new EventSource(`/runs/${page.run}/stream`);
  stream.addEventListener("message", (event) => take(JSON.parse(event.data)));
  stream.addEventListener("error", () => { $("state").textContent = "connection lost"; });
}

$("column").addEventListener("change", drawCurve);
addEventListener("resize", () => { if (page.plot) drawCurve(); });
// A page that was exported holds all of its run.
if ($("saved")) {
  const saved = JSON.parse($("saved").textContent);
  show(saved.facts);
  take(saved.news);
} else {
  begin().catch((error) => { $("state").textContent = `${error}`; });
}
