"""The demo on a terminal: a column and colour for each replica. Law: it reads the same in 80 columns and in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

_COLOURS = ("cyan", "magenta", "yellow")
_WIDEST = 110
_INDENT = 4


class Screen:
    """Shows each step, and beneath it the hooks that it ran on each replica."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = min(console.width, _WIDEST)
        self._colours: dict[str, str] = {}

    def waiting(self, words: str) -> AbstractContextManager[Any]:
        """Show a spinner with these words, on a terminal, while the block runs."""
        return self._console.status(words)

    def open(self, pids: Mapping[str, int], server: str, archive: str) -> None:
        """Introduce the replicas, by name with their process ids."""
        self._colours = dict(zip(pids, _COLOURS, strict=True))
        words = "Three replicas of one agent, a process each: "
        names = Text(", ").join(Text(f"{name} ({pid})", self._colours[name]) for name, pid in pids.items())
        self._print(Text(words) + names + Text(f". They share {server} and {archive}, and nothing else."))
        self._print(Text("Each step, and beneath it the hooks that it ran on each replica:"))

    def act(self, title: str) -> None:
        """Start a part of the demo, with the heads of the columns."""
        self._print(Text(""), Rule(Text(title, "bold"), style="dim", align="left"))
        self._print(self._columns({name: [Text(name, f"bold {colour}")] for name, colour in self._colours.items()}))

    def step(self, number: int, who: str, words: str, code: str) -> None:
        """Show what a replica does."""
        line = Text(f"{number:>2}  ") + Text(who, f"bold {self._colours[who]}") + Text(f" {words}")
        shown = Text(code, "dim")
        self._print(Text(""))
        if line.cell_len + shown.cell_len + 3 <= self._width:
            self._print(line + Text(" " * (self._width - line.cell_len - shown.cell_len)) + shown)
        else:
            self._print(line, Padding(shown, (0, 0, 0, _INDENT)))

    def heard(self, hooks: Mapping[str, Sequence[dict[str, Any]] | None]) -> None:
        """Show the hooks that ran on each replica; None for one that is dead."""
        dead = [Text("(dead)", "dim")]
        self._print(self._columns({n: dead if ran is None else self._lines(n, ran) for n, ran in hooks.items()}))

    def caught_up(self, name: str, missed: int, model: str, hooks: Sequence[dict[str, Any]]) -> None:
        """Show the events that a replica missed and received after its restart."""
        lines = [Text(f"missed {missed} events:", "bold"), *self._lines(name, hooks)]
        lines += [Text("and the current config", self._colours[name]), Text(f"  model {model}", "dim")]
        self._print(self._columns({each: lines if each == name else [] for each in self._colours}))
        words = "(Events of one conversation keep their order; those of two have none.)"
        self._print(Padding(Text(words, "dim"), (0, 0, 0, _INDENT)))

    def close(self, report: Any) -> None:
        """Show the summary and the result."""
        table = Table(
            "replica", "starts", "events received", "missed, caught up", "hooks run", "ended", box=None, pad_edge=False
        )
        for column in table.columns[1:]:
            column.justify = "right"
        for each in report.replicas:
            heard = f"{each.heard} of {len(report.events)}"
            ended = "cleanly" if each.exit_code == 0 else f"with {each.exit_code}"
            name = Text(each.name, self._colours[each.name])
            table.add_row(name, str(each.lives), heard, str(each.missed), str(each.hooks), ended)
        self._print(
            Text(""), Rule(Text("What each replica received", "bold"), style="dim", align="left"), table, Text("")
        )
        for text in report.differences:
            self._print(Text(text, "red"))
        count = len(report.differences)
        took = f"{report.seconds:.1f} s"
        if count:
            self._print(Text(f"NOT VERIFIED in {took}: {count} difference{'s' if count > 1 else ''}", "bold red"))
        else:
            heard = f"each replica received all {len(report.events)} events once, those of a conversation in order"
            words = f"VERIFIED in {took}: {heard}, ran its hooks in that order too, and SQL holds the same events."
            self._print(Text(words, "bold green"))

    def _lines(self, name: str, hooks: Iterable[dict[str, Any]]) -> list[Text]:
        return [
            line
            for ran in hooks
            for line in (
                Text(ran["hook"], self._colours[name]),
                *(Text(f"  {words}", "dim") for words in _in_words(ran["hook"], ran["given"], ran["found"])),
            )
        ]

    def _columns(self, cells: Mapping[str, list[Text]]) -> Padding:
        grid = Table.grid(padding=(0, 1, 0, 0))
        width = (self._width - _INDENT) // len(cells) - 1
        for _ in cells:
            grid.add_column(width=width, overflow="fold")
        grid.add_row(*(Group(*lines) for lines in cells.values()))
        return Padding(grid, (0, 0, 0, _INDENT))

    def _print(self, *what: Any) -> None:
        self._console.print(*what, sep="\n", width=self._width, highlight=False)


def _in_words(hook: str, given: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    id = given.get("conversation_id")
    if hook == "on_new_conversation":
        return [f"{id}, {'cleared' if given['is_clear'] else 'created'}"]
    if hook == "on_conversation_switched":
        return [f"{given['previous_id']} -> {id}", f"{given['message_count']} messages"]
    if hook == "on_conversation_deleted":
        notes = ", ".join(found["notes"])
        return [f"{id}, {'before' if found['there'] else 'after'} it goes", *([f'note "{notes}"'] if notes else [])]
    return [f"model {given['model']}"] if hook == "on_config_update" else [given["type"]]
