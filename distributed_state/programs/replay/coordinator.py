"""Hands out turns to workers, kills some, and keeps the log of acknowledged turns.

Law: a turn counts as acknowledged when the commit's reply reached a worker and the worker's report reached the
coordinator, even if the worker dies afterwards; a turn that was not acknowledged is handed out again. A worker is a
process that may be killed, or a thread of this process. It either finishes a turn or raises WorkerDied.

A file has one conversation per line, `{"id": ..., "messages": [...]}`, with messages in the OpenAI chat format. A file
with an invalid line is refused as a whole.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from distributed_state import StateStore
from distributed_state.errors import InvalidValue, StateError
from distributed_state.programs.replay.worker import hot_figures, serve_turn
from distributed_state.programs.worker_processes import WorkerProcess
from distributed_state.values.model import Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation by turns: a user's message and everything up to the next one."""

    id: str
    turns: tuple[tuple[Message, ...], ...]

    @property
    def messages(self) -> list[Message]:
        """All messages in order."""
        return [message for turn in self.turns for message in turn]

    def again(self, round: int) -> Conversation:
        """The same conversation under another id, for round 2 and later."""
        return Conversation(f"{self.id}~{round}", self.turns) if round > 1 else self


def read_conversations(path: Path | None) -> list[Conversation]:
    """Read a file, or the package's sample. Raises InvalidValue that names the line."""
    if path is None:
        text = resources.files(__package__).joinpath("sample.jsonl").read_bytes()
        return parse_conversations(text.splitlines(), "the sample")
    try:
        with path.open("rb") as lines:
            return parse_conversations(lines, str(path))
    except OSError as error:
        raise InvalidValue(f"{path}: {error.strerror or error}") from error


def parse_conversations(lines: Iterable[bytes], place: str) -> list[Conversation]:
    """Check every line and split it into turns. Raises InvalidValue that names the line."""
    found: dict[str, Conversation] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        conversation = _conversation(line, f"{place}, line {number}")
        if conversation.id in found:
            raise InvalidValue(f"{place}, line {number}: the id {conversation.id!r} occurs twice")
        found[conversation.id] = conversation
    if not found:
        raise InvalidValue(f"{place}: holds no conversation")
    return list(found.values())


def _conversation(line: bytes, place: str) -> Conversation:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidValue(f"{place}: is not JSON, or is truncated: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("id"), str) or not fields["id"]:
        raise InvalidValue(f'{place}: must have the form {{"id": "...", "messages": [...]}}')
    if not isinstance(fields.get("messages"), list) or not fields["messages"]:
        raise InvalidValue(f"{place}: {fields['id']!r} has no list of messages")
    return Conversation(fields["id"], cut([_message(one, place, at) for at, one in enumerate(fields["messages"])]))


def _message(fields: Any, place: str, at: int) -> Message:
    try:
        return Message.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in ("messages", at, *first["loc"]))
        raise InvalidValue(f"{place}: {path}: {first['msg']}") from error


def cut(messages: Iterable[Message]) -> tuple[tuple[Message, ...], ...]:
    """Start a turn at every user message; messages before the first one belong to its turn."""
    turns: list[list[Message]] = [[]]
    asked = False
    for message in messages:
        if message.role == "user":
            if asked:
                turns.append([])
            asked = True
        turns[-1].append(message)
    return tuple(tuple(turn) for turn in turns)


PROGRAM = (sys.executable, "-m", "distributed_state.programs.replay.worker")
Listen = Callable[[dict[str, Any]], None]
_START_SECONDS = 60.0
_TURN_SECONDS = 120.0
_STOP_SECONDS = 10.0
log = logging.getLogger(__name__)
BEFORE = "before its commit"
REPLY_LOST = "after its commit, before it could say so"
COMMITTED = "after its commit"
IDLE = "between turns"
_STRUCK = {"begin": BEFORE, "ack": COMMITTED, "already": COMMITTED}
_TRIES = 3
_FIRST_GUESS_SECONDS = 0.004


