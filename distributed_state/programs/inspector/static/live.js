// Shows events as they come. What they say is put on the page as text, never as markup.
"use strict";
const table = document.getElementById("events");
const rows = table.tBodies[0];
const state = document.getElementById("connection");
const pause = document.getElementById("pause");
const containing = document.getElementById("containing");
const KEPT = 200;
let paused = false;

function cell(row, text) {
  const made = row.insertCell();
  made.textContent = text;
  return made;
}

function link(row, subject) {
  const made = row.insertCell();
  const [scope, ...name] = subject.split(":");
  if (scope !== "session") {
    made.textContent = subject;
    return;
  }
  const anchor = document.createElement("a");
  const id = name.join(":").replace(/%(u[0-9A-F]{4}|[0-9A-F]{2})/g, (_, code) => String.fromCharCode(parseInt(code.replace("u", ""), 16)));
  try {
    anchor.href = table.dataset.open + encodeURIComponent(id);
  } catch (error) {
    // a lone surrogate: it is in the list of conversations
  }
  anchor.textContent = id;
  made.append(anchor);
}

function show(event) {
  const said = JSON.parse(event.data);
  const subject = said.subject || "";
  if (paused || !subject.includes(containing.value)) {
    return;
  }
  const row = rows.insertRow(0);
  cell(row, said.time.slice(11, 23));
  cell(row, said.type);
  link(row, subject);
  cell(row, said.actor || "");
  cell(row, JSON.stringify(said.data).slice(0, 300));
  while (rows.rows.length > KEPT) {
    rows.deleteRow(-1);
  }
}

const source = new EventSource(table.dataset.source);
source.onopen = () => { state.textContent = "Connected"; };
source.onerror = () => {
  state.textContent = source.readyState === EventSource.CLOSED ? "Not allowed, or signed out" : "Reconnecting";
};
source.onmessage = show;
window.addEventListener("beforeunload", () => source.close());
pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  pause.textContent = paused ? "Continue" : "Pause";
});
