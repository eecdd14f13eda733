// What all pages have: times in the reader's time zone, and characters that are not seen made visible.
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

localize(document);
document.addEventListener("htmx:load", (event) => localize(event.detail.elt));
