"use strict";
// What is shown of the node or resource that was chosen.

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
