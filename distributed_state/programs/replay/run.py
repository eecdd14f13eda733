"""One replay from end to end: servers, workers, verification, report.

Law: every process started here ends here, and every figure is counted or measured in the reported run. The verification
compares the input, the acknowledged turns and the stored result, and describes every difference.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from distributed_state import InvalidValue, StateStore
from distributed_state.programs.replay.coordinator import (
    BEFORE,
    IDLE,
    Ack,
    Conversation,
    Coordinator,
    Kill,
    ProcessWorker,
    Tally,
    ThreadWorker,
    Worker,
)
from distributed_state.programs.replay.worker import LOCK_TTL
from distributed_state.programs.servers import redis_server_unless, working_folder
from distributed_state.settings import private_opener

OPERATIONS = ("begin", "read", "commit", "turn")
_SHOWN = 20


def replay(plan: Plan, console: Console) -> Report:
    """Serve every turn of every conversation, kill workers meanwhile, and compare SQL with the input."""
    with ExitStack() as stack:
        stack.enter_context(_silent_about_the_killed())
        folder = stack.enter_context(working_folder(plan.keep and plan.keep.resolve()))
        settings = stack.enter_context(_settings(plan, folder))
        log = stack.enter_context(open(folder / "acknowledged.jsonl", "w", 1, "utf-8", opener=private_opener))
        with StateStore.open(**settings, archiver=plan.in_process) as store:
            if plan.namespace:
                _refuse_to_mix(store, plan)

            def hire(slot: int) -> Worker:
                return (
                    ThreadWorker(store) if plan.in_process else ProcessWorker(settings, folder / f"worker-{slot}.log")
                )

            coordinator = Coordinator(
                plan.conversations, hire, workers=plan.workers, kills=plan.kills, seed=plan.seed, log=log
            )
            tally = asyncio.run(_serve(coordinator, console))
            start = time.monotonic()
            store.admin.archive()
            lag = time.monotonic() - start
        # A new store, so that no answer can come from the hot tier of the store that wrote.
        with StateStore.open(**settings, archiver=False) as store, console.status("reading back from SQL"):
            found = verify(store, plan.conversations, tally.acks)
        messages = sum(len(conversation.messages) for conversation in plan.conversations)
        return summarise(tally, conversations=len(plan.conversations), messages=messages, lag=lag, differences=found)


@dataclass(frozen=True, slots=True)
class Plan:
    """The input of a replay, its servers, and the number of kills."""

    conversations: Sequence[Conversation]
    url: str | None = None
    archive: str | None = None
    namespace: str | None = None
    workers: int = 4
    kills: int = 0
    in_process: bool = False
    seed: int | None = None
    keep: Path | None = None

    def __post_init__(self) -> None:
        if self.workers < 1 or self.kills < 0:
            raise InvalidValue(f"{self.workers} workers and {self.kills} kills: use at least 1 and 0")
        if self.in_process and (self.kills or self.url):
            raise InvalidValue("in one process there is no worker to kill and no server; leave out --kill and --url")
        if self.archive == "memory":
            raise InvalidValue("an archive in memory is lost with its process; name a database, or none")


@contextmanager
def _silent_about_the_killed() -> Iterator[None]:
    """Replicas are lost on purpose here: the report says which."""
    log = logging.getLogger("distributed_state.warm.heartbeat")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _settings(plan: Plan, folder: Path) -> Iterator[dict[str, Any]]:
    """The settings that all stores of this replay share, with a new server unless one is given."""
    settings: dict[str, Any] = {"archive": plan.archive or f"sqlite:///{folder / 'archive.db'}"}
    # The servers may hold other data, so every replay has its own namespace.
    settings["namespace"] = plan.namespace or f"replay-{uuid.uuid4().hex[:8]}"
    if plan.in_process:
        yield settings
        return
    with redis_server_unless(plan.url, folder / "redis") as (url, _):
        yield settings | {"url": url}


def _refuse_to_mix(store: StateStore, plan: Plan) -> None:
    for conversation in plan.conversations:
        if store.session(conversation.id).version():
            text = f"namespace {plan.namespace!r} holds the conversation {conversation.id!r} already; name another one"
            raise InvalidValue(text)


async def _serve(coordinator: Coordinator, console: Console) -> Tally:
    columns = [BarColumn(), MofNCompleteColumn(), TextColumn("turns  {task.fields[facts]}"), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("replay", total=coordinator.total, facts="")
        display = asyncio.create_task(_display(coordinator.tally, progress, task))
        try:
            return await coordinator.run()
        finally:
            display.cancel()


async def _display(tally: Tally, progress: Progress, task: Any) -> None:
    while True:
        pace = tally.turns / (tally.ended - tally.began) if tally.turns else 0.0
        facts = f"{pace:,.0f}/s  {len(tally.kills)} kills  {tally.workers} workers hired"
        progress.update(task, completed=tally.turns, facts=facts)
        await asyncio.sleep(0.1)


# Verification


def verify(store: StateStore, conversations: Sequence[Conversation], acks: Sequence[Ack]) -> list[str]:
    """Read every conversation from SQL and describe its differences from the expected one."""
    by_id = defaultdict(list)
    for ack in acks:
        by_id[ack.conversation].append(ack)
    return [
        text
        for conversation in conversations
        for text in differences(conversation, by_id[conversation.id], _kept(store, conversation.id))
    ]


def _kept(store: StateStore, id: str) -> Kept:
    # history() and at() read only SQL.
    session = store.session(id)
    history = session.history()
    if not history:
        return Kept([], 0, [], None)
    last = session.at(version=history[-1].version)
    changes = [(change.version, [message.to_dict() for message in change.appended]) for change in history]
    return Kept([message.to_dict() for message in last.messages], last.fields.get("turn"), changes, last.phase)


@dataclass(frozen=True, slots=True)
class Kept:
    """One conversation in the SQL database: messages, turn counter, each version's appended messages, last phase."""

    messages: Sequence[dict[str, Any]]
    turns: Any
    changes: Sequence[tuple[int, Sequence[dict[str, Any]]]]
    phase: str | None


