"""The lifecycle of conversations on three replicas, one of which is killed. Law: what was started here ends here."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distributed_state import Event, InvalidValue, StateStore
from distributed_state.programs.demo import notebook, verify
from distributed_state.programs.demo.processes import PROGRAM, Fleet, Replica, fleet
from distributed_state.programs.demo.scenes import AGAIN, AWAY, NAMES, TOGETHER, VICTIM, Step
from distributed_state.programs.demo.screen import Screen
from distributed_state.programs.servers import redis_server
from distributed_state.settings import without_password

_BEAT = 0.5  # a replica that is silent for three of them is lost
_MOST = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to run, and how slowly; `patience` is for what should take no time, `program` starts a replica."""

    url: str | None = None
    archive: str | None = None
    keep: Path | None = None
    pause: float = 0.0
    patience: float = 10.0
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
    heard: int
    missed: int
    hooks: int
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """The result. `differences` is empty if every replica received what it should have."""

    namespace: str
    steps: list[dict[str, str]]
    events: list[dict[str, Any]]
    replicas: list[Shown]
    seconds: float
    differences: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"verified": not self.differences, **asdict(self)}


def lifecycle(plan: Plan, screen: Screen) -> Report:
    """Run the demo, and verify it."""
    began = time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(_folder(plan.keep))
        with screen.waiting("starting a server and three replicas"):
            place, server = stack.enter_context(_place(plan, folder))
            store = stack.enter_context(StateStore.open(**{**place, "beat": 0.0}))
            them = stack.enter_context(fleet(NAMES, folder, place, plan.program))
            them.start(*them)
        archive = without_password(plan.archive) if plan.archive else "SQLite"
        screen.open({each.name: each.of(notebook.START)[-1]["pid"] for each in them}, server, archive)
        show = Show(them, screen, plan)
        show.run()
        with screen.waiting("comparing what each replica received with the stream and with SQL"):
            heard = {each.id for each in store.audit(after="oldest", limit=_MOST)}
            them.until(lambda: all(heard <= _ids(each) for each in them), plan.patience)
            them.end()
            audited = store.audit(after="oldest", limit=_MOST)
            stream = _stream(store, {each.id for each in audited}, plan.patience)
            accounts = [notebook.account(each.name, notebook.read(each.notes)) for each in them]
        found = show.differences + verify.differences(stream, audited, accounts)
        found += [f"{each.name}: ended with exit code {each.exit_code}" for each in them if each.exit_code]
        return Report(
            namespace=place["namespace"],
            steps=show.steps,
            events=[each.to_dict() for each in stream],
            replicas=[
                Shown(
                    name=each.name,
                    lives=account.lives,
                    pids=[start["pid"] for start in each.of(notebook.START)],
                    heard=len(account.heard),
                    missed=len(show.missed) if each.name == VICTIM else 0,
                    hooks=len(account.called),
                    exit_code=each.exit_code,
                )
                for each, account in zip(them, accounts, strict=True)
            ],
            seconds=round(time.monotonic() - began, 3),
            differences=found,
        )


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
        self.screen.act("What one replica does reaches all")
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
        pid = victim.of(notebook.START)[-1]["pid"]
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
        start = len(victim.of(notebook.HOOK))
        events = {each["id"]: each["type"] for other in others for each in other.of(notebook.EVENT)}
        self.missed = events.keys() - before
        hooks = sum(events[id] != "config.changed" for id in self.missed)  # the newest config it has as it starts
        with self.screen.waiting(f"{VICTIM} starts"):
            self.fleet.start(victim)
            done = self.fleet.until(
                lambda: self.missed <= _ids(victim) and len(victim.of(notebook.HOOK)) - start >= hooks,
                self.plan.patience,
            )
        if not done:
            self.differences.append(f"{VICTIM}: did not hear within {self.plan.patience:g} s all that it had missed")
        model = victim.of(notebook.START)[-1]["model"]
        self.screen.caught_up(VICTIM, len(self.missed), model, victim.of(notebook.HOOK)[start:])
        self._rest()

    def _announce(self, who: str, words: str, code: str) -> None:
        self.steps.append({"who": who, "what": words, "code": code})
        self.screen.step(len(self.steps), who, words, code)

    def _marks(self) -> dict[str, tuple[int, int]]:
        """Count what each living replica has logged so far."""
        living = [each for each in self.fleet if each.alive]
        return {each.name: (len(each.of(notebook.HOOK)), len(each.of(notebook.EVENT))) for each in living}

    def _gather(self, marks: dict[str, tuple[int, int]], hook: str) -> None:
        """Wait until each has run the hook and logged the event, and show it."""

        def new(each: Replica) -> list[dict[str, Any]]:
            return each.of(notebook.HOOK)[marks[each.name][0] :]

        def has(each: Replica) -> bool:
            return any(it["hook"] == hook for it in new(each)) and len(each.of(notebook.EVENT)) > marks[each.name][1]

        living = [each for each in self.fleet if each.name in marks]
        if hook and not self.fleet.until(lambda: all(has(each) for each in living), self.plan.patience):
            late = " and ".join(each.name for each in living if not has(each))
            self.differences.append(
                f"step {len(self.steps)}: {late} did not hear of it within {self.plan.patience:g} s"
            )
        if hook:
            self.screen.heard({each.name: new(each) if each.name in marks else None for each in self.fleet})
        self._rest()

    def _rest(self) -> None:
        self.fleet.until(lambda: False, self.plan.pause)


def _ids(replica: Replica) -> set[str]:
    return {each["id"] for each in replica.of(notebook.EVENT)}


def _stream(store: StateStore, known: set[str], seconds: float) -> list[Event]:
    """All events that Redis keeps; those known are among them, unless it lost them."""
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
def _place(plan: Plan, folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The settings of all stores, and the server's name, with a server of our own if none is given."""
    own: AbstractContextManager[Any] = nullcontext() if plan.url else redis_server(directory=folder / "redis")
    with own as server:
        settings = {
            "url": plan.url or server.url,
            "archive": plan.archive or f"sqlite:///{folder / 'archive.db'}",
            # On servers that hold other data too, each run has a namespace of its own.
            "namespace": f"demo-{uuid.uuid4().hex[:8]}",
            "beat": _BEAT,
        }
        yield settings, without_password(plan.url) if plan.url else Path(server.binary).name


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="distributed-state-demo-", ignore_cleanup_errors=True) as place:
        yield Path(place)
