"use strict";
// The picture of the graph: drawn once, and coloured by what its nodes do.

// The smallest size at which it is shown, as a share of its own.
const SMALLEST = 0.72;

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
      svg.append(element("svg:path", {
        d: line.path, class: kind, "marker-end": `url(#tip-${kind})`, "data-line": `${line.from} ${line.to}`,
      }));
    }
  }
  for (const edge of graph.edges) {
    // A line is thin, so a wider one that nobody sees takes the clicks.
    svg.append(button("svg:path", `${edge.from} ${edge.to}`, {
      class: "hit", d: edge.path, "data-edge": `${edge.from} ${edge.to}`, "aria-label": `edge from ${edge.from} to ${edge.to}`,
    }));
    const from = graph.nodes.find((n) => n.name === edge.from).spot;
    const to = graph.nodes.find((n) => n.name === edge.to).spot;
    svg.append(element("svg:text", {
      class: "flow", x: (from[0] + boxWide + to[0]) / 2, y: (from[1] + to[1]) / 2 + boxHigh / 2 - 6,
      "data-flow": `${edge.from} ${edge.to}`,
    }));
  }
  for (const part of [...graph.nodes, ...graph.resources]) {
    const [x, y] = part.spot;
    const group = button("svg:g", part.name, { class: "node", "data-name": part.name });
    group.append(element("svg:rect", { class: "box", x, y, width: boxWide, height: boxHigh, rx: 8 }));
    group.append(element("svg:rect", { class: "bar", x: x + 8, y: y + boxHigh - 6, width: 0, height: 3, rx: 1.5 }));
    group.append(element("svg:text", { x: x + boxWide / 2, y: y + 19 }, part.name));
    group.append(element("svg:text", { class: "kind", x: x + boxWide / 2, y: y + 34 }, part.kind));
    group.append(element("svg:text", { class: "badge", x: x + boxWide - 4, y: y - 4 }));
    svg.append(group);
  }
  // A large graph scrolls, for its names must stay readable.
  svg.dataset.least = `${Math.round(SMALLEST * wide)}px`;
  $("picture").replaceChildren(svg);
  fitGraph();
}

// What is wider than its place can be seen as a whole, in small, to find where it is red.
function fitGraph() {
  const svg = $("picture").firstElementChild, whole = $("fit").getAttribute("aria-pressed") === "true";
  svg.style.minWidth = whole ? "0" : svg.dataset.least;
  $("fit").hidden = parseInt(svg.dataset.least, 10) <= $("picture").clientWidth;
}

$("fit").addEventListener("click", () => {
  $("fit").setAttribute("aria-pressed", $("fit").getAttribute("aria-pressed") !== "true");
  fitGraph();
});
onWidth("picture", () => { if (page.facts) fitGraph(); });

// Choose a node or a resource, and bring it into view.
function goTo(name) {
  const spot = document.querySelector(`g.node[data-name="${name}"]`);
  if (!spot) return;
  choose(name);
  spot.scrollIntoView({ block: "nearest", inline: "center" });
}

// What can be chosen by a click, or by Enter and the space bar.
function button(kind, chosen, attributes) {
  const made = element(kind, { ...attributes, tabindex: 0, role: "button" });
  made.addEventListener("click", () => choose(chosen));
  made.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(chosen); }
  });
  return made;
}

// What happened to a node or a resource: how often it was restarted, warnings, and its failure.
function marksOf(name) {
  const found = { restarts: 0, warnings: 0, failure: "" };
  for (const event of page.events) {
    if (event.part !== name) continue;
    if (event.kind === "restarted") found.restarts += 1;
    else if (event.kind === "ended") found.failure = event.text;
    else found.warnings += 1;
  }
  const broken = [...page.broken].filter(([, node]) => node === name).map(([column]) => column);
  found.words = [
    found.failure && "failed", broken.length && `NaN in ${broken.join(", ")}`,
    found.restarts && `${found.restarts} ${found.restarts === 1 ? "restart" : "restarts"}`,
    found.warnings && `${found.warnings} ${found.warnings === 1 ? "warning" : "warnings"}`,
  ].filter(Boolean).join(", ");
  found.bad = Boolean(found.failure || broken.length);
  return found;
}

// Below the name of a node or a resource stands its kind, or what it holds.
function showKind(name, text) {
  const spot = document.querySelector(`g.node[data-name="${name}"] text.kind`);
  if (spot) spot.textContent = text;
}

// The row that belongs to what is shown.
const shownRow = () => (page.moment ? page.moment.row : page.rows[page.rows.length - 1] || {});

// How many policy versions old the experience is on which the last row was trained.
function lagText() {
  const row = shownRow();
  return typeof row.lag_mean === "number" ? `, lag ${amount(row.lag_mean)}` : " items";
}

function heldText(name, added) {
  const resource = page.facts.graph.resources.find((each) => each.name === name);
  const most = Number((((resource || {}).settings || {}).buffer_size || "").replaceAll("_", "")) || Infinity;
  return `${amount(Math.min(added, most))} steps`;
}

function colourGraph(now) {
  const boxWide = page.facts.graph.box[0];
  for (const group of document.querySelectorAll("g.node")) {
    const name = group.dataset.name;
    const node = now.nodes[name];
    const state = node ? node.state : now.bottleneck && now.bottleneck.where.split(", ")[0] === name ? "bottleneck" : "";
    const marks = marksOf(name);
    const classes = ["node", state, page.chosen === name && "chosen", marks.bad && "failed"];
    group.setAttribute("class", classes.filter(Boolean).join(" "));
    group.querySelector("text.badge").textContent = marks.words;
    const busy = node ? node.busy : 0;
    group.querySelector("rect.bar").setAttribute("width", Math.max(0, Math.min(1, busy)) * (boxWide - 16));
    group.setAttribute("aria-label", [node ? `${name}: ${state}, ${percent(node.busy)} busy` : name, marks.words].filter(Boolean).join(", "));
  }
  // What is known of another moment must not stay: early in a run some edges carried nothing yet.
  for (const part of [...page.facts.graph.nodes, ...page.facts.graph.resources]) showKind(part.name, part.kind);
  for (const line of document.querySelectorAll("path.edge")) line.setAttribute("class", "edge");
  for (const label of document.querySelectorAll("[data-flow]")) label.textContent = "";
  for (const edge of now.edges) {
    const label = document.querySelector(`[data-flow="${edge.from} ${edge.to}"]`);
    if (!label) continue;
    label.textContent = `${amount(edge.items)}/s`;
    if ("level" in edge) showKind(edge.to, `${edge.level} of ${edge.capacity}${lagText()}`);
    const pressure = (now.nodes[edge.from] || {}).pressure || "none";
    const line = document.querySelector(`path.edge[data-line="${edge.from} ${edge.to}"]`);
    line.setAttribute("class", `edge pressure-${pressure}`);
    document.querySelector(`path.hit[data-edge="${edge.from} ${edge.to}"]`).setAttribute(
      "aria-label", `edge from ${edge.from} to ${edge.to}, ${label.textContent}, back-pressure ${pressure}`,
    );
  }
  for (const [name, counts] of Object.entries(now.resources)) {
    if (counts.updates) showKind(name, `version ${amount(counts.updates[0])}`);
    else if (counts.added_steps) showKind(name, heldText(name, counts.added_steps[0]));
  }
  markDebugger();
}
