"use strict";
// Where a debugged run stands, what it finds there, and where it is to stop. The verbs of the
// header (next, until row, continue) are drawn with those of other runs.

function drawDebugger(facts) {
  $("debugger").hidden = !facts.node_verbs;
  document.body.classList.toggle("debugged", Boolean(facts.node_verbs));
  if (!facts.node_verbs) return;
  const [wide] = facts.graph.box;
  for (const { name, spot: [x, y] } of facts.graph.nodes) {
    groupOf(name).append(
      element("svg:path", { class: "stand", d: `M${x + 7} ${y + 6}l10 6l-10 6z` }),
      element("svg:circle", { class: "stop", cx: x + wide - 12, cy: y + 12, r: 5 }),
    );
  }
}

const groupOf = (name) => document.querySelector(`g.node[data-name="${name}"]`);
const breaksAt = (name) => page.debugger.breaks.filter((stop) => stop.node === name);

$("until").addEventListener("click", () => ask("until", page.chosen));
$("toggle").addEventListener("click", () => ask(breaksAt(page.chosen).length ? "clear" : "break", page.chosen));

function markDebugger() {
  if (!page.debugger) return;
  const { stands, failed } = page.debugger;
  for (const { name } of page.facts.graph.nodes) {
    const group = groupOf(name);
    const here = Boolean(stands) && stands.node === name, stops = breaksAt(name);
    group.classList.toggle("here", here);
    group.classList.toggle("stops", stops.length > 0);
    const words = [...(here ? ["the run stands here"] : []), ...stops.map((stop) => `break ${stop.text}`)];
    group.setAttribute("aria-label", [group.getAttribute("aria-label"), ...words].join(", "));
  }
  const node = page.facts.graph.nodes.some((n) => n.name === page.chosen) ? page.chosen : "";
  $("picked").textContent = node ? `${node}:` : "Choose a node to stop there.";
  $("until").disabled = !node || failed;
  $("toggle").disabled = !node;
  $("toggle").textContent = node && breaksAt(node).length ? "no stop here" : "stop here";
  for (const button of document.querySelectorAll("#controls [data-verb]")) button.disabled = failed;
}

function showDebugger(news) {
  page.debugger = news.debugger || null;
  if (!page.debugger) return;
  const { stands, breaks, edition } = page.debugger;
  $("at").textContent = stands ? stands.at : "The run goes on.";
  const item = stands ? stands.item || "There is no item here." : "";
  // A text that is selected or scrolled stays so.
  if ($("item").textContent !== item) $("item").textContent = item;
  const texts = breaks.map((stop) => `break ${stop.number}: ${stop.text}`);
  $("breaks").replaceChildren(...(texts.length ? texts : ["no breaks"]).map((text) => element("li", {}, text)));
  if (edition !== page.facts.edition) {
    // A setting was changed at the prompt. Until the answer comes, it is not asked for again.
    page.facts.edition = edition;
    fetch(`/runs/${page.run}`).then((answer) => answer.json()).then((facts) => {
      page.facts = facts;
      showChosen();
    });
  }
}
