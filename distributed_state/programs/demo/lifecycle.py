"""The lifecycle of conversations on three replicas, one of which is killed. Law: every process started here ends here.

A step of the demo is one value: a description, the code, and the command to a replica. Each replica is a process, with
a column and a colour on the screen; the output is the same in 80 columns and in a pipe.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from distributed_state import Event, InvalidValue, StateStore
from distributed_state.errors import StateError
from distributed_state.programs.demo.replica import EVENT, HOOK, START, account, differences, read
from distributed_state.programs.servers import redis_server_unless, working_folder
from distributed_state.programs.worker_processes import Message, WorkerProcess
from distributed_state.settings import without_password

_COLOURS = ("cyan", "magenta", "yellow")
_WIDEST = 110
_INDENT = 4
PROGRAM = (sys.executable, "-m", "distributed_state.programs.demo.replica")
_START_SECONDS = 30.0
_STOP_SECONDS = 20.0
Mailbox = SimpleQueue[tuple["Replica", int, Message | None]]
NAMES = ("ada", "ben", "cleo")
VICTIM = "cleo"
_BEAT = 0.5  # seconds; a replica that is silent for three of them is lost
_MOST = 1000


def lifecycle(plan: Plan, screen: Screen) -> Report:
    """Run the demo, and verify it."""
    began = time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(working_folder(plan.keep and plan.keep.resolve()))
        with screen.waiting("starting a server and three replicas"):
            settings, server = stack.enter_context(place(plan.url, plan.archive, folder))
            store = stack.enter_context(StateStore.open(**{**settings, "beat": 0.0}))
            them = stack.enter_context(fleet(NAMES, folder, settings, plan.program))
            them.start(*them)
        archive = without_password(plan.archive) if plan.archive else "SQLite"
        screen.open({each.name: each.of(START)[-1]["pid"] for each in them}, server, archive)
        show = Show(them, screen, plan)
        show.run()
        with screen.waiting("comparing what each replica received with the stream and with SQL"):
            received = {each.id for each in store.admin.audit(after="oldest", limit=_MOST)}
            them.until(lambda: all(received <= _ids(each) for each in them), plan.wait)
            them.end()
            audited = store.admin.audit(after="oldest", limit=_MOST)
            stream = _stream(store, {each.id for each in audited}, plan.wait)
            accounts = [account(each.name, read(each.notes)) for each in them]
        found = show.differences + differences(stream, audited, accounts)
        found += [f"{each.name}: ended with exit code {each.exit_code}" for each in them if each.exit_code]
        return Report(
            namespace=settings["namespace"],
            steps=show.steps,
            events=[each.to_dict() for each in stream],
            replicas=[
                Shown(
                    name=each.name,
                    lives=account.lives,
                    pids=[start["pid"] for start in each.of(START)],
                    received=len(account.received),
                    missed=len(show.missed) if each.name == VICTIM else 0,
                    hooks=len(account.called),
                    exit_code=each.exit_code,
                )
                for each, account in zip(them, accounts, strict=True)
            ],
            seconds=round(time.monotonic() - began, 3),
            differences=found,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to run, and how slowly; `wait` limits the waits of fast operations, `program` starts a replica."""

    url: str | None = None
    archive: str | None = None
    keep: Path | None = None
    pause: float = 0.0
    wait: float = 10.0
    program: Sequence[str] = PROGRAM

    def __post_init__(self) -> None:
        if self.archive == "memory":
            raise InvalidValue("an archive in memory is one process's own; name a database, or none")
        if self.keep is not None and any((self.keep / f"{name}.jsonl").exists() for name in NAMES):
            raise InvalidValue(f"{self.keep} holds the logs of an earlier run; name another folder")


@dataclass(frozen=True, slots=True)
class Shown:
    """The result of one replica. `missed` events happened while it was dead and reached it later."""

    name: str
    lives: int
    pids: list[int]
    received: int
    missed: int
    hooks: int
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """The result. `differences` is empty if every replica received exactly the expected events."""

    namespace: str
    steps: list[dict[str, str]]
    events: list[dict[str, Any]]
    replicas: list[Shown]
    seconds: float
    differences: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"verified": not self.differences, **asdict(self)}


