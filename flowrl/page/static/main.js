"use strict";
// It asks for the facts of a run once, and then listens to what is new.

function take(news) {
  if (news.again) page.rows = [];
  if (news.fresh) page.events = [];
  page.rows.push(...news.rows);
  // Long runs are thinned and not cut.
  if (page.rows.length > 4000) page.rows = page.rows.filter((_, i, all) => i % 2 === (all.length - 1) % 2);
  page.news = news;
  const goes = ["starting", "running", "paused", "killed"].includes(news.state);
  page.state = goes ? news.state : `ended: ${news.state}`;
  showState();
  enableControls(news.state);
  showEvents(news.events);
  // News must not repaint the past.
  if (!page.moment) paint();
  drawCurve();
  followPast(news.past);
}

// It shows what the run does now, or what it did at a moment of its past.
function paint() {
  page.now = (page.moment || page.news).now;
  showNumbers(page.now, page.moment ? page.moment.row : page.rows[page.rows.length - 1] || {});
  colourGraph(page.now);
  showLists(page.now);
  if (page.chosen) showChosen();
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
  stream.addEventListener("error", () => { page.state = "connection lost"; showState(); });
}

$("column").addEventListener("change", drawCurve);
addEventListener("resize", () => { if (page.plot) drawCurve(); });
// A page that was exported holds all of its run.
if ($("saved")) {
  const saved = JSON.parse($("saved").textContent);
  show(saved.facts);
  take(saved.news);
  setPast(saved.past);
} else {
  begin().catch((error) => { $("state").textContent = `${error}`; });
}
