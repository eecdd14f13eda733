"""One replay from end to end: servers, workers, verification. Law: whatever was started here ends here."""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from distributed_state import InvalidValue, StateStore
from distributed_state.cold.private_files import opener
from distributed_state.programs.replay.conversations import Conversation
from distributed_state.programs.replay.coordinator import Coordinator, Tally
from distributed_state.programs.replay.pool import ProcessWorker, ThreadWorker, Worker
from distributed_state.programs.replay.report import Report, summarise
from distributed_state.programs.replay.verify import Ack, Kept, differences
from distributed_state.programs.servers import redis_server


@dataclass(frozen=True, slots=True)
class Plan:
    """What to replay, where, and how many workers to kill."""

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


def replay(plan: Plan, console: Console) -> Report:
    """Serve every turn of every conversation, killing workers on the way, and compare SQL with the input."""
    with ExitStack() as stack:
        folder = stack.enter_context(_folder(plan.keep))
        settings = stack.enter_context(_settings(plan, folder))
        log = stack.enter_context(open(folder / "acknowledged.jsonl", "w", 1, "utf-8", opener=opener))
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
            store.archive()
            lag = time.monotonic() - start
        # A new store: nothing that it answers can come from the hot tier of the store that wrote.
        with StateStore.open(**settings, archiver=False) as store, console.status("reading back from SQL"):
            found = verify(store, plan.conversations, tally.acks)
        messages = sum(len(conversation.messages) for conversation in plan.conversations)
        return summarise(tally, conversations=len(plan.conversations), messages=messages, lag=lag, differences=found)


def verify(store: StateStore, conversations: Sequence[Conversation], acks: Sequence[Ack]) -> list[str]:
    """Read every conversation from SQL and say how it differs from what it should be."""
    by_id = defaultdict(list)
    for ack in acks:
        by_id[ack.conversation].append(ack)
    return [
        text
        for conversation in conversations
        for text in differences(conversation, by_id[conversation.id], _kept(store, conversation.id))
    ]


def _kept(store: StateStore, id: str) -> Kept:
    # history() and at() answer from SQL alone.
    session = store.session(id)
    history = session.history()
    if not history:
        return Kept([], 0, [], None)
    last = session.at(version=history[-1].version)
    changes = [(change.version, [message.to_dict() for message in change.appended]) for change in history]
    return Kept([message.to_dict() for message in last.messages], last.fields.get("turn"), changes, last.phase)


def _refuse_to_mix(store: StateStore, plan: Plan) -> None:
    for conversation in plan.conversations:
        if store.session(conversation.id).version():
            text = f"namespace {plan.namespace!r} holds the conversation {conversation.id!r} already; name another one"
            raise InvalidValue(text)


@contextmanager
def _settings(plan: Plan, folder: Path) -> Iterator[dict[str, Any]]:
    """The settings that all stores of this replay share, with a new server if none is named."""
    settings: dict[str, Any] = {"archive": plan.archive or f"sqlite:///{folder / 'archive.db'}"}
    # On servers that hold other data too, every replay has a namespace of its own.
    settings["namespace"] = plan.namespace or f"replay-{uuid.uuid4().hex[:8]}"
    if plan.in_process:
        yield settings
        return
    own: AbstractContextManager[Any] = nullcontext() if plan.url else redis_server(directory=folder / "redis")
    with own as server:
        yield settings | {"url": plan.url or server.url}


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="distributed-state-replay-") as place:
        yield Path(place)


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
        facts = f"{pace:,.0f}/s  {tally.kills} kills  {tally.workers} workers hired"
        progress.update(task, completed=tally.turns, facts=facts)
        await asyncio.sleep(0.1)
