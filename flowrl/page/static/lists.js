"use strict";
// Numbers, predictions, runners and events.

// The reasons for which a run ends.
const ENDS = ["until", "steps", "closed", "interrupted", "failed"];
const stateText = (state) => (ENDS.includes(state) ? `ended: ${state}` : state);

function showState() {
  $("state").textContent = page.moment ? `shows the past: ${clock(page.moment.seconds)}` : page.shown;
}

function noteState(news) {
  page.state = news.state;
  page.shown = stateText(news.state);
  showState();
  enableControls(news.state);
}

function showNumbers(now, row) {
  $("steps").textContent = amount(row.env_steps);
  $("updates").textContent = amount(row.updates);
  $("return").textContent = amount(row.return_mean);
  $("speed").textContent = amount(now.steps_per_second);
  showWhy(now.bottleneck);
}

function showWhy(b) {
  if (!b) {
    $("why").textContent = page.state === "paused" && !page.moment ? "The run is paused." : "Nothing was measured yet.";
    return;
  }
  const text = `, ${percent(b.share)} of the time. ${b.why} ${b.advice}`;
  const name = b.where.split(", ")[0];
  const known = document.querySelector(`g.node[data-name="${name}"]`);
  let link = $("why").querySelector("button");
  // The button is made anew only for another node, so that it keeps the focus.
  if (!known) $("why").textContent = `Bottleneck: ${b.where}${text}`;
  else if (link && link.textContent === b.where) link.nextSibling.textContent = text;
  else {
    link = element("button", { type: "button" }, b.where);
    link.addEventListener("click", () => goTo(name));
    $("why").replaceChildren("Bottleneck: ", link, text);
  }
}

function eventItem(event) {
  const item = element("li", { class: event.kind });
  const when = new Date(1000 * event.time), today = new Date().toDateString() === when.toDateString();
  item.append(element("time", {}, today ? when.toLocaleTimeString() : when.toLocaleString()), ` ${event.text}`);
  return item;
}

function takeEvents(events) {
  page.events.push(...events);
  page.events.splice(0, Math.max(0, page.events.length - 500));
  if (events.length) $("events").replaceChildren(...page.events.slice().reverse().map(eventItem));
}

// A metric that an operator reports is broken once it is no number any more.
function noteBroken(rows) {
  const newest = rows[rows.length - 1];
  if (!newest) return;
  for (const [column, node] of Object.entries(page.facts.graph.metrics || {})) {
    if (newest[column] === null && page.rows.some((row) => typeof row[column] === "number")) page.broken.set(column, node);
    else if (typeof newest[column] === "number") page.broken.delete(column);
  }
}

function showWorkers(now) {
  const workers = Object.values(now.workers).flat();
  const items = workers.map((worker) => {
    const again = page.events.filter((e) => e.worker === worker.name);
    const item = element("li", { class: again.length ? "again" : "" });
    item.append(
      element("span", {}, worker.name),
      element("meter", { min: 0, max: 1, value: worker.busy, "aria-label": `${worker.name} busy` }),
      element("span", { class: "share" }, percent(worker.busy)),
    );
    const newest = again[again.length - 1];
    if (newest) item.append(element("small", {}, `restarted ${again.length > 1 ? `${again.length} times, ` : ""}${new Date(1000 * newest.time).toLocaleTimeString()}`));
    return item;
  });
  $("workers").replaceChildren(...(items.length ? items : [element("li", {}, "They are in the process of the run.")]));
}

// -- what if: the sliders stay where they were put, and their predictions follow the run

const chosenValues = new Map();

function showPrediction(slider, now) {
  const box = $("sliders").querySelector(`[data-slider="${slider.name}"]`);
  const at = Math.min(Number(box.querySelector("input").value), slider.values.length - 1);
  const prediction = slider.predictions[at], speed = prediction.steps_per_second;
  const value = slider.name === "batch" ? `× ${slider.values[at]}` : amount(slider.values[at]);
  const times = speed === null || !now.steps_per_second ? "" : ` (${(speed / now.steps_per_second).toFixed(2)} ×)`;
  box.querySelector("output").textContent = value;
  box.querySelector("small").textContent = at === 0
    ? `as it is: ${amount(now.steps_per_second)} steps/s`
    : `${speed === null ? "" : `${amount(speed)} steps/s${times}: `}${prediction.because}`;
}

function showSliders(now) {
  const names = now.sliders.map((slider) => slider.name).join();
  if ($("sliders").dataset.names !== names) {
    $("sliders").dataset.names = names;
    $("sliders").replaceChildren(...now.sliders.map((slider) => {
      const box = element("label", { "data-slider": slider.name });
      const range = element("input", { type: "range", min: 0, max: slider.values.length - 1, step: 1, value: 0 });
      range.value = chosenValues.get(slider.name) || 0;
      range.addEventListener("input", () => {
        chosenValues.set(slider.name, Number(range.value));
        showSliders(page.now);
      });
      box.append(element("span", {}, slider.name), range, element("output"), element("small"));
      return box;
    }));
  }
  for (const slider of now.sliders) {
    $("sliders").querySelector(`[data-slider="${slider.name}"] input`).max = slider.values.length - 1;
    showPrediction(slider, now);
  }
  // What has no slider is said in words.
  const refused = now.what_if.filter((w) => w.steps_per_second === null);
  $("whatif").replaceChildren(...refused.map((w) => {
    const item = element("li", {}, w.change);
    item.append(element("small", {}, w.because));
    return item;
  }));
}