@dataclass(slots=True)
class Show:
    """The demo as it runs."""

    fleet: Fleet
    screen: Screen
    plan: Plan
    steps: list[dict[str, str]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    missed: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Run all parts."""
        self.screen.act("An action on one replica reaches all")
        for step in TOGETHER:
            self._perform(step)
        self.screen.act(f"{VICTIM} is killed, the others continue")
        self._kill()
        for step in AWAY:
            self._perform(step)
        self.screen.act(f"{VICTIM} restarts and receives what it missed")
        self._come_back()
        for step in AGAIN:
            self._perform(step)

    def _perform(self, step: Step) -> None:
        self._announce(step.who, step.words, step.code)
        marks = self._marks()
        self.fleet.order(step.who, step.call, **step.arguments)
        self._gather(marks, step.hook)

    def _kill(self) -> None:
        victim = self.fleet.replicas[VICTIM]
        pid = victim.of(START)[-1]["pid"]
        self._announce(VICTIM, "is killed without a chance to say so", f"kill -9 {pid}")
        victim.kill()
        marks = self._marks()
        with self.screen.waiting("the others notice by its heartbeat"):
            self._gather(marks, "on_event")

    def _come_back(self) -> None:
        victim = self.fleet.replicas[VICTIM]
        others = [each for each in self.fleet if each.alive]
        self._announce(VICTIM, "restarts from the position in its log", "Agent(store, since=position)")
        before = _ids(victim)
        start = len(victim.of(HOOK))
        events = {each["id"]: each["type"] for other in others for each in other.of(EVENT)}
        self.missed = events.keys() - before
        hooks = sum(events[id] != "config.changed" for id in self.missed)  # it starts with the newest
        with self.screen.waiting(f"{VICTIM} starts"):
            self.fleet.start(victim)
            done = self.fleet.until(
                lambda: self.missed <= _ids(victim) and len(victim.of(HOOK)) - start >= hooks,
                self.plan.wait,
            )
        if not done:
            self.differences.append(f"{VICTIM}: did not receive all missed events within {self.plan.wait:g} s")
        model = victim.of(START)[-1]["model"]
        self.screen.caught_up(VICTIM, len(self.missed), model, victim.of(HOOK)[start:])
        self._rest()

    def _announce(self, who: str, words: str, code: str) -> None:
        self.steps.append({"who": who, "what": words, "code": code})
        self.screen.step(len(self.steps), who, words, code)

    def _marks(self) -> dict[str, tuple[int, int]]:
        """Count what each living replica has logged so far."""
        living = [each for each in self.fleet if each.alive]
        return {each.name: (len(each.of(HOOK)), len(each.of(EVENT))) for each in living}

    def _gather(self, marks: dict[str, tuple[int, int]], hook: str) -> None:
        """Wait until each has run the hook and logged the event, and show it."""

        def new(each: Replica) -> list[dict[str, Any]]:
            return each.of(HOOK)[marks[each.name][0] :]

        def has(each: Replica) -> bool:
            return any(it["hook"] == hook for it in new(each)) and len(each.of(EVENT)) > marks[each.name][1]

        living = [each for each in self.fleet if each.name in marks]
        if hook and not self.fleet.until(lambda: all(has(each) for each in living), self.plan.wait):
            late = " and ".join(each.name for each in living if not has(each))
            self.differences.append(f"step {len(self.steps)}: {late} did not receive it within {self.plan.wait:g} s")
        if hook:
            self.screen.received({each.name: new(each) if each.name in marks else None for each in self.fleet})
        self._rest()

    def _rest(self) -> None:
        self.fleet.until(lambda: False, self.plan.pause)


def _ids(replica: Replica) -> set[str]:
    return {each["id"] for each in replica.of(EVENT)}


def _stream(store: StateStore, known: set[str], seconds: float) -> list[Event]:
    """All events that Redis keeps, including the known ones unless Redis lost them."""
    found: list[Event] = []
    deadline = time.monotonic() + seconds
    with store.events("*", since="oldest") as events:
        while time.monotonic() < deadline:
            event = events.next(timeout=0.3)
            if event is not None:
                found.append(event)
            elif known <= {each.id for each in found}:
                break
    return found


@contextmanager
def place(url: str | None, archive: str | None, folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The settings of all stores, and the server's name; starts a server if none is given."""
    with redis_server_unless(url, folder / "redis") as (used, name):
        settings = {
            "url": used,
            "archive": archive or f"sqlite:///{folder / 'archive.db'}",
            # The servers may hold other data, so each run has its own namespace.
            "namespace": f"demo-{uuid.uuid4().hex[:8]}",
            "beat": _BEAT,
        }
        yield settings, name


# The steps


@dataclass(frozen=True, slots=True)
class Step:
    """An action of one replica. `hook` then runs on each live replica; "" if the step causes no event."""

    who: str
    words: str
    code: str
    call: str
    arguments: dict[str, Any]
    hook: str = ""


def _create(who: str, id: str) -> Step:
    code = f'store.session("{id}").create()'
    return Step(who, f"creates the conversation {id}", code, "create", {"conversation": id}, "on_new_conversation")


def _write(who: str, id: str, note: str) -> Step:
    code = f'store.session("{id}").append(...)'
    return Step(who, f'writes two messages and the note "{note}"', code, "write", {"conversation": id, "note": note})


def _switch(who: str, id: str, previous: str) -> Step:
    code = f'store.session("{id}").switch(previous_id="{previous}")'
    arguments = {"conversation": id, "previous": previous}
    return Step(who, f"switches from {previous} to {id}", code, "switch", arguments, "on_conversation_switched")


def _clear(who: str, id: str) -> Step:
    code = f'store.session("{id}").clear(messages=True)'
    return Step(who, f"clears {id}", code, "clear", {"conversation": id}, "on_new_conversation")


def _delete(who: str, id: str) -> Step:
    code = f'store.delete("{id}")'
    return Step(who, f"deletes {id}", code, "delete", {"conversation": id}, "on_conversation_deleted")


def _configure(who: str, model: str) -> Step:
    code = f'store.admin.reload_config({{"model": "{model}"}})'
    return Step(who, "gives the fleet a new config", code, "reload_config", {"model": model}, "on_config_update")


TOGETHER = (
    _create("ada", "trip"),
    _write("ben", "trip", "window seat"),
    _create("cleo", "food"),
    _switch("ben", "trip", "food"),
    _clear("cleo", "food"),
    _delete("ada", "trip"),
    _configure("ben", "large"),
)
AWAY = (
    _create("ada", "hotel"),
    _switch("ben", "hotel", "food"),
    _delete("ada", "food"),
    _configure("ben", "tiny"),
)
AGAIN = (_clear(VICTIM, "hotel"),)


# The replicas


class Replica:
    """One replica: a process, and its reports over all restarts."""

    def __init__(self, name: str, folder: Path, place: Mapping[str, Any], program: Sequence[str]) -> None:
        self.name = name
        self.notes = folder / f"{name}.jsonl"
        self.log = folder / f"{name}.log"
        self.reports: list[Message] = []
        self.exit_code: int | None = None
        self._place = place
        self._program = program
        self._process: WorkerProcess | None = None
        self._starts = 0

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def lives(self) -> int:
        return len(self.of(START))

    def of(self, kind: str) -> list[Message]:
        """The replica's reports of one kind."""
        return [each for each in self.reports if each["kind"] == kind]

    def start(self, mailbox: Mailbox) -> None:
        """Start or restart it; its reports go to the mailbox."""
        self._starts += 1
        started = self._starts
        self._process = WorkerProcess(self._program, lambda report: mailbox.put((self, started, report)), log=self.log)
        self.send(name=self.name, notebook=str(self.notes), store=dict(self._place))

    def send(self, **fields: Any) -> None:
        assert self._process is not None
        self._process.send(fields)

    def hear(self, started: int, report: Message | None) -> None:
        """Keep a report from the mailbox. Raises StateError if the process ended on its own."""
        if report is not None:
            self.reports.append(report)
        elif self._process is not None and started == self._starts:
            said = self._process.complaint()
            self._process.wait(_STOP_SECONDS)  # so that its own exit code is reported instead of SIGKILL's
            self.kill()
            raise StateError(f"{self.name} ended with {self.exit_code}: {said}")

    def kill(self) -> None:
        """End the replica with SIGKILL, as a crash would."""
        if self._process is not None:
            self.exit_code = self._process.end()
            self._process = None

    def ask_to_end(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def wait(self) -> None:
        """Wait until it has ended, for a limited time, then kill it."""
        if self._process is not None:
            self._process.wait(_STOP_SECONDS)
            self.kill()


class Fleet:
    """All replicas, and their reports."""

    def __init__(self, names: Sequence[str], folder: Path, place: Mapping[str, Any], program: Sequence[str]) -> None:
        self.replicas = {name: Replica(name, folder, place, program) for name in names}
        self._mailbox: Mailbox = SimpleQueue()
        self._orders = 0

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.replicas.values())

    def start(self, *replicas: Replica) -> None:
        """Start these replicas, and wait until they receive events."""
        lives = {each.name: each.lives for each in replicas}
        for each in replicas:
            each.start(self._mailbox)
        if not self.until(lambda: all(each.lives > lives[each.name] for each in replicas), _START_SECONDS):
            raise StateError(f"not all replicas were ready within {_START_SECONDS:g} s")

    def order(self, name: str, call: str, **arguments: Any) -> None:
        """Give a replica an order, and wait until it is done. Raises StateError with the replica's error."""
        self._orders += 1
        number = self._orders
        replica = self.replicas[name]
        replica.send(order=number, call=call, arguments=arguments)

        def answers() -> list[Message]:
            return [each for each in replica.reports if each.get("order") == number]

        if not self.until(lambda: bool(answers()), _START_SECONDS):
            raise StateError(f"{name} did not answer within {_START_SECONDS:g} s")
        if answers()[0]["kind"] == "failed":
            raise StateError(f"{name}: {answers()[0]['error']}")

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Receive reports until the condition holds; return whether it did in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with suppress(Empty):
                replica, started, report = self._mailbox.get(timeout=min(left, 0.2))
                replica.hear(started, report)
        return True

    def end(self) -> None:
        """Shut all replicas down cleanly."""
        for each in self:
            each.ask_to_end()
        for each in self:
            each.wait()


@contextmanager
def fleet(names: Sequence[str], folder: Path, place: Mapping[str, Any], program: Sequence[str]) -> Iterator[Fleet]:
    """A fleet that ends with the block, by SIGKILL if it has not ended before."""
    them = Fleet(names, folder, place, program)
    try:
        yield them
    finally:
        for each in them:
            each.kill()


# The screen


class Screen:
    """Shows each step, and below it the hooks that it ran on each replica."""

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
        """Show an action of a replica."""
        line = Text(f"{number:>2}  ") + Text(who, f"bold {self._colours[who]}") + Text(f" {words}")
        shown = Text(code, "dim")
        self._print(Text(""))
        if line.cell_len + shown.cell_len + 3 <= self._width:
            self._print(line + Text(" " * (self._width - line.cell_len - shown.cell_len)) + shown)
        else:
            self._print(line, Padding(shown, (0, 0, 0, _INDENT)))

    def received(self, hooks: Mapping[str, Sequence[dict[str, Any]] | None]) -> None:
        """Show the hooks that ran on each replica; None for one that is dead."""
        dead = [Text("(dead)", "dim")]
        self._print(self._columns({n: dead if ran is None else self._lines(n, ran) for n, ran in hooks.items()}))

    def caught_up(self, name: str, missed: int, model: str, hooks: Sequence[dict[str, Any]]) -> None:
        """Show the events that a replica missed and received after its restart."""
        lines = [Text(f"missed {missed} events:", "bold"), *self._lines(name, hooks)]
        lines += [Text("and the current config", self._colours[name]), Text(f"  model {model}", "dim")]
        self._print(self._columns({each: lines if each == name else [] for each in self._colours}))
        words = "(Only events of the same conversation keep their order.)"
        self._print(Padding(Text(words, "dim"), (0, 0, 0, _INDENT)))

    def close(self, report: Any) -> None:
        """Show the summary and the result."""
        table = Table(
            "replica", "starts", "events received", "missed, caught up", "hooks run", "ended", box=None, pad_edge=False
        )
        for column in table.columns[1:]:
            column.justify = "right"
        for each in report.replicas:
            received = f"{each.received} of {len(report.events)}"
            ended = "cleanly" if each.exit_code == 0 else f"with {each.exit_code}"
            name = Text(each.name, self._colours[each.name])
            table.add_row(name, str(each.lives), received, str(each.missed), str(each.hooks), ended)
        self._print(Text(""), Rule(Text("Events by replica", "bold"), style="dim", align="left"), table, Text(""))
        for text in report.differences:
            self._print(Text(text, "red"))
        count = len(report.differences)
        took = f"{report.seconds:.1f} s"
        if count:
            self._print(Text(f"NOT VERIFIED in {took}: {count} difference{'s' if count > 1 else ''}", "bold red"))
        else:
            received = f"each replica received all {len(report.events)} events once, those of a conversation in order"
            words = f"VERIFIED in {took}: {received}, ran its hooks in that order too, and SQL holds the same events."
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
