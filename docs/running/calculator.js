// The calculator of sizing.md: the page's own table of figures, multiplied by what the reader says. Loads nothing.
(() => {
  "use strict";

  // A letter's figure in the table, in the unit that it has there.
  const figures = () => {
    const found = {};
    for (const row of document.querySelectorAll("table tr")) {
      const cells = [...row.cells].map((cell) => cell.textContent.trim());
      if (/^[a-z]$/.test(cells[0])) found[cells[0]] = parseFloat(cells[2].replaceAll(",", ""));
    }
    return found;
  };

  const rounded = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(2))));
  const memory = (bytes) => (bytes >= 1e9 ? `${rounded(bytes / 1e9)} GB` : `${rounded(bytes / 1e6)} MB`);

  const needs = (of, say) => {
    const loose = Math.min(say.loose, say.kept);
    return [
      ["Redis: sessions, without journal and events", memory(say.sessions * (say.kilobytes * 1e3 + of.a))],
      ["SQL, once it is full", memory(say.gigabytes * 1e9 * (of.c * loose + of.d * (say.kept - loose)))],
      ["PostgreSQL's log a day, at that peak all day", memory(say.turns * of.g * 86400)],
      ["Archivers, one of them to lose", rounded(Math.ceil(say.turns / of.h) + 1)],
      ["Redis' core, of commits that two replicas hold", `${rounded((say.turns * of.n) / 1e4)} %`],
    ];
  };

  const show = (form) => {
    const say = Object.fromEntries([...form.elements].map((input) => [input.name, Math.max(0, Number(input.value) || 0)]));
    const table = form.querySelector("table") ?? form.appendChild(document.createElement("table"));
    table.setAttribute("aria-live", "polite");
    table.replaceChildren(...needs(figures(), say).map((words) => {
      const row = document.createElement("tr");
      row.append(...words.map((word) => Object.assign(document.createElement("td"), { textContent: word })));
      return row;
    }));
  };

  const begin = () => {
    for (const form of document.querySelectorAll("form.calculator")) {
      form.addEventListener("input", () => show(form));
      form.addEventListener("submit", (event) => event.preventDefault());
      show(form);
    }
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