def differences(conversation: Conversation, acks: Iterable[Ack], kept: Kept) -> list[str]:
    """Describe every difference between `kept` and the expected conversation; an empty list without differences."""
    found = [*_order(conversation, kept), *_versions(kept), *_acknowledged(conversation, acks, kept)]
    if kept.turns != len(conversation.turns):
        found.append(f"the turn counter is {kept.turns!r} instead of {len(conversation.turns)}")
    if kept.phase != "done":
        found.append(f"the phase is {kept.phase!r} instead of 'done'")
    return [f"{conversation.id}: {text}" for text in found]


def _order(conversation: Conversation, kept: Kept) -> Iterable[str]:
    wanted = [message.to_dict() for message in conversation.messages]
    if len(wanted) != len(kept.messages):
        yield f"{len(kept.messages)} messages instead of {len(wanted)}"
    for at, (left, right) in enumerate(zip(wanted, kept.messages, strict=False)):
        if not same(left, right):
            place = f"message {at} is {_short(right)} instead of {_short(left)}"
            earlier = next((n for n in range(at) if same(wanted[n], right)), None)
            yield place if earlier is None else f"{place}; equal to message {earlier}"
            return


def _versions(kept: Kept) -> Iterable[str]:
    yield from gaps([version for version, _ in kept.changes])


def _acknowledged(conversation: Conversation, acks: Iterable[Ack], kept: Kept) -> Iterable[str]:
    changes = dict(kept.changes)
    seen: set[int] = set()
    for ack in acks:
        wanted = [message.to_dict() for message in conversation.turns[ack.turn]]
        name = f"turn {ack.turn}, acknowledged as version {ack.version},"
        if ack.turn in seen:
            yield f"{name} was acknowledged twice"
        seen.add(ack.turn)
        if not same(wanted, list(changes.get(ack.version, ()))):
            yield f"{name} is not what that version appended"
        if ack.first is not None and not same(wanted, list(kept.messages[ack.first : ack.first + len(wanted)])):
            yield f"{name} is not at messages {ack.first} to {ack.first + len(wanted) - 1}"


