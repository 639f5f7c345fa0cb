"use strict";
// Numbers, predictions, runners and events.

function showState() {
  $("state").textContent = page.moment ? `shows the past: ${clock(page.moment.seconds)}` : page.state;
}

function showNumbers(now, row) {
  $("steps").textContent = amount(row.env_steps);
  $("updates").textContent = amount(row.updates);
  $("return").textContent = amount(row.return_mean);
  $("speed").textContent = amount(now.steps_per_second);
  const b = now.bottleneck;
  $("why").textContent = b
    ? `Bottleneck: ${b.where}, ${percent(b.share)} of the time. ${b.why} ${b.advice}`
    : "Nothing was measured yet.";
}

function showLists(now) {
  $("whatif").replaceChildren(...now.what_if.map((w) => {
    const speed = w.steps_per_second === null ? "" : `: ${amount(w.steps_per_second)} steps/s`;
    const item = element("li", {}, `${w.change}${speed}`);
    item.append(element("small", {}, w.because));
    return item;
  }));
  const workers = Object.values(now.workers).flat();
  $("workers").replaceChildren(...(workers.length ? workers.map((w) => {
    const item = element("li");
    item.append(element("span", {}, w.name), element("meter", { min: 0, max: 1, value: w.busy, "aria-label": `${w.name} busy` }), element("span", {}, percent(w.busy)));
    return item;
  }) : [element("li", {}, "They are in the process of the run.")]));
}

function showEvents(events) {
  page.events.push(...events);
  page.events.splice(0, Math.max(0, page.events.length - 500));
  if (events.length) {
    $("events").replaceChildren(...page.events.slice().reverse().map((e) => {
      const item = element("li", { class: e.kind });
      item.append(element("time", {}, new Date(1000 * e.time).toLocaleTimeString()), ` ${e.text}`);
      return item;
    }));
  }
}
