"use strict";
// What all parts of the page share. They are plain scripts, so that one file can hold them all.

const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);
// `now` is what the graph shows; `moment` the moment of the past that it is of, or null.
const page = {
  rows: [], chosen: null, now: null, facts: null, plot: null, events: [], broken: new Map(), debugger: null,
  kept: [], seen: 0, stride: 1, tries: 0, item: null, state: "", shown: "connecting", news: null, past: [], moment: null,
};

function element(name, attributes = {}, text = "") {
  const made = name.startsWith("svg:")
    ? document.createElementNS(SVG, name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}

function amount(x) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  if (size >= 1000 || Number.isInteger(x)) return Math.round(x).toLocaleString("en");
  return size >= 100 ? x.toFixed(0) : x.toPrecision(3);
}

const percent = (x) => `${Math.round(100 * x)}%`;

// Call `draw` whenever the width of an element becomes another: a window that is resized, and a
// frame of a notebook that the browser lays out only after the page has run in it.
function onWidth(id, draw) {
  let width = $(id).clientWidth;
  new ResizeObserver(() => {
    if ($(id).clientWidth === width) return;
    width = $(id).clientWidth;
    requestAnimationFrame(draw);
  }).observe($(id));
}