class Coordinator:
    """Has all turns of all conversations served by `workers` workers, and kills a worker `kills` times."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        hire: Callable[[int], Worker],
        *,
        workers: int,
        kills: int,
        seed: int | None,
        log: IO[str],
    ) -> None:
        self.tally = Tally()
        self.total = sum(len(conversation.turns) for conversation in conversations)
        # The last tenth is reserved for kills that came too late for their turn and need another one.
        self._early = self.total * 9 // 10
        if kills > self._early:
            raise InvalidValue(f"{self.total} turns are too few for {kills} kills; at most {self._early}")
        self._hire = hire
        self._workers = workers
        self._log = log
        self._random = random.Random(seed)
        self._strikes = sorted(self._random.sample(range(self._early), kills), reverse=True)
        self._waiting = deque(Turn(conversation, 0) for conversation in conversations)
        self._change = asyncio.Condition()
        self._begun = 0
        self._recent: deque[float] = deque(maxlen=200)

    async def run(self) -> Tally:
        """Serve everything. Raises StateError when a turn fails again and again."""
        try:
            async with asyncio.TaskGroup() as slots:
                for number in range(self._workers):
                    slots.create_task(self._slot(number))
        except ExceptionGroup as failed:
            # The other failures have the same cause, or are consequences of the first.
            raise failed.exceptions[0] from None
        return self.tally

    async def _slot(self, number: int) -> None:
        """Keep one place filled: when its worker dies, hire the next."""
        while self.tally.turns < self.total:
            worker = self._hire(number)
            last_words = None
            try:
                await worker.start()
                self.tally.workers += 1
                serial = self.tally.workers
                await self._employ(serial, worker)
                last_words = partial(self._hear_figures, serial)
            except WorkerDied:
                pass
            finally:
                await worker.stop(last_words)

    async def _employ(self, serial: int, worker: Worker) -> None:
        while (turn := await self._next()) is not None:
            turn.stage = ""

            def listen(report: dict[str, Any], turn: Turn = turn) -> None:
                self._hear(serial, worker, turn, report)

            try:
                await worker.serve(turn.order(), listen)
            except WorkerDied as death:
                if worker.killed:
                    self._struck(serial, turn)
                else:
                    self._fail(turn, str(death))
                await self._give_back(turn)
                raise
            await self._give_back(turn)

    async def _next(self) -> Turn | None:
        async with self._change:
            await self._change.wait_for(lambda: self._waiting or self.tally.turns >= self.total)
            return self._waiting.popleft() if self._waiting else None

    async def _give_back(self, turn: Turn) -> None:
        if turn.failures >= _TRIES:
            raise StateError(f"failed {_TRIES} times: {self.tally.failures[-1]}")
        async with self._change:
            if not turn.committed:
                # At the front, so that the conversation keeps up with the others.
                self._waiting.appendleft(turn)
            else:
                self.tally.turns += 1
                self.tally.ended = time.monotonic()
                if turn.number + 1 < len(turn.conversation.turns):
                    self._waiting.append(Turn(turn.conversation, turn.number + 1))
            self._change.notify_all()

    def _hear(self, serial: int, worker: Worker, turn: Turn, report: dict[str, Any]) -> None:
        turn.stage = report["report"]
        match turn.stage:
            case "begin":
                self.tally.began = self.tally.began or time.monotonic()
                self._plan_strike(worker, turn)
            case "ack":
                turn.committed = True
                self._acknowledge(Ack(turn.conversation.id, turn.number, report["version"], report["first"]))
                self._succeeded(serial, turn)
            case "already":
                turn.committed = True
                self._succeeded(serial, turn, REPLY_LOST)
            case "done":
                self._recent.append(report["seconds"]["turn"])
                for name, seconds in report["seconds"].items():
                    self.tally.latencies.setdefault(name, []).append(seconds)
                self._hear_figures(serial, report)
            case "failed":
                self._fail(turn, report["error"])

    def _hear_figures(self, serial: int, report: dict[str, Any]) -> None:
        if "hot" in report:
            self.tally.hot[serial] = report["hot"]

    def _acknowledge(self, ack: Ack) -> None:
        self.tally.acks.append(ack)
        self._log.write(json.dumps(asdict(ack)) + "\n")

    def _fail(self, turn: Turn, why: str) -> None:
        turn.failures += 1
        self.tally.failures.append(f"{turn}: {why}")

    # Killing

    def _plan_strike(self, worker: Worker, turn: Turn) -> None:
        self._begun += 1
        if not self._strikes or self._begun <= self._strikes[-1]:
            return
        self._strikes.pop()
        if self._begun > self._early:
            # A kill that comes too late needs a later turn, which may not exist, so kill at once.
            self._strike(worker, turn)
            return
        # Spread over the usual length of a turn, so that kills land in every part of one.
        usual = statistics.median(self._recent) if self._recent else _FIRST_GUESS_SECONDS
        delay = self._random.uniform(0, usual)
        asyncio.get_running_loop().call_later(delay, self._strike, worker, turn)

    def _strike(self, worker: Worker, turn: Turn) -> None:
        if worker.killed or turn.stage in ("done", "failed"):
            self._strikes.append(self._begun)  # too late for this turn: kill in the next turn that begins
        else:
            worker.kill()

    def _struck(self, serial: int, turn: Turn) -> None:
        kill = Kill(serial, turn.conversation.id, turn.number, _STRUCK.get(turn.stage, IDLE))
        if kill.where == BEFORE:
            turn.kills.append((kill, time.monotonic()))  # who goes on with the turn completes it
            return
        self.tally.kills.append(kill)
        if kill.where == IDLE:
            self._strikes.append(self._begun)  # the report of its turn's end was under way: kill another worker

    def _succeeded(self, serial: int, turn: Turn, last: str = BEFORE) -> None:
        """A worker answered a turn in which others were killed; only the last of them can have committed it."""
        now = time.monotonic()
        for kill, when in turn.kills:
            where = last if kill is turn.kills[-1][0] else BEFORE
            self.tally.kills.append(replace(kill, where=where, successor=serial, after=round(now - when, 3)))
        turn.kills.clear()


@dataclass
class Tally:
    """The counts so far, for the progress display and the report."""

    turns: int = 0
    workers: int = 0
    began: float = 0.0
    ended: float = 0.0
    acks: list[Ack] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    latencies: dict[str, list[float]] = field(default_factory=dict)
    hot: dict[int, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker that was killed, the turn that it served, and who answered that turn, how many seconds later.

    If the turn was already committed and acknowledged, the last two are None.
    """

    worker: int
    conversation: str
    turn: int
    where: str
    successor: int | None = None
    after: float | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """One acknowledged turn: the version and the number of its first message, from the commit's reply.

    A reply that had to be requested again may lack the number.
    """

    conversation: str
    turn: int
    version: int
    first: int | None


