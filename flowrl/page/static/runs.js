"use strict";
// All runs: a table of them, those that are compared with the one that is shown, and how graphs differ.

const RUN_HEADS = { name: "run", graph: "graph", state: "state", goal: "goal", env_steps: "steps", return_mean: "return", started: "started" };
const RUN_NUMBERS = ["env_steps", "return_mean"];
const RUNS_REFRESH = 5000;
const runs = { every: [], sort: "started", down: true, difference: null };
// By id: the colour, the state and the rows of each run that is compared.
page.compared = new Map();

const goesOn = (run) => ["running", "paused"].includes(run.state);
const runOf = (id) => runs.every.find((run) => run.id === id);

// The last part of a path says which run it is, unless two have the same.
function shortName(run) {
  const last = (name) => name.split("/").filter(Boolean).pop();
  const alike = runs.every.filter((other) => last(other.name) === last(run.name));
  return alike.length > 1 ? run.name : last(run.name);
}

// After the run that is shown come those that it is compared with.
const hashOf = (id) => [id, ...[...page.compared.keys()].filter((other) => other !== id)].join(",");

function comparedRuns() {
  return [...page.compared].map(([id, run]) => {
    const found = runOf(id);
    return { ...run, label: found ? shortName(found) : id };
  });
}

function runCell(run, name) {
  if (RUN_NUMBERS.includes(name)) return amount(run[name]);
  if (name === "started") return run.started === null ? "–" : new Date(1000 * run.started).toLocaleString();
  if (name === "state") return stateText(run.state);
  return run[name] || "–";
}

function runRow(run) {
  const row = element("tr", { "data-run": run.id });
  const show = element("input", { type: "radio", name: "shown", value: run.id, "aria-label": `show ${run.name}` });
  const compare = element("input", { type: "checkbox", value: run.id, "aria-label": `compare ${run.name}` });
  show.addEventListener("change", () => {
    location.hash = hashOf(run.id);
    location.reload();
  });
  compare.addEventListener("change", () => setCompared(run.id, compare.checked));
  for (const input of [show, compare]) row.append(element("td"));
  row.cells[0].append(show);
  row.cells[1].append(compare);
  for (const name of Object.keys(RUN_HEADS)) row.append(element("td", { class: RUN_NUMBERS.includes(name) ? "number" : "" }));
  return row;
}

function fillRunRow(row, run) {
  const [show, compare] = row.querySelectorAll("input");
  show.checked = run.id === page.run;
  if (show.checked) row.setAttribute("aria-current", "true");
  else row.removeAttribute("aria-current");
  compare.checked = page.compared.has(run.id);
  compare.disabled = show.checked || (!compare.checked && page.compared.size >= MOST_LINES - 1);
  Object.keys(RUN_HEADS).forEach((name, i) => {
    const cell = row.cells[i + 2], text = runCell(run, name);
    if (cell.textContent !== text) cell.textContent = text;
  });
  const asked = $("find-run").value.trim().toLowerCase();
  row.hidden = !["name", "graph", "state", "goal"].some((name) => `${run[name] ?? ""}`.toLowerCase().includes(asked));
}

function orderedRuns() {
  const { sort, down } = runs, sign = down ? -1 : 1;
  const missing = (run) => run[sort] === null || run[sort] === "";
  return runs.every.slice().sort((a, b) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    return sign * (typeof a[sort] === "number" ? a[sort] - b[sort] : `${a[sort]}`.localeCompare(`${b[sort]}`));
  });
}

function drawRuns() {
  const body = $("runs").tBodies[0];
  const rows = new Map([...body.rows].map((row) => [row.dataset.run, row]));
  const wanted = orderedRuns().map((run) => {
    const row = rows.get(run.id) || runRow(run);
    fillRunRow(row, run);
    return row;
  });
  // A row that is moved loses the focus, so they are only where their order is another one.
  if (wanted.length !== body.rows.length || wanted.some((row, i) => row !== body.rows[i])) body.replaceChildren(...wanted);
  for (const head of $("runs").tHead.rows[0].cells) {
    if (!head.dataset.sort) continue;
    head.setAttribute("aria-sort", head.dataset.sort !== runs.sort ? "none" : runs.down ? "descending" : "ascending");
  }
  $("all-runs").hidden = runs.every.length < 2;
  $("ask-differences").disabled = page.compared.size !== 1;
}

