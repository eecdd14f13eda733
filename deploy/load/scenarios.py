"""What the requests are. Law: each is repeated under its own id until it is acknowledged or given up.

A conversation is led in order: its next turn is sent when the last one was acknowledged. So a request that is due goes
to a conversation that waits for none, and if there is none, to a new one: the rate does not depend on the answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import quote

from deploy.load.client import Client
from deploy.load.measures import Recorder
from deploy.load.verifying import Expected, Source, messages_of
from deploy.load.workers.handlers import ANSWER

_PAUSE = 0.05
_LONGEST_PAUSE = 0.5
INBOX = "inbox"
_INPUTS = 20  # of one conversation
_LATER = (423, 429, 500, 502, 503, 504)
_LOT = 1_000  # messages of a process in one conversation: a read shows 10,000 of all
# 2 KB as JSON, in fields of 40 to 330 letters: one length would meet a size class of the allocator well or badly.
FIELDS = {f"field-{n}": "x" * (40 + 32 * n) for n in range(10)}


class Refused(Exception):
    """A worker said no, and would say so again."""


@dataclass(slots=True)
class Talk:
    """A conversation that is led."""

    id: str
    source: int
    turn: int = 0


@dataclass
class Caller:
    """Sends requests, repeats them up to `attempts` times (None: any number), and keeps what was acknowledged."""

    client: Client
    source: Source
    recorder: Recorder
    run: str
    process: int
    retry_for: float
    attempts: int | None = None
    expected: dict[str, Expected] = field(default_factory=dict)

    def of(self, id: str) -> Expected:
        """What is known of a conversation."""
        return self.expected.setdefault(id, Expected(id))

    async def until_answered(
        self, due: float, method: str, path: str, body: Any = None, *, fine: tuple[int, ...]
    ) -> Any:
        """Repeat until the status is a fine one. Raises Refused, or TimeoutError once it is given up."""
        deadline = max(due, time.monotonic()) + self.retry_for
        pause = _PAUSE
        for attempt in count(1):
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                    status, answer = await self.client.request(method, path, body)
                if status in fine:
                    return answer
                reason = f"{status} {answer.get('error', '') if isinstance(answer, dict) else ''}".strip()
                if status not in _LATER:
                    raise Refused(reason)
            except (OSError, ValueError) as error:  # a timeout is an OSError
                reason = type(error).__name__
            if attempt == self.attempts or time.monotonic() + pause > deadline:
                raise TimeoutError(reason)
            self.recorder.retry(reason)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def begin(self, id: str | None, due: float, fields: dict[str, Any] | None = None) -> str:
        """Begin a conversation and return its id, which the worker chooses if none is given.

        If one of ours exists already, an earlier attempt began it: ids are never used twice.
        """
        body: dict[str, Any] = {"fields": fields or {}} | ({"id": id} if id else {})
        answer = await self.until_answered(due, "POST", "/v1/conversations", body, fine=(201, 409) if id else (201,))
        begun = id or str(answer["id"])
        self.of(begun).acks.append((1, "n"))
        return begun

    async def turn(self, id: str, turn: str, due: float) -> None:
        """One turn, of which is noted what became of it."""
        body = {
            "request_id": f"{turn}/{self.process}",
            "messages": messages_of(self.source, turn),
            "set": {"turn": turn},
        }
        try:
            answer = await self.until_answered(due, "POST", f"/v1/conversations/{quote(id)}/turns", body, fine=(200,))
        except BaseException:
            self.of(id).uncertain.append(turn)
            raise
        self.of(id).acks.append((answer["version"], turn))

    async def input(self, id: str, text: str, due: float) -> None:
        """An input for a handler, until a turn that answers it is committed; what became of it is noted."""
        place = f"/v1/conversations/{quote(id)}"
        body = {"message": {"role": "user", "content": text}, "handler": ANSWER, "request_id": text}
        try:
            await self.until_answered(due, "POST", f"{place}/inbox", body, fine=(202,))
            async with asyncio.timeout(self.retry_for):
                ended = await self.client.ended(f"{place}/output?request={quote(text)}")
        except BaseException:
            self.of(id).uncertain.append(f"i:{text}")
            raise
        self.of(id).acks.append((ended["version"], f"i:{text}"))


class Scenario:
    """What is done when a request is due. `burst` is as of `arrivals`."""

    burst = 0.0

    def __init__(self, caller: Caller, phase: int) -> None:
        self.caller = caller
        self.name = f"{caller.run}-{phase}-{caller.process}"
        self.shared = f"{caller.run}-{phase}"

    async def prepare(self) -> None:
        """What is to be there before the first request is due."""

    async def request(self, due: float) -> None:
        """One request. Raises what the caller raises."""
        raise NotImplementedError

    async def finish(self) -> list[str]:
        """What is wrong with what was seen during the phase."""
        return []


class Chat(Scenario):
    """Turns of recorded conversations, each begun anew, many at a time."""

    def __init__(self, caller: Caller, phase: int) -> None:
        super().__init__(caller, phase)
        self._waiting: deque[Talk] = deque()
        self._begun = 0

    async def request(self, due: float) -> None:
        talk = self._waiting.popleft() if self._waiting else await self._new(due)
        await self.caller.turn(talk.id, f"c:{talk.source}:{talk.turn}", due)
        talk.turn += 1
        if talk.turn < len(self.caller.source[talk.source]):
            self._waiting.append(talk)

    async def _new(self, due: float) -> Talk:
        self._begun += 1
        source = (self._begun * 7 + self.caller.process) % len(self.caller.source)
        return Talk(await self.caller.begin(None, due), source)


class Reads(Scenario):
    """The same few conversations read again and again, as a user interface does."""

    async def prepare(self) -> None:
        now = time.monotonic()
        self._ids = [f"{self.shared}-read-{self.caller.process}-{n}" for n in range(20)]
        self._at = 0
        for at, id in enumerate(self._ids):
            await self.caller.begin(id, now, FIELDS)
            await self.caller.turn(id, f"c:{at % len(self.caller.source)}:0", now)

    async def request(self, due: float) -> None:
        self._at += 1
        id = self._ids[self._at % len(self._ids)]
        await self.caller.until_answered(due, "GET", f"/v1/conversations/{quote(id)}?last=20", fine=(200,))


class Contended(Scenario):
    """All processes write to one conversation."""

    async def prepare(self) -> None:
        self._sent = self._lot = 0
        await self.caller.begin(self._id(), time.monotonic())

    def _id(self) -> str:
        return f"{self.shared}-contended-{self._lot}"

    async def request(self, due: float) -> None:
        self._sent += 1
        if self._sent % _LOT == 0:
            self._lot += 1
            await self.caller.begin(self._id(), due)
        await self.caller.turn(self._id(), f"t:{self.name} {self._sent}", due)


class Burst(Scenario):
    """New sessions of 2 KB, all those of a second at once."""

    burst = 1.0

    def __init__(self, caller: Caller, phase: int) -> None:
        super().__init__(caller, phase)
        self._begun = 0

    async def request(self, due: float) -> None:
        self._begun += 1
        await self.caller.begin(f"{self.name}-new-{self._begun}", due, FIELDS)


class Long(Scenario):
    """Turns of conversations that have thousands of messages, each followed by a read of the last twenty."""

    async def prepare(self) -> None:
        self._sent = 0
        self._ids = [f"{self.name}-long-{number}" for number in range(4)]
        for id in self._ids:
            now = time.monotonic()
            await self.caller.begin(id, now)
            for part in range(4):
                await self.caller.turn(id, f"f:500:{part}", now)

    async def request(self, due: float) -> None:
        self._sent += 1
        id = self._ids[self._sent % len(self._ids)]
        await self.caller.turn(id, f"t:{self.name} {self._sent}", due)
        await self.caller.until_answered(due, "GET", f"/v1/conversations/{quote(id)}?last=20", fine=(200,))


class Events(Scenario):
    """New sessions, of which every subscriber is told; latency is until the last subscriber of this process knows."""

    subscribers = 10

    async def prepare(self) -> None:
        self._begun = 0
        self._seen = [dict[str, int]() for _ in range(self.subscribers)]
        self._told: dict[str, asyncio.Event] = {}
        standing = [asyncio.Event() for _ in self._seen]
        self._listening = [
            asyncio.create_task(self._listen(seen, stands)) for seen, stands in zip(self._seen, standing, strict=True)
        ]
        async with asyncio.timeout(30):
            for stands in standing:
                await stands.wait()

    async def _listen(self, seen: dict[str, int], stands: asyncio.Event) -> None:
        async for event in self.caller.client.events("/v1/events?types=conversation.created"):
            stands.set()
            id = event["subject"].removeprefix("session:") if event else ""
            if id.startswith(self.name):
                seen[id] = seen.get(id, 0) + 1
                if id in self._told and all(id in each for each in self._seen):
                    self._told[id].set()

    async def request(self, due: float) -> None:
        self._begun += 1
        id = f"{self.name}-event-{self._begun}"
        told = self._told[id] = asyncio.Event()
        await self.caller.begin(id, due)
        async with asyncio.timeout(self.caller.retry_for):
            await told.wait()
        del self._told[id]

    async def finish(self) -> list[str]:
        for task in self._listening:
            task.cancel()
        made = [id for id in self.caller.expected if id.startswith(f"{self.name}-event-")]
        return [
            f"{id}: a subscriber saw it {seen.get(id, 0)} times"
            for seen in self._seen
            for id in made
            if seen.get(id, 0) != 1
        ]


class Inbox(Scenario):
    """Inputs that workers with a handler answer; latency is until the answer is committed and its follower knows."""

    def __init__(self, caller: Caller, phase: int) -> None:
        super().__init__(caller, phase)
        self._waiting: deque[Talk] = deque()
        self._begun = 0

    async def request(self, due: float) -> None:
        if self._waiting:
            talk = self._waiting.popleft()
        else:
            self._begun += 1
            talk = Talk(await self.caller.begin(f"{self.name}-inbox-{self._begun}", due), 0)
        talk.turn += 1
        await self.caller.input(talk.id, f"{talk.id} {talk.turn}", due)
        if talk.turn < _INPUTS:
            self._waiting.append(talk)


SCENARIOS: dict[str, Callable[[Caller, int], Scenario]] = {
    "chat": Chat, "reads": Reads, "contended": Contended, "burst": Burst, "long": Long, "events": Events,
    INBOX: Inbox,
}  # fmt: skip


async def read_back(client: Client, id: str) -> list[dict[str, Any]] | None:
    """All messages that a conversation has, None if there is none; nothing hot."""
    for attempt in range(40):
        try:
            status, answer = await client.request("GET", f"/v1/conversations/{quote(id)}?last=10000&fresh=true")
        except (OSError, json.JSONDecodeError):
            status = 503
            answer = None
        if status == 200:
            found: list[dict[str, Any]] = answer["messages"]
            return found
        if status in (404, 410):
            return None
        await asyncio.sleep(0.05 * attempt)
    raise ConnectionError(f"{id} cannot be read back: {status} {answer}")
