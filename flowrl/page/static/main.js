"use strict";
// It asks for the facts of a run once, and then listens to what is new.

const MOST_ROWS = 4000;
// So often a page looks for a server that ended with its run.
const MOST_TRIES = 60;

// Long runs are thinned and not cut: of the rows every so many are kept, evenly from the first one on,
// and the newest. What the server sends at first is thinned already.
function keepRows(news) {
  if (news.again) Object.assign(page, { kept: [], seen: 0, stride: 1 });
  for (const row of news.rows) {
    if (page.seen % page.stride === 0) page.kept.push(row);
    page.seen += 1;
  }
  if (news.again) {
    page.stride = Math.max(1, Math.round(news.count / Math.max(1, news.rows.length)));
    page.seen = 1;
  }
  while (page.kept.length > MOST_ROWS) {
    page.kept = page.kept.filter((_, i) => i % 2 === 0);
    page.stride *= 2;
  }
  const newest = news.rows[news.rows.length - 1] || page.rows[page.rows.length - 1];
  const has = !newest || page.kept[page.kept.length - 1] === newest;
  page.rows = has ? page.kept.slice() : [...page.kept, newest];
}

function take(news) {
  if (news.error) { page.shown = news.error; showState(); return; }
  if (news.fresh) { page.events = []; page.broken.clear(); }
  keepRows(news);
  noteBroken(news.rows);
  takeEvents(news.events);
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
  // It may be another run than before, where the server was started again.
  Object.assign(page, { facts, now: null, moment: null, item: null, news: null, debugger: null, tries: 0 });
  const names = [...facts.graph.nodes, ...facts.graph.resources].map((part) => part.name);
  if (page.chosen && !page.chosen.split(" ").every((name) => names.includes(name))) page.chosen = null;
  $("chosen").replaceChildren(element("p", {}, "Choose a node to see its settings and its seconds."));
  document.body.classList.remove("past");
  setPast([]);
  labelPast(null);
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
  page.tries = ended ? page.tries + 1 : 0;
  // Another server may take the port one day, and need not know of this browser.
  if (page.tries <= MOST_TRIES) setTimeout(() => begin().catch(lost), ended ? 5000 : 1500);
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
