"use strict";
// The picture of the graph: drawn once, and coloured by what its nodes do.

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
  // Early in a run some edges carried nothing yet.
  for (const label of document.querySelectorAll("[data-edge]")) label.textContent = "";
  for (const edge of now.edges) {
    const label = document.querySelector(`[data-edge="${edge.from} ${edge.to}"]`);
    if (!label) continue;
    label.textContent = `${amount(edge.items)}/s`;
    if ("level" in edge) {
      document.querySelector(`g.node[data-name="${edge.to}"] text.kind`).textContent = `${edge.level} of ${edge.capacity} items`;
    }
  }
}
