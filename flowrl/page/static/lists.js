"use strict";
// Numbers, predictions, runners and events.

function showNumbers(news) {
  const last = page.rows[page.rows.length - 1] || {};
  const goes = news.debugger || ["starting", "running", "paused", "killed"].includes(news.state);
  $("state").textContent = goes ? news.state : `ended: ${news.state}`;
  enableControls(news.state);
  $("steps").textContent = amount(last.env_steps);
  $("updates").textContent = amount(last.updates);
  $("return").textContent = amount(last.return_mean);
  $("speed").textContent = amount(news.now.steps_per_second);
  const b = news.now.bottleneck;
  $("why").textContent = b
    ? `Bottleneck: ${b.where}, ${percent(b.share)} of the time. ${b.why} ${b.advice}`
    : "Nothing was measured yet.";
}

function showLists(news) {
  $("whatif").replaceChildren(...news.now.what_if.map((w) => {
    const speed = w.steps_per_second === null ? "" : `: ${amount(w.steps_per_second)} steps/s`;
    const item = element("li", {}, `${w.change}${speed}`);
    item.append(element("small", {}, w.because));
    return item;
  }));
  const workers = Object.values(news.now.workers).flat();
  $("workers").replaceChildren(...(workers.length ? workers.map((w) => {
    const item = element("li");
    item.append(element("span", {}, w.name), element("meter", { min: 0, max: 1, value: w.busy, "aria-label": `${w.name} busy` }), element("span", {}, percent(w.busy)));
    return item;
  }) : [element("li", {}, "They are in the process of the run.")]));
  page.events.push(...news.events);
  page.events.splice(0, Math.max(0, page.events.length - 500));
  if (news.events.length) {
    $("events").replaceChildren(...page.events.slice().reverse().map((e) => {
      const item = element("li", { class: e.kind });
      item.append(element("time", {}, new Date(1000 * e.time).toLocaleTimeString()), ` ${e.text}`);
      return item;
    }));
  }
}
