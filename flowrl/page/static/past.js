"use strict";
// The slider over the moments that are remembered of a run. At its right end the page shows what
// the run does now.

const REST = 100;  // milliseconds for which the slider must rest before the server is asked
const resting = { timer: 0, asked: 0 };

function clock(seconds) {
  const whole = Math.floor(seconds);
  const two = (x) => String(x % 60).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60))}:${two(whole)}`;
}

function labelPast(moment) {
  const text = moment
    ? `${clock(moment.seconds)} of ${clock(page.past[page.past.length - 1].seconds)}, ${amount(moment.env_steps)} steps`
    : "now";
  $("when").textContent = text;
  $("slider").setAttribute("aria-valuetext", text);
}

function nearest(list, seconds) {
  let best = 0;
  list.forEach((moment, i) => {
    if (Math.abs(moment.seconds - seconds) < Math.abs(list[best].seconds - seconds)) best = i;
  });
  return best;
}

function setPast(list) {
  page.past = list;
  const slider = $("slider");
  slider.max = list.length;
  slider.disabled = !list.length;
  slider.value = page.moment ? nearest(list, page.moment.seconds) : list.length;
}

async function askPast(rest = "") {
  const answer = await fetch(`/runs/${page.run}/past${rest}`);
  return answer.ok ? answer.json() : null;
}

// A slider that somebody moves, or that shows the past, stays as it is.
async function followPast(count) {
  const still = () => !page.moment && !resting.timer;
  if ($("saved") || count === page.past.length || !still()) return;
  const list = await askPast().catch(() => null);
  if (list && still()) setPast(list);
}

// It gives a moment, and the list of all in which it stands.
async function momentOf(number) {
  let list = page.past;
  if ($("saved")) return [list[number], list];
  const { seconds } = list[number];
  // A history that was full meanwhile is thinned, so its moments have other numbers.
  for (let tries = 0; tries < 3 && list.length; tries += 1) {
    const best = nearest(list, seconds);
    const found = await askPast(`/${best}`);
    if (found && found.seconds === list[best].seconds) return [found, list];
    list = await askPast() || [];
  }
  return [null, list];
}

async function showPast(number) {
  const asked = ++resting.asked;
  const [found, list] = await momentOf(number).catch(() => [null, page.past]);
  if (asked !== resting.asked) return;
  page.past = list;
  if (!found) { showNow(); return; }
  page.moment = found;
  setPast(list);
  labelPast(found);
  paintMoment();
}

function showNow() {
  resting.asked += 1;
  page.moment = null;
  setPast(page.past);
  labelPast(null);
  paintMoment();
}

function paintMoment() {
  document.body.classList.toggle("past", Boolean(page.moment));
  $("live").disabled = !page.moment;
  paint();
  showState();
  drawCurve();
}

$("slider").addEventListener("input", () => {
  const number = Number($("slider").value);
  clearTimeout(resting.timer);
  // What was asked for is no longer wanted.
  resting.asked += 1;
  labelPast(page.past[number]);
  resting.timer = setTimeout(() => {
    resting.timer = 0;
    if (number < page.past.length) showPast(number);
    else showNow();
  }, REST);
});
$("live").addEventListener("click", () => {
  clearTimeout(resting.timer);
  resting.timer = 0;
  showNow();
  // A button that is off can't hold the focus.
  $("slider").focus();
});
