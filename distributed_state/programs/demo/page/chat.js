// Posts messages to a conversation, and follows their answers, whichever worker gives them.
"use strict";
const CONVERSATION = "/v1/conversations/chat";
const HANDLER = "answer"; // of the workers
const key = location.hash.slice(1);
const byId = (id) => document.getElementById(id);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const workers = new Map(); // name: what the page's server says of it, and its place on the page
let messages = []; // those of the conversation
let inbox = []; // those that wait; the first one is answered now, or next
let request = null; // the request of the message whose answer is followed; null: any turn
let answer = { worker: "", text: "", position: "" };
let source = null;
let followers = 0;

// Requests

async function ask(method, url, body) {
  const headers = { Authorization: `Bearer ${key}` };
  if (body) headers["Content-Type"] = "application/json";
  const found = await fetch(url, { method, headers, body: body && JSON.stringify(body) });
  if (found.ok) return found.json();
  const json = found.headers.get("Content-Type")?.includes("json");
  const problem = json ? await found.json() : { detail: await found.text() };
  const unavailable = found.status === 503 && problem.error !== "Backpressure";
  throw new (unavailable ? TypeError : Error)(problem.detail);
}

// Ask the service, again while it is not there. A message has a request id: it is accepted once.
async function askService(method, path, body) {
  for (;;) {
    try {
      return await ask(method, CONVERSATION + path, body);
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // a TypeError: there was no answer, or the service starts or stops
      await pause(200);
    }
  }
}

// The output

async function follow(wanted) {
  const mine = ++followers;
  if (source) source.close();
  if (wanted !== request) answer = { worker: "", text: "", position: "" };
  request = wanted;
  const { ticket } = await askService("POST", "/tickets");
  if (mine !== followers) return;
  const query = new URLSearchParams({ ticket, notices: true });
  if (request) query.set("request", request);
  if (answer.position) query.set("after", answer.position);
  source = new EventSource(`${CONVERSATION}/output?${query}`);
  source.onerror = async () => {
    source.close();
    await pause(200);
    if (mine === followers) follow(request);
  };
  const on = (name, act) => source.addEventListener(name, (event) => {
    if (mine !== followers) return;
    if (event.lastEventId) answer.position = event.lastEventId;
    act(JSON.parse(event.data));
  });
  on("chunk", ({ value }) => {
    if (typeof value === "string") answer.text += value;
    else {
      answer.worker = value.worker;
      happened(`${answer.worker} answers.`);
    }
    show();
  });
  on("restarted", () => {
    happened(`restarted: ${answer.worker} died. Its part of the answer is dropped, because nothing was written.`);
    drop();
  });
  on("failed", () => drop());
  on("abandoned", () => drop());
  on("truncated", () => happened("truncated: a part of the answer is missing until its end."));
  on("stop_requested", () => happened("stop_requested: the turn keeps what it has."));
  on("ended", ({ version }) => {
    if (request) source.close(); // the stream of a request ends with its turn
    happened(`ended: committed as version ${version}.`);
    refresh();
  });
  for (const name of ["inbox.posted", "inbox.taken", "message.appended", "resync"]) on(name, refresh);
}

function drop() {
  answer.worker = answer.text = "";
  show();
}

// What is stored

let reading = null;
let again = false;

// Read the conversation and its inbox, and follow the answer to the first message that waits.
async function refresh() {
  again = true;
  reading ??= (async () => {
    while (again) {
      again = false;
      const waiting = await askService("GET", "/inbox");
      messages = (await askService("GET", "/messages?order=desc&limit=100&fresh=true")).messages.reverse();
      inbox = waiting.inputs;
      const first = inbox.length ? inbox[0].request_id : null;
      if (!source || first !== request) await follow(first);
      show();
      byId("log").ariaBusy = "false";
    }
  })();
  try {
    await reading;
  } finally {
    reading = null;
  }
}

// The page

function bubble(role, label, text, state) {
  const made = document.createElement("div");
  made.className = "message";
  made.dataset.role = role;
  made.dataset.state = state ?? "";
  if (label) made.append(Object.assign(document.createElement("small"), { textContent: label }));
  made.append(Object.assign(document.createElement("span"), { textContent: text }));
  return made;
}

function show() {
  const shown = messages.map((each) => bubble(each.role, each.name, each.content));
  const speaking = Boolean(answer.worker);
  const dead = workers.get(answer.worker)?.state === "dead";
  const label = dead ? `${answer.worker} died; another worker answers when its lease has ended` : `${answer.worker} speaks`;
  inbox.forEach((each, at) => {
    const answered = at === 0 && speaking;
    shown.push(bubble("user", answered ? "" : "waits in the inbox", each.message.content, answered ? "" : "waiting"));
    if (answered) shown.push(bubble("assistant", label, answer.text, dead ? "dead" : "speaking"));
  });
  const log = byId("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  log.replaceChildren(...shown);
  if (atEnd) log.scrollTop = log.scrollHeight;
  byId("stop").disabled = !(speaking && inbox.length && !dead);
  showWorkers();
}

function happened(text) {
  if (byId("events").firstChild?.lastChild.data === text) return;
  const line = document.createElement("li");
  const time = document.createElement("time");
  time.textContent = new Date().toLocaleTimeString("en-GB");
  line.append(time, text);
  byId("events").prepend(line);
  while (byId("events").children.length > 5) byId("events").lastChild.remove();
}

function showWorkers() {
  for (const [name, { card, state, pid }] of workers) {
    const texts = { serving: `serves, process ${pid}`, starting: `starts, process ${pid}`, dead: "dead; it is started again in a few seconds" };
    card.dataset.state = state;
    card.querySelector(".state").textContent = texts[state];
    card.querySelector(".speaks").hidden = !(inbox.length && name === answer.worker && state !== "dead");
    card.querySelector(".danger").disabled = state === "dead";
  }
}

async function look() {
  const found = await ask("GET", "workers");
  let changed = false;
  for (const each of found.workers) {
    const known = workers.get(each.name);
    workers.set(each.name, { ...each, card: known?.card ?? card(each.name) });
    if (known && known.state !== each.state) {
      changed = true;
      happened({ dead: `${each.name} was killed.`, starting: `${each.name} is started again.`, serving: `${each.name} serves.` }[each.state]);
    }
  }
  if (changed) show();
  else showWorkers();
}

function card(name) {
  const made = byId("worker").content.cloneNode(true).firstElementChild;
  made.querySelector("h2").textContent = name;
  const button = made.querySelector("button");
  button.setAttribute("aria-label", `Kill ${name}`);
  button.addEventListener("click", () => ask("DELETE", `workers/${name}`).then(look));
  byId("workers").append(made);
  return made;
}

byId("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const content = byId("text").value;
  byId("text").value = "";
  try {
    await askService("POST", "/inbox", { message: { role: "user", content }, handler: HANDLER, request_id: crypto.randomUUID() });
    await refresh();
  } catch (error) {
    happened(`Not accepted: ${error.message}`);
    byId("text").value = content;
  }
});

byId("stop").addEventListener("click", async () => {
  byId("stop").disabled = true;
  const { state } = await askService("POST", "/stop", { reason: "the user pressed stop" });
  happened(`stop: ${state}`);
});

async function begin() {
  for (;;) {
    try {
      await look();
      break;
    } catch (error) {
      happened(error.message);
      if (!(error instanceof TypeError)) return;
      await pause(1000);
    }
  }
  setInterval(() => look().catch(() => happened("The command has ended.")), 500);
  await refresh();
}

window.addEventListener("beforeunload", () => source?.close());
begin();