function drawHeads() {
  const made = ["show", "compare"].map((text) => element("th", { scope: "col" }, text));
  for (const [name, text] of Object.entries(RUN_HEADS)) {
    const head = element("th", { scope: "col", "data-sort": name });
    const button = element("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      runs.down = runs.sort === name ? !runs.down : RUN_NUMBERS.includes(name) || name === "started";
      runs.sort = name;
      drawRuns();
    });
    head.append(button);
    made.push(head);
  }
  $("runs").tHead.rows[0].replaceChildren(...made);
}

async function setCompared(id, on) {
  if (on) {
    const slot = freeSlot([0, ...[...page.compared.values()].map((run) => run.slot)]);
    page.compared.set(id, { slot, rows: [], state: null });
  } else {
    page.compared.delete(id);
  }
  history.replaceState(null, "", `#${hashOf(page.run)}`);
  showDifferences(null);
  drawRuns();
  if (on) await loadRows(id);
  drawCurve();
}

async function loadRows(id) {
  const state = runOf(id) && runOf(id).state;
  try {
    const answer = await fetch(`/runs/${id}/rows`);
    const run = page.compared.get(id);
    // It may have been left out meanwhile.
    if (answer.ok && run) Object.assign(run, { rows: await answer.json(), state });
  } catch { /* The next look may succeed. */ }
}

async function refreshRuns() {
  if (document.hidden || !page.run) return;
  try {
    runs.every = await (await fetch("/runs")).json();
  } catch { return; }
  const gone = [...page.compared.keys()].filter((id) => !runOf(id));
  gone.forEach((id) => page.compared.delete(id));
  const changed = [...page.compared].filter(([id, run]) => goesOn(runOf(id)) || run.state !== runOf(id).state);
  await Promise.all(changed.map(([id]) => loadRows(id)));
  drawRuns();
  if (gone.length || changed.length) drawCurve();
}

function changeOf(node) {
  return node.change === "changed" ? `${node.name}: ${node.one} -> ${node.other}` : `${node.name}: ${node.change === "added" ? node.other : node.one}`;
}

function differenceTexts(found) {
  return [
    ...found.nodes.map((node) => [node.name, `${node.change}: ${changeOf(node)}`]),
    ...found.settings.map((x) => [x.address.split(".")[0], `${x.address}: ${x.one} -> ${x.other}`]),
    ...found.edges.map((edge) => [edge.to, `${edge.change}: the edge from ${edge.from} to ${edge.to}`]),
  ];
}

function showDifferences(found) {
  runs.difference = found;
  markDifferences();
  if (!found) {
    $("differences").replaceChildren();
    return;
  }
  const [other] = comparedRuns();
  if (found.error) {
    $("differences").replaceChildren(element("p", {}, `The graphs can't be compared: ${found.error}`));
    return;
  }
  const texts = differenceTexts(found), list = element("ul");
  for (const [, text] of texts) list.append(element("li", {}, text));
  const head = texts.length ? `From the graph of this run to that of ${other.label}:` : `The graph of ${other.label} is the same.`;
  $("differences").replaceChildren(element("p", {}, head), list);
}

function markDifferences() {
  const texts = runs.difference && !runs.difference.error ? differenceTexts(runs.difference) : [];
  for (const group of document.querySelectorAll("g.node")) {
    const own = texts.filter(([name]) => name === group.dataset.name).map(([, text]) => text);
    group.querySelectorAll("text.differs").forEach((mark) => mark.remove());
    group.removeAttribute("aria-description");
    if (!own.length) continue;
    const box = group.querySelector("rect.box"), at = (name) => Number(box.getAttribute(name));
    group.append(element("svg:text", { class: "differs", x: at("x") + at("width") - 11, y: at("y") + 17, "aria-hidden": "true" }, "≠"));
    group.setAttribute("aria-description", `differs. ${own.join(". ")}`);
  }
}

async function askDifferences() {
  const [other] = page.compared.keys();
  try {
    const answer = await fetch(`/runs/${page.run}/diff/${other}`);
    showDifferences(answer.ok ? await answer.json() : { error: await answer.text() });
  } catch (error) {
    showDifferences({ error: `${error}` });
  }
}

function beginRuns(every, others) {
  runs.every = every;
  drawRuns();
  for (const id of others.slice(0, MOST_LINES - 1)) {
    if (runOf(id) && id !== page.run && !page.compared.has(id)) setCompared(id, true);
  }
}

drawHeads();
$("find-run").addEventListener("input", drawRuns);
$("ask-differences").addEventListener("click", askDifferences);
// A page that was exported has no other runs.
if (!$("saved")) setInterval(refreshRuns, RUNS_REFRESH);
