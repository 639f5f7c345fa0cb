"use strict";
// It asks for the facts of a run once, and then listens to what is new.

function take(news) {
  if (news.again) page.rows = [];
  if (news.fresh) { page.events = []; page.broken.clear(); }
  page.rows.push(...news.rows);
  noteBroken(news.rows);
  takeEvents(news.events);
  // Long runs are thinned and not cut.
  if (page.rows.length > 4000) page.rows = page.rows.filter((_, i, all) => i % 2 === (all.length - 1) % 2);
  page.news = news;
  noteState(news);
  showDebugger(news);
  // News must not repaint the past.
  if (!page.moment) paint();
  askItem();
  drawCurve();
  followPast(news.past);
}

// It shows what the run does now, or what it did at a moment of its past.
function paint() {
  page.now = (page.moment || page.news).now;
  showNumbers(page.now, page.moment ? page.moment.row : page.rows[page.rows.length - 1] || {});
  colourGraph(page.now);
  showWorkers(page.now);
  showSliders(page.now);
  if (page.chosen) showChosen();
}

function show(facts) {
  page.facts = facts;
  document.title = `${facts.graph.name} · flowrl`;
  $("name").textContent = facts.graph.name;
  if (facts.path) $("name").title = facts.path;
  drawGraph(facts.graph);
  drawControls(facts.verbs);
  drawDebugger(facts);
}

async function asked(path) {
  const answer = await fetch(path);
  // A server that was started again at this port with another key knows this browser no more.
  if (answer.status === 401) throw new Error("open the link that flowrl printed");
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function begin() {
  let runs = [];
  // Resources are opened before a run begins.
  for (;;) {
    runs = await asked("/runs");
    if (runs.length) break;
    $("state").textContent = "starting";
    await new Promise((done) => setTimeout(done, 500));
  }
  const [wanted, ...others] = decodeURIComponent(location.hash.slice(1)).split(",");
  page.run = runs.some((run) => run.id === wanted) ? wanted : runs[0].id;
  beginRuns(runs, others);
  show(await asked(`/runs/${page.run}`));
  const stream = new EventSource(`/runs/${page.run}/stream`);
  stream.addEventListener("message", (event) => take(JSON.parse(event.data)));
  stream.addEventListener("error", () => { stream.close(); beginAgain("connection lost"); });
}

// The server may have been started again, with another run: everything is asked for anew.
function beginAgain(why) {
  // A run that has ended takes its server with it.
  const ended = page.news && ENDS.includes(page.news.state);
  page.state = "";
  page.shown = ended ? `${stateText(page.news.state)} (its server has ended)` : why;
  showState();
  enableControls("");
  setTimeout(() => begin().catch(lost), ended ? 5000 : 1500);
}

function lost(error) {
  beginAgain(error instanceof TypeError ? "connection lost" : error.message);
}

// A page that was exported holds all of its run.
if ($("saved")) {
  const saved = JSON.parse($("saved").textContent);
  show(saved.facts);
  take(saved.news);
  setPast(saved.past);
} else {
  begin().catch(lost);
}
