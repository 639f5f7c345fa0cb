"use strict";
// The buttons by which a run is controlled.

const VERBS = {
  pause: "pause", go_on: "go on", snapshot: "snapshot now", stop: "stop",
  next: "next", row: "until row", continue: "continue",
};

async function ask(verb, node = "") {
  if (verb === "stop" && !confirm("End this run after its next row?")) return;
  const what = node ? `${verb}/${encodeURIComponent(node)}` : verb;
  const answer = await fetch(`/runs/${page.run}/${what}`, { method: "POST" });
  if (!answer.ok) $("said").textContent = `${verb}: ${await answer.text()}`;
}

function drawControls(verbs) {
  $("controls").replaceChildren(...verbs.map((verb) => {
    const button = element("button", { type: "button", "data-verb": verb }, VERBS[verb]);
    button.addEventListener("click", () => ask(verb));
    return button;
  }));
}

function enableControls(state) {
  if (state && page.facts && page.facts.node_verbs) return;
  for (const button of document.querySelectorAll("[data-verb]")) {
    const verb = button.dataset.verb;
    button.disabled = !["running", "paused"].includes(state)
      || (verb === "pause" && state === "paused") || (verb === "go_on" && state === "running");
  }
}
