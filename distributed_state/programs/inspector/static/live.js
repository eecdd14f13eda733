// Shows events, and the output of a turn, as they come. What they say is put on the page as text, never as markup.
"use strict";
const KEPT = 200; // rows of events, parts of an output
const LONGEST = 8000; // characters of a text, as of a message
const LONGEST_VALUE = 300;

function follow(path, state, connected) {
  const source = new EventSource(path);
  source.onopen = connected;
  source.onerror = () => {
    state.textContent = source.readyState === EventSource.CLOSED ? "Not allowed, or signed out" : "Reconnecting";
  };
  window.addEventListener("beforeunload", () => source.close());
  return source;
}

// Events of the store

function cell(row, text) {
  const made = row.insertCell();
  made.textContent = visible(text);
  return made;
}

function link(row, subject, open) {
  const made = row.insertCell();
  const [scope, ...name] = subject.split(":");
  if (scope !== "session") {
    made.textContent = visible(subject);
    return;
  }
  const anchor = document.createElement("a");
  const id = name.join(":").replace(/%(u[0-9A-F]{4}|[0-9A-F]{2})/g, (_, code) => String.fromCharCode(parseInt(code.replace("u", ""), 16)));
  try {
    anchor.href = open + encodeURIComponent(id);
  } catch (error) {
    // a lone surrogate: it is in the list of conversations
  }
  anchor.textContent = visible(id);
  made.append(anchor);
}

function showEvents(table) {
  const rows = table.tBodies[0];
  const state = document.getElementById("connection");
  const pause = document.getElementById("pause");
  const containing = document.getElementById("containing");
  let paused = false;
  const source = follow(table.dataset.source, state, () => { state.textContent = "Connected"; });
  source.onmessage = (event) => {
    const said = JSON.parse(event.data);
    const subject = said.subject || "";
    if (paused || !subject.includes(containing.value)) {
      return;
    }
    const row = rows.insertRow(0);
    cell(row, local(new Date(said.time)));
    cell(row, said.type);
    link(row, subject, table.dataset.open);
    cell(row, said.actor || "").className = "more";
    cell(row, JSON.stringify(said.data).slice(0, LONGEST_VALUE));
    while (rows.rows.length > KEPT) {
      rows.deleteRow(-1);
    }
  };
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Continue" : "Pause";
  });
}

// The turn of a conversation

const MARKS = {
  restarted: () => "Begun again: what is struck out does not count",
  truncated: () => "Output is missing here",
  stop_requested: (data) => `Asked to stop${data.reason === null ? "" : `: ${shortened(data.reason)}`}`,
  abandoned: () => "Ended with its worker: nothing was written",
  failed: () => "Failed: nothing was written",
  ended: (data) => {
    const outcome = data.outcome === null ? "" : `, outcome ${shortened(JSON.stringify(data.outcome))}`;
    return (data.version === null ? "Ended: nothing was written" : `Ended: written as version ${data.version}`) + outcome;
  },
};

function shortened(text) {
  const left = text.length - LONGEST_VALUE;
  return left > 0 ? `${text.slice(0, LONGEST_VALUE)} … ${left} more characters` : text;
}

function part(kind, text) {
  const made = document.createElement("p");
  made.className = kind;
  made.textContent = visible(text);
  return made;
}

class Output {
  // The parts of one attempt; those of an attempt that was restarted stay above it.
  constructor(place) {
    this.place = place;
    this.attempt = "";
  }

  take(event) {
    const data = JSON.parse(event.data);
    const attempt = event.lastEventId.split("-")[0]; // an id is the turn's fencing token, and a number
    if (event.type === "restarted") {
      [...this.place.children].forEach((each) => each.classList.add("old"));
    } else if (attempt !== this.attempt) {
      this.place.replaceChildren();
    }
    this.attempt = attempt;
    if (event.type !== "chunk") {
      const mark = this.add("mark", MARKS[event.type](data));
      if (data.version) {
        const anchor = document.createElement("a");
        anchor.href = `?version=${data.version}`;
        anchor.textContent = `show version ${data.version}`;
        mark.append(" ", anchor);
      }
    } else if ("bytes" in data) {
      this.add("bytes", `bytes ${shortened(data.bytes)}`);
    } else if (typeof data.value === "string") {
      this.say(data.value);
    } else {
      this.add("value", shortened(JSON.stringify(data.value)));
    }
  }

  say(text) {
    const last = this.place.lastElementChild;
    const said = last !== null && last.className === "said" ? last : this.add("said", "");
    this.change(() => {
      const whole = said.textContent + visible(text);
      said.textContent = whole.length > LONGEST ? `…${whole.slice(-LONGEST)}` : whole;
    });
  }

  add(kind, text) {
    const place = this.place;
    const made = part(kind, text);
    this.change(() => {
      place.hidden = false;
      place.append(made);
      if (place.childElementCount > KEPT) {
        while (place.childElementCount >= KEPT) {
          place.firstElementChild.remove();
        }
        place.prepend(part("mark", "Earlier output is not shown"));
      }
    });
    return made;
  }

  change(make) {
    const place = this.place;
    const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40; // the reader has not scrolled back
    make();
    if (atEnd) {
      place.scrollTop = place.scrollHeight;
    }
  }
}

function askTwice(button, path, given, refused) {
  const word = button.textContent;
  let timer = 0;
  function calm() {
    clearTimeout(timer);
    timer = 0;
    button.textContent = word;
  }
  button.addEventListener("click", async (event) => {
    if (event.detail > 1) {
      return; // the second half of a double click confirms nothing
    }
    if (!timer) {
      button.textContent = `${word}? Click again`;
      timer = setTimeout(calm, 5000);
      return;
    }
    calm();
    try {
      const headers = {"Content-Type": "application/x-www-form-urlencoded"};
      const answer = await fetch(path, {method: "POST", headers, body: new URLSearchParams(given())});
      const text = await answer.text();
      if (text) {
        refused(text);
      }
    } catch (error) {
      refused("the service cannot be reached");
    }
  });
  return calm;
}

function showTurn(now) {
  const state = document.getElementById("turn");
  const stop = document.getElementById("stop"); // missing without the right to write
  const output = new Output(document.getElementById("output"));
  const refused = (why) => output.add("problem", `Not stopped: ${why}`);
  const calm = stop && askTwice(stop, `${now.dataset.place}/stop`, () => ({token: running}), refused);
  let words = "No turn runs";
  let running = 0; // its token

  function runs(token) {
    running = token;
    words = running ? "A turn runs" : "No turn runs";
    state.textContent = words;
    if (stop) {
      calm(); // a click meant for another turn confirms nothing
      stop.hidden = !running;
    }
  }

  function changed() {
    htmx.trigger("#inbox", "changed");
    htmx.trigger("#plan", "changed"); // read a little later: a worker notes a failure after the turn
  }

  const source = follow(`${now.dataset.place}/output`, state, () => {
    state.textContent = words;
    changed(); // what was posted before is not reported
  });
  for (const name of ["chunk", ...Object.keys(MARKS)]) {
    source.addEventListener(name, (event) => output.take(event));
  }
  source.addEventListener("turn.started", (event) => runs(JSON.parse(event.data).token));
  source.addEventListener("turn.ended", () => {
    runs(0);
    changed();
  });
  for (const name of ["inbox.posted", "inbox.taken", "resync"]) {
    source.addEventListener(name, changed);
  }
}

const table = document.getElementById("events");
if (table) {
  showEvents(table);
}
const now = document.getElementById("now");
if (now) {
  showTurn(now);
}