@dataclass
class Turn:
    """One turn in progress. `stage` is the last that its worker reported."""

    conversation: Conversation
    number: int
    stage: str = ""
    committed: bool = False
    failures: int = 0
    kills: list[tuple[Kill, float]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"turn {self.number} of {self.conversation.id}"

    def order(self) -> dict[str, Any]:
        """The order that is sent to a worker."""
        messages = [message.to_dict() for message in self.conversation.turns[self.number]]
        return {"conversation": self.conversation.id, "turn": self.number, "messages": messages}


# Workers


class WorkerDied(Exception):
    """The worker ended in the middle of a turn."""


class Worker(ABC):
    """Serves one turn at a time."""

    killed = False

    @abstractmethod
    async def start(self) -> None:
        """Get ready for turns. Raises StateError with the reason if that fails."""

    @abstractmethod
    async def serve(self, order: dict[str, Any], listen: Listen) -> None:
        """Let the worker serve one turn; reports go to `listen`. Raises WorkerDied."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker with SIGKILL, at any point."""

    @abstractmethod
    async def stop(self, listen: Listen | None) -> None:
        """End the worker: at once, or with `listen` after it sent its last report and closed its store."""


class ProcessWorker(Worker):
    """A separate process, as it would run on another machine."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        self._settings = settings
        self._log = log
        self._process: WorkerProcess | None = None
        self._reports: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def listen(report: dict[str, Any] | None) -> None:
            loop.call_soon_threadsafe(self._reports.put_nowait, report)

        self._process = WorkerProcess(PROGRAM, listen, log=self._log)
        self._process.send(self._settings)
        try:
            await self._receive(self._process, _START_SECONDS)
        except WorkerDied as error:
            raise StateError(f"{error} before it was ready: {self._process.complaint()}") from error

    async def serve(self, order: dict[str, Any], listen: Listen) -> None:
        assert self._process is not None
        self._process.send(order)
        while True:
            report = await self._receive(self._process, _TURN_SECONDS)
            listen(report)
            if report["report"] in ("done", "failed"):
                return

    def kill(self) -> None:
        if self._process is not None and self._process.running:
            self.killed = True
            self._process.kill()

    async def stop(self, listen: Listen | None) -> None:
        if self._process is None:
            return
        self._process.close()
        try:
            if listen is not None:
                listen(await self._receive(self._process, _STOP_SECONDS))
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._reports.get()  # it has closed its store
                self._process.wait(_STOP_SECONDS)
        except (TimeoutError, WorkerDied):
            log.warning("worker %d did not end and was killed", self._process.pid)
        finally:
            self._process.end()

    async def _receive(self, process: WorkerProcess, seconds: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                report = await self._reports.get()
        except TimeoutError as error:
            self.kill()
            raise WorkerDied(f"worker {process.pid} was silent for {seconds:g} s") from error
        if report is None:
            raise WorkerDied(f"worker {process.pid} ended with {process.wait(_STOP_SECONDS)}")
        return report


class ThreadWorker(Worker):
    """A thread on the store of this process; it cannot be killed."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "replay-worker")

    async def start(self) -> None:
        pass  # the store is already open

    async def serve(self, order: dict[str, Any], listen: Listen) -> None:
        loop = asyncio.get_running_loop()

        def report(fields: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(listen, fields)

        await loop.run_in_executor(self._thread, serve_turn, self._store, order, report)

    def kill(self) -> None:
        raise StateError("a thread cannot be killed")

    async def stop(self, listen: Listen | None) -> None:
        if listen is not None:
            listen({"report": "bye", "hot": hot_figures(self._store)})
        self._thread.shutdown(wait=False)
