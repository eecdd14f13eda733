// What all pages have: times in the reader's time zone, unseen characters made visible, charts, and what is unfolded.
"use strict";
// As in pages.py.
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

function visible(text) {
  return text.replace(UNSEEN, (found) => `\\u${found.codePointAt(0).toString(16).padStart(4, "0")}`);
}

function two(number) {
  return String(number).padStart(2, "0");
}

function local(at) {
  // A time of today needs no date.
  const time = [at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(":");
  const day = [at.getFullYear(), at.getMonth() + 1, at.getDate()].map(two).join("-");
  return at.toDateString() === new Date().toDateString() ? time : `${day} ${time}`;
}

function localize(place) {
  for (const each of place.querySelectorAll("time[datetime]")) {
    const at = new Date(each.dateTime);
    each.title = `${each.dateTime.replace("T", " ").replace("Z", "")} UTC`;
    if (each.className !== "ago") {
      each.textContent = local(at);
    }
  }
}

// What was unfolded stays so when a part of the page is read again.

const unfolded = new Map();
document.addEventListener("toggle", (event) => {
  if (event.target.id) {
    unfolded.set(event.target.id, event.target.open);
  }
}, true);

function unfold(place) {
  for (const each of place.querySelectorAll("details[id]")) {
    each.open = unfolded.get(each.id) ?? each.open;
  }
}

// Figures with a small chart of what they were since the page was opened. A counter is shown as its rate.

const KEPT_VALUES = 60;
const WIDTH = 120;
const HEIGHT = 24;
const figures = new Map();

function chart(values) {
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, at) => `${WIDTH * at / (KEPT_VALUES - 1)},${HEIGHT - 1 - (HEIGHT - 2) * value / most}`);
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  drawn.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.setAttribute("aria-hidden", "true");
  drawn.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
  drawn.firstChild.setAttribute("points", points.join(" "));
  return drawn;
}

function plot(place) {
  for (const each of place.querySelectorAll("[data-value]")) {
    const {name, value, counter} = each.dataset;
    const known = figures.get(name) || {values: []};
    const at = performance.now() / 1000;
    let number = Number(value);
    if (counter !== undefined) {
      const rate = known.at === undefined ? NaN : Math.max(0, number - known.last) / (at - known.at);
      Object.assign(known, {last: number, at});
      number = rate;
    }
    figures.set(name, known);
    if (!Number.isNaN(number)) {
      known.values = [...known.values, number].slice(-KEPT_VALUES);
      if (counter !== undefined) {
        each.querySelector("dd").textContent = `${number.toFixed(number < 10 ? 1 : 0)}/s`;
      }
    }
    if (known.values.length > 1) {
      each.append(chart(known.values));
    }
  }
}

function prepare(place) {
  localize(place);
  unfold(place);
  plot(place);
}

// Of the whole page, and of each part that is read again.
document.addEventListener("htmx:load", (event) => prepare(event.detail.elt));