def _short(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else repr(content or message.get("tool_calls"))
    return f"{message.get('role')} {text[:60]!r}"


def gaps(versions: Iterable[int]) -> Iterator[str]:
    """Describe the first place where versions are not 1, 2, 3, and so on."""
    for wanted, version in enumerate(versions, 1):
        if version != wanted:
            yield f"version {version} stands where version {wanted} should"
            return


def same(left: Any, right: Any) -> bool:
    """Whether values are equal and have equal types at every level: 1, 1.0 and True differ."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


# The report


@dataclass(frozen=True, slots=True)
class Report:
    """The result. `differences` is empty if no acknowledged write was lost or changed."""

    conversations: int
    messages: int
    turns: int
    seconds: float
    workers: int
    kills: list[Kill]
    failures: list[str]
    latencies: dict[str, Latency]
    hot_hit_rate: float
    archive_lag_seconds: float
    differences: list[str]

    @property
    def turns_per_second(self) -> float:
        """Turns of all workers together."""
        return self.turns / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"turns_per_second": self.turns_per_second, "verified": not self.differences}


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of one operation, in milliseconds."""

    p50_ms: float
    p99_ms: float
    count: int


def latency(seconds: list[float]) -> Latency:
    """Median and 99th percentile, by the nearest rank."""
    ordered = sorted(seconds)

    def rank(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 3)

    return Latency(rank(0.5), rank(0.99), len(ordered))


def summarise(tally: Tally, *, conversations: int, messages: int, lag: float, differences: list[str]) -> Report:
    """Combine the tally of a run and the result of its verification."""
    hits = sum(hot["hot_hits"] for hot in tally.hot.values())
    reads = hits + sum(hot["hot_misses"] for hot in tally.hot.values())
    return Report(
        conversations=conversations,
        messages=messages,
        turns=tally.turns,
        seconds=round(tally.ended - tally.began, 3),
        workers=tally.workers,
        kills=tally.kills,
        failures=tally.failures,
        latencies={name: latency(tally.latencies[name]) for name in OPERATIONS if name in tally.latencies},
        hot_hit_rate=round(hits / reads, 4) if reads else 0.0,
        archive_lag_seconds=round(lag, 3),
        differences=differences,
    )


def show(report: Report, console: Console) -> None:
    """Print who was killed and who went on, what was read back, and every difference by name."""

    def line(text: str, style: str | None = None) -> None:
        # Not wrapped by the console, which leaves a blank at the end of a line.
        console.print(Text(fill(text, console.width, subsequent_indent="  "), style or ""), soft_wrap=True)

    for text in _kills(report):
        line(text)
    line(_verdict(report), "bold red" if report.differences else "bold green")
    for text in report.differences[:_SHOWN]:
        line(text, "red")
    if len(report.differences) > _SHOWN:
        line(f"... and {len(report.differences) - _SHOWN} more", "red")
    for text in _turns(report):
        line(text)


def _kills(report: Report) -> Iterator[str]:
    for kill in report.kills:
        if kill.where == IDLE:
            continue
        yield f"worker {kill.worker} was killed in {kill.conversation}, turn {kill.turn + 1}, {kill.where};"
        if kill.successor is None:
            yield "  nothing of the turn was left to do"
        elif kill.where == BEFORE:
            yield f"  worker {kill.successor} served the turn {kill.after:.1f} s later"
        else:
            yield f"  worker {kill.successor} found its answer {kill.after:.1f} s later, and wrote nothing twice"
    if idle := sum(kill.where == IDLE for kill in report.kills):
        yield f"{idle} more {'was' if idle == 1 else 'were'} killed between two turns"


def _verdict(report: Report) -> str:
    if report.differences:
        return f"verified: {len(report.differences)} differences"
    return (
        f"verified: {report.messages:,} of {report.messages:,} messages of {report.conversations:,} conversations "
        "are in SQL, each once, in order, equal to the input; versions dense"
    )


def _turns(report: Report) -> Iterator[str]:
    yield f"{report.turns:,} turns by {report.workers} workers in {report.seconds:.1f} s"
    took = report.latencies["turn"]
    behind = f"; one behind a killed worker waits for its lease, up to {LOCK_TTL:g} s" if report.kills else ""
    yield f"a turn takes {took.p50_ms:.1f} ms (median){behind}"
    if report.failures:
        yield f"{len(report.failures)} turns were repeated, the last: {report.failures[-1]}"
