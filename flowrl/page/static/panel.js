"use strict";
// What is shown of the node, the resource or the edge that was chosen.

function choose(name) {
  page.chosen = name;
  page.item = null;
  showChosen();
  askItem();
  if (page.now) colourGraph(page.now);
  const spot = document.querySelector(`g.node[data-name="${name}"]`);
  $("said").textContent = `chosen: ${spot ? spot.getAttribute("aria-label") : name.replace(" ", " to ")}`;
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

// The node that yields what is looked at: the one that was chosen, or the beginning of an edge.
function yielding() {
  const name = (page.chosen || "").split(" ")[0];
  return page.facts.graph.nodes.find((node) => node.name === name);
}

// The newest item is asked for as long as a node is chosen, and only then is it kept.
async function askItem() {
  const node = yielding();
  const goes = page.debugger || ["running", "paused"].includes(page.state);
  if (!node || !page.run || !goes) return;
  try {
    const answer = await fetch(`/runs/${page.run}/items/${encodeURIComponent(node.name)}`);
    const item = answer.status === 200 ? await answer.json() : null;
    if (item && yielding() === node) { page.item = item; showChosen(); }
  } catch { /* The stream says that the connection is lost. */ }
}

function showItem(node) {
  const item = page.item || node.yields;
  if (!item) return [];
  const found = [element("h2", {}, page.item ? "newest item" : "yields"), element("p", {}, item.brief)];
  if (page.item && item.fields.length) found.push(element("p", { class: "note" }, "of each field: least · mean · greatest"));
  const made = element("table", { class: "fields" });
  for (const [name, shape, type, least, mean, most, missing] of item.fields) {
    const row = element("tr"), first = element("td", {}, name);
    first.append(element("small", {}, `${shape} ${type}`));
    const numbers = element("td", { class: "number" });
    if (least !== undefined) {
      numbers.append(element("span", { title: "least, mean, greatest" }, `${least} · ${mean} · ${most}`));
      if (missing !== "-" && missing !== "0") numbers.append(element("strong", { class: "missing" }, `${missing} NaN`));
    }
    row.append(first, numbers);
    made.append(row);
  }
  if (item.fields.length) found.push(made);
  const numbers = Object.entries(item.numbers);
  if (numbers.length) {
    found.push(table(numbers.map(([name, x]) => [name, x === null ? "NaN" : amount(x)])));
  }
  if (item.text) found.push(element("pre", {}, item.text));
  return found;
}

// Errors, restarts and warnings of a node or a resource, the newest first.
function showMarks(name) {
  const events = page.events.filter((event) => event.part === name).slice(-5).reverse();
  if (!events.length) return [];
  const list = element("ol", { class: "marks" });
  list.append(...events.map(eventItem));
  return [element("h2", {}, "what happened"), list];
}

function showPart(part) {
  const found = [element("h2", {}, `${part.name} · ${part.kind}`)];
  const node = page.now && page.now.nodes[part.name];
  const counts = Object.entries((page.now && page.now.resources[part.name]) || {});
  if (node) {
    found.push(table([
      ["busy", percent(node.busy)], ["starved", percent(node.starved)],
      ["blocked", `${percent(node.blocked)}, back-pressure ${node.pressure}`],
      ...Object.entries(node.kinds).map(([kind, x]) => [`· ${kind}`, percent(x)]),
    ]));
  }
  found.push(...showMarks(part.name));
  const totals = counts.filter(([name, [total]]) => total > 0 && !MOMENTARY.includes(name)).map(
    ([name, [total, rate]]) => {
      const [text, unit] = COUNTERS[name] || [name.replaceAll("_", " "), 1];
      return [text, `${amount(total / unit)}, ${amount(rate / unit)}/s`];
    },
  );
  if (totals.length) found.push(element("h2", {}, "in all, and now"), table(totals));
  if (part.spot && part.reads) found.push(...showItem(part));
  found.push(element("p", {}, part.doc.split("\n\n")[0].replaceAll("`", "")));
  if (part.text) found.push(element("p", {}, part.text));
  found.push(element("h2", {}, "settings"), table(Object.entries(part.settings)));
  return found;
}

// Counters whose names say less than a reader wants.
const COUNTERS = {
  updates: ["updates (policy versions)", 1], publishes: ["policy versions sent", 1], draws: ["batches sampled", 1],
  weight_bytes: ["weights sent, MB", 1e6],
};
// What is counted at each request, and is no sum.
const MOMENTARY = ["outstanding", "unawaited"];

function showEdge(from, to) {
  const found = [element("h2", {}, `${from} → ${to}`)];
  const edge = page.now && page.now.edges.find((x) => x.from === from && x.to === to);
  const source = page.now && page.now.nodes[from];
  const last = shownRow();
  if (edge) {
    const facts = [["items/s", amount(edge.items)], ["steps/s", amount(edge.steps)]];
    if ("level" in edge) facts.push(["waiting", `${edge.level} of ${edge.capacity} items`]);
    else facts.push(["waiting", "nothing: a node takes each item at once"]);
    if (source) facts.push(["back-pressure", `${source.pressure}: ${from} is blocked ${percent(source.blocked)}`]);
    if ("level" in edge && "dropped_steps" in last) facts.push(["steps dropped", amount(last.dropped_steps)]);
    if ("level" in edge) facts.push(["policy lag, mean", amount(last.lag_mean)], ["policy lag, most", amount(last.lag_max)]);
    found.push(table(facts));
  }
  found.push(...showItem(yielding()));
  return found;
}

function showChosen() {
  const [from, to] = (page.chosen || "").split(" ");
  const { graph } = page.facts;
  const part = [...graph.nodes, ...graph.resources].find((x) => x.name === page.chosen);
  if (part) $("chosen").replaceChildren(...showPart(part));
  else if (to) $("chosen").replaceChildren(...showEdge(from, to));
}
