"""Turns that stream, those who follow and stop them, and the checks of both. Law: a chunk names its turn.

An attempt is one turn of a client. Each of its chunks is "writer attempt number", and so is the field that it commits,
so that the end of the run shows of each part that a follower was shown whether it was the truth.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed_state.errors import StateError, Stopped, Unavailable
from distributed_state.results import (
    Abandoned,
    Chunk,
    Ended,
    Failed,
    OutputPart,
    Restarted,
    StopRequested,
    StopResult,
    Truncated,
)
from tests.simulation.checks import Befell, Broken, Found
from tests.simulation.plan import Operation
from tests.simulation.workload import Caller, Outcome

ANSWER = "answer"  # the field that an attempt commits
_LARGE = "." * 9000  # makes some outputs longer than is kept
_PLACE = 4.0  # seconds for which a waiter that does not ask again keeps its place in the queue of a lock
_LATE = 3.0  # seconds after which nothing of an ended call arrives any longer
CHECKS = (
    "in order", "another's hidden", "resumed", "restarted", "truncated", "ended", "ended whole",
    "ended without a write", "failed", "abandoned", "fenced", "stop shown", "stopped", "kept though stopped",
    "finished", "nothing ran", "not stopped", "ended at last",
)  # fmt: skip
"""The cases that a check can meet: see `Live.met`."""


HANDLER = "h"  # of all sessions, if there are workers


def wake_of(operation: Operation) -> str:
    """The name of the wake that an operation sets."""
    return "xy"[operation.draw % 2]


class Given(StateError):
    """A turn that wrote nothing on purpose: it raised, or it had nothing to write."""


@dataclass(eq=False, slots=True)
class Attempt:
    """One turn of a client. `entered`: when it had its lease; `left`: when its `async with` was over; inf: never."""

    outcome: Outcome
    number: int
    record: str
    request: str | None
    manner: str
    seizes: bool  # the lease from another request
    asked: float
    token: int = 0
    entered: float = math.inf
    left: float = math.inf
    streamed: list[float] = field(default_factory=list)  # when each chunk was
    large: bool = False
    stopped: float = math.inf

    @property
    def name(self) -> str:
        """What its chunks begin with, and what it commits."""
        return f"{self.outcome.writer} {self.number}"

    def overlaps(self, began: float, ended: float) -> bool:
        """Whether it had its lease at some time between these."""
        return self.entered <= ended and began <= self.left

    def __str__(self) -> str:
        return (
            f"attempt {self.name} of {self.record} with token {self.token} on {self.outcome.replica} at "
            f"{self.entered:.3f}-{self.left:.3f}, {len(self.streamed)} chunks, {self.manner}"
        )


@dataclass(eq=False, slots=True)
class Follower:
    """What a client was shown. `stretches`: where it went on, with the number of parts that it had."""

    name: str
    record: str
    request: str | None
    parts: list[tuple[float, OutputPart]] = field(default_factory=list)
    stretches: list[tuple[str, int]] = field(default_factory=list)

    @property
    def position(self) -> str | None:
        """Where to go on."""
        return self.parts[-1][1].position if self.parts else None

    @property
    def over(self) -> bool:
        """Whether its request has ended."""
        return self.request is not None and bool(self.parts) and isinstance(self.parts[-1][1], Ended)

    def __str__(self) -> str:
        return f"{self.name}, which follows {self.request or 'any turn'} of {self.record},"


@dataclass(eq=False, slots=True)
class Stop:
    """A call of `session.stop`."""

    outcome: Outcome
    record: str
    request: str | None
    wait: float
    result: StopResult | None = None


class Live:
    """All turns of a run that stream, and those who follow and stop them. `met`: how often a check had a case."""

    def __init__(self) -> None:
        self.works = False  # whether workers serve what is posted
        self.attempts: list[Attempt] = []
        self.followers: dict[str, Follower] = {}
        self.stops: list[Stop] = []
        self.posted: list[Follower] = []  # of inputs
        self.met: Counter[str] = Counter()

    def request(self, record: str, chance: random.Random) -> str | None:
        """The request to follow or to stop: one of the last ones, or None."""
        known = [each.request for each in self.attempts if each.record == record and each.request is not None]
        return chance.choice(known[-3:]) if known and chance.random() < 0.65 else None

    def follower(self, name: str, record: str, chance: random.Random) -> Follower:
        """The follower of this name."""
        if name not in self.followers:
            self.followers[name] = Follower(name, record, self.request(record, chance))
        return self.followers[name]

    def last(self) -> list[Follower]:
        """Followers of all requests, for the end of the run."""
        wanted = {(each.record, each.request) for each in self.attempts if each.request is not None}
        return [Follower(f"last of {request}", record, request) for record, request in sorted(wanted)]

    def left_alone(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes of operations whose lease no turn of another request took."""
        taken = {
            each.outcome.writer
            for each in self.attempts
            for other in self.attempts
            if other.seizes and other.record == each.record and each.overlaps(other.asked, other.left)
        }
        taken |= {
            each.writer
            for each in outcomes
            for other in outcomes
            if other.seizes and other.records == each.records and other.began < each.ended and each.began < other.ended
        }
        return [each for each in outcomes if each.writer not in taken]

    def judge(self, found: Sequence[Found], befell: Befell, last: Iterable[Follower]) -> None:
        """Compare what everybody was shown with the histories. Raises Broken."""
        for each in found:
            _Judging(self, each, befell).judge(last)


class LiveCaller(Caller):
    """Does the operations of live turns."""

    live: Live
    stretch = 0  # how often the same operation was called before

    async def _live(self) -> None:
        await self._stream(self.value)

    async def _live_alone(self) -> None:
        await self._stream(None)

    async def _stream(self, request: str | None) -> None:
        chance, world = random.Random(f"{self.operation.draw} {self.stretch}"), self.world
        manner = chance.choice(("write", "write", "write", "keep", "keep", "raise", "nothing"))
        if manner == "nothing" and request is not None:
            manner = "write"  # its answer is a change, too
        number = len(self.live.attempts)
        seizes = chance.random() < 0.15
        attempt = Attempt(self.outcome, number, self.session.id, request, manner, seizes, world.now)
        self.live.attempts.append(attempt)
        busy = "interrupt" if seizes else "wait"
        try:
            async with self.session.turn(request_id=request, ttl=self.ttl, wait=2.0, busy=busy) as turn:
                self.outcome.repeated = turn.repeated
                if turn.repeated:
                    return
                attempt.token, attempt.entered = turn.token, world.now
                try:
                    if manner == "keep":
                        async with turn.stoppable():
                            await self._chunks(turn, attempt, chance)
                    else:
                        await self._chunks(turn, attempt, chance)
                except Stopped:
                    attempt.stopped = world.now
                if manner == "raise":
                    raise Given("raises")
                if manner != "nothing":
                    turn.outcome = turn[ANSWER] = attempt.name
        except Stopped:
            attempt.stopped = min(attempt.stopped, world.now)
            raise
        finally:
            attempt.left = world.now
        if manner == "nothing":
            raise Given("has nothing to write")

    async def _chunks(self, turn: Any, attempt: Attempt, chance: random.Random) -> None:
        attempt.large = chance.random() < 0.1
        await self.world.sleep(chance.choice((0.0, 0.0, 0.05, 0.3)))
        for number in range(1, chance.randint(1, 12)):
            attempt.streamed.append(self.world.now)  # earlier than the call: that may be cancelled
            await turn.stream(f"{attempt.name} {number} {_LARGE if attempt.large else ''}")
            if chance.random() < 0.2:
                await turn.flush()
            await self.world.sleep(chance.choice((0.0, 0.0, 0.005, 0.02, 0.05, 0.2)))

    async def _follow(self) -> None:
        chance = random.Random(f"{self.operation.draw} {self.stretch}")
        follower = self.live.follower(self.value, self.session.id, chance)
        follower.stretches.append((self.outcome.replica, len(follower.parts)))
        slow = chance.random() < 0.2
        async with self.session.output(follower.request, after=follower.position) as output:
            for _ in range(chance.randint(1, 30)):
                try:
                    part = await output.next(chance.choice((0.3, 1.5, 3.0)))
                except Unavailable:
                    if chance.random() < 0.5:
                        raise
                    continue
                if part is None:
                    return
                follower.parts.append((self.world.now, part))
                if slow:
                    await self.world.sleep(chance.uniform(0.0, 0.2))

    async def _post(self) -> None:
        """Post an input, and now and then follow the turn that serves it."""
        handler = HANDLER if self.live.works else None
        await self.session.post({"role": "user", "content": self.value}, request_id=self.value, handler=handler)
        if self.chance.random() < 0.5:
            follower = Follower(self.value, self.session.id, self.value)
            self.live.posted.append(follower)
            async for part in self.session.output(self.value, wait=2.0):
                follower.parts.append((self.world.now, part))

    async def _wake(self) -> None:
        name = wake_of(self.outcome.operation)
        await self.session.wake(self.value, after=self.chance.uniform(0.0, 2.0), name=name, handler=HANDLER)

    async def _stop(self) -> None:
        chance = self.chance
        request = self.live.request(self.session.id, chance)
        stop = Stop(self.outcome, self.session.id, request, chance.choice((0.0, 0.5, 3.0)))
        self.live.stops.append(stop)
        stop.result = await self.session.stop(request, reason=self.value, wait=stop.wait)


async def follow_to_the_end(store: Any, follower: Follower, seconds: float) -> None:
    """Follow a request once everything is over."""
    async for part in store.session(follower.record).output(follower.request, wait=seconds):
        follower.parts.append((math.inf, part))


class _Judging:
    """The checks of one record."""

    def __init__(self, live: Live, found: Found, befell: Befell) -> None:
        self.live, self.found, self.befell, self.met = live, found, befell, live.met
        self.attempts = [each for each in live.attempts if each.record == found.id]
        self.held = sorted((each for each in self.attempts if each.token), key=lambda each: each.token)
        self.by_token = {each.token: each for each in self.held}
        self.by_name = {each.name: each for each in self.attempts}
        self.commits: dict[str, list[int]] = {}  # the versions, by attempt: in the main line and in branches
        self.answers: dict[str, str] = {}  # the attempt that answered a request
        for line in found.lines():
            for change in line.changes:
                name = change.set.get(ANSWER)
                if change.kind == "turn" and name in self.by_name:
                    self.commits.setdefault(name, []).append(change.version)
                    self.answers.setdefault(change.actor, name)
        self.large = any(each.large for each in self.attempts)

    def judge(self, last: Iterable[Follower]) -> None:
        for follower in self.live.followers.values():
            if follower.record == self.found.id:
                self._judge_follower(follower)
        for follower in last:
            if follower.record == self.found.id:
                self._judge_follower(follower)
                self._judge_last(follower)
        for stop in self.live.stops:
            if stop.record == self.found.id:
                self._judge_stop(stop)
        for attempt in self.held:
            if attempt.stopped < math.inf:
                self._judge_stopped(attempt)

    def _may_be_lost(self, began: float, ended: float) -> bool:
        """Whether a server lost what it wrote then."""
        return any(since <= ended + _LATE and began <= until for since, until in self.befell.losses)

    def _is_unsure(self, attempt: Attempt) -> bool:
        return self._may_be_lost(attempt.entered, attempt.left)

    # Followers

    def _judge_follower(self, follower: Follower) -> None:
        _Watching(self, follower).judge()
        others = any(
            each.request != follower.request and each.streamed and each.overlaps(time, time)
            for time, _ in follower.parts
            for each in self.held
        )
        self.met["another's hidden"] += follower.request is not None and others
        self.met["resumed"] += len({replica for replica, at in follower.stretches if at < len(follower.parts)}) > 1

    def _judge_last(self, follower: Follower) -> None:
        answered = self.answers.get(follower.request or "")
        final = follower.parts[-1][1] if follower.parts else None
        in_main = answered is not None and any(each.set.get(ANSWER) == answered for each in self.found.main.changes)
        if in_main and not isinstance(final, Ended):
            raise Broken("output", f"{follower} was shown {final} at last, and {answered} answered it")
        if isinstance(final, Chunk | Restarted):
            raise Broken("output", f"{follower} was not shown an end after {final}")
        self.met["ended at last"] += final is not None

    # Stops

    def _judge_stop(self, stop: Stop) -> None:
        result, outcome = stop.result, stop.outcome
        if result is None:
            return
        about = f"{outcome} of {stop.request or 'any turn'} got {result}"
        reached = [
            each for each in self.attempts
            if stop.request in (None, each.request) and each.asked <= outcome.ended and outcome.began <= each.left
        ]  # fmt: skip
        unsure = any(self._is_unsure(each) for each in reached) or self._may_be_lost(outcome.began, outcome.ended)
        versions = [
            version for name, all in self.commits.items() for version in all
            if stop.request in (None, self.by_name[name].request)
        ]  # fmt: skip
        if result.version is not None and result.version not in versions and not unsure:
            raise Broken("stop", f"{about}, and its history has {versions}")
        if unsure:
            return
        match result.state:
            case "stopped":
                places = [each for each in self.attempts if outcome.began <= each.left + _PLACE]
                if not reached and stop.request not in {each.request for each in places if each.request}:
                    raise Broken("stop", f"{about}, and nothing ran")
                if reached and result.version is None and all(each.name in self.commits for each in reached):
                    raise Broken("stop", f"{about}, and {reached[0]} was committed as {self.commits[reached[0].name]}")
                self.met["kept though stopped" if result.version is not None else "stopped"] += 1
            case "finished":
                self.met["finished"] += 1
            case "nothing ran":
                ran = [each for each in reached if each.entered < outcome.began and outcome.ended < each.left]
                if self._holds(ran, outcome):
                    raise Broken("stop", f"{about}, and {ran[0]} ran")
                done = [
                    each for each in self.attempts
                    if each.request == stop.request is not None and each.left < outcome.began
                    and each.name in self.commits and not self._is_unsure(each)
                ]  # fmt: skip
                if done:
                    raise Broken("stop", f"{about}, and it was answered by {done[0]}")
                self.met["nothing ran"] += 1
            case "stopping":
                if outcome.ended - outcome.began < stop.wait - 0.01:
                    raise Broken("stop", f"{about} after {outcome.ended - outcome.began:.3f} of {stop.wait} s")

    def _holds(self, ran: Sequence[Attempt], outcome: Outcome) -> bool:
        """Whether one of these had its lease all the time: no fault could take it."""
        faults = any(harm.since <= outcome.ended for harm in self.befell.harms)
        later = max((each.token for each in self.held if each.entered <= outcome.ended), default=0)
        return any(each.token == later for each in ran) and not faults

    def _judge_stopped(self, attempt: Attempt) -> None:
        """It was asked to stop by somebody who meant it.

        A primary that was replaced may carry out a stop late, after the repeated call was answered by its successor.
        """
        asked = [
            stop for stop in self.live.stops
            if stop.record == attempt.record and stop.request in (None, attempt.request)
            and stop.outcome.began <= attempt.stopped
            and (stop.result is None or attempt.entered <= stop.outcome.ended)
        ]  # fmt: skip
        if not asked and not self._is_unsure(attempt):
            raise Broken("stop", f"{attempt} was stopped at {attempt.stopped:.3f}, and nobody asked for it")
        self.met["not stopped"] += len(self.held) > 1


class _Watching:
    """The check of one follower: what it was shown, part by part."""

    def __init__(self, judging: _Judging, follower: Follower) -> None:
        self.judging, self.follower, self.met = judging, follower, judging.met
        self.token = self.number = 0  # of the last chunk, or of a mark after it
        self.shown = self.whole = False  # chunks of this attempt; all of them, from the first on
        self.is_open = False  # chunks were shown, and no end of them yet
        self.over = False
        self.is_marked = False  # the last part is Truncated

    def judge(self) -> None:
        for at, (time, part) in enumerate(self.follower.parts):
            self._judge(at, time, part)

    def _broken(self, part: OutputPart, why: str) -> Broken:
        text = str(part)[:200]
        return Broken("output", f"{self.follower} was shown {text} after {self.token}-{self.number}: {why}")

    def _judge(self, at: int, time: float, part: OutputPart) -> None:
        token, number = map(int, part.position.split("-"))
        if self.over and not isinstance(part, Ended):
            raise self._broken(part, "its request had ended")
        match part:
            case Chunk():
                self._chunk(time, part, token, number)
            case Truncated():
                self._truncated(at, time, part, token, number)
            case StopRequested():
                self._stop(time, part)
            case Restarted():
                self._at(part, token, number)
                self.is_open = self.shown = False
                self.met["restarted"] += 1
            case Failed() | Abandoned():
                self._without_commit(part, token)
                self.is_open = False
                self.met["failed" if isinstance(part, Failed) else "abandoned"] += 1
            case Ended():
                self._ended(time, part, token)
        self.is_marked = isinstance(part, Truncated)

    def _at(self, part: OutputPart, token: int, number: int) -> None:
        """Another attempt begins."""
        if token < self.token:
            raise self._broken(part, "an earlier holder's")
        if token > self.token:
            self.token, self.number, self.whole = token, number, number == 0

    def _chunk(self, time: float, part: Chunk, token: int, number: int) -> None:
        writer, attempt_number, said, _ = part.data.split(" ")
        attempt = self.judging.by_name.get(f"{writer} {attempt_number}")
        if attempt is None or attempt.token not in (0, token):
            raise self._broken(part, f"which is of {attempt}")
        if int(said) != number:
            raise self._broken(part, "its position is of another chunk")
        if self.follower.request not in (None, attempt.request):
            raise self._broken(part, f"another request's, {attempt.request}")
        if token != self.token:
            if self.is_open:
                raise self._broken(part, "the earlier attempt had no end, and there was no Restarted")
            self._at(part, token, 0)
        if number != self.number + 1:
            raise self._broken(part, "it does not follow")
        self.number, self.shown, self.is_open = number, True, True
        self.met["in order"] += number > 1
        self._fenced(part, attempt)

    def _fenced(self, part: Chunk, attempt: Attempt) -> None:
        later = [each for each in self.judging.held if each.token > attempt.token]
        if not later:
            return
        streamed, since = attempt.streamed[self.number - 1], min(each.entered for each in later)
        if streamed > since and not self.judging._may_be_lost(since, streamed):
            raise self._broken(part, f"streamed at {streamed:.3f}, and the next holder had the lock since {since:.3f}")
        self.met["fenced"] += any(time > since for time in attempt.streamed)

    def _truncated(self, at: int, time: float, part: Truncated, token: int, number: int) -> None:
        if token > self.token:
            if self.is_open:  # nothing is left by which to say how the earlier one ended
                raise self._broken(part, "the earlier attempt had no end")
            self._at(part, token, 0)
        elif number <= self.number:
            if not self._ends_unseen(at):
                raise self._broken(part, "nothing is missing")
            self.is_open = False
        harmed = any(harm.since <= time for harm in self.judging.befell.harms)
        if number and not harmed and not self.judging.large:
            raise self._broken(part, "nothing could be lost")
        self.number, self.whole = max(number, self.number), False
        self.met["truncated"] += 1

    def _ends_unseen(self, at: int) -> bool:
        """Whether the stream may not show how the attempt ended: then the record says it, or nobody does."""
        stretches = [began for _, began in self.follower.stretches]
        following = [part for _, part in self.follower.parts[at + 1 : at + 2]]
        if not following or at + 1 in stretches or isinstance(following[0], Ended):
            return True
        harmed = bool(self.judging.befell.harms) or self.judging.large
        return self.follower.request is None and (at in stretches or harmed)

    def _stop(self, time: float, part: StopRequested) -> None:
        asked = [
            stop for stop in self.judging.live.stops
            if stop.outcome.writer == part.reason and self.follower.request in (None, stop.request, *[
                each.request for each in self.judging.held if stop.request is None
            ])
        ]  # fmt: skip
        if not asked or asked[0].outcome.began > time:
            raise self._broken(part, "nobody asked for it")
        self.met["stop shown"] += 1

    def _without_commit(self, part: OutputPart, token: int) -> None:
        attempt = self.judging.by_token.get(token)
        if attempt is None or self.judging._is_unsure(attempt):
            return
        if attempt.name in self.judging.commits:
            raise self._broken(part, f"{attempt} is in the history as {self.judging.commits[attempt.name]}")

    def _ended(self, time: float, part: Ended, token: int) -> None:
        judging, request = self.judging, self.follower.request
        attempt = judging.by_token.get(token)
        if request is not None:
            self.over = True
        asked = request if request is not None or attempt is None or not self.is_marked else attempt.request
        answered = judging.answers.get(asked) if asked is not None else attempt.name if attempt else None
        commits = judging.commits.get(answered or "", [])
        answering = judging.by_name.get(answered or "")
        was_open, self.is_open = self.is_open, False
        if part.version is None:
            if attempt is not None:
                self._without_commit(part, token)
                self.met["ended without a write"] += 1
            return
        unsure = [each for each in judging.held if request in (None, each.request) and judging._is_unsure(each)]
        if part.version not in commits:
            if not unsure:
                raise self._broken(part, f"the history has {commits} of {answered}")
            return
        self.met["ended"] += 1
        harmed = judging.large or any(harm.since <= time for harm in judging.befell.harms)
        if request is not None and not self.shown and not harmed and answering is not None and answering.streamed:
            raise self._broken(part, f"nothing was shown of {answering}")
        if part.outcome not in (answered, None) and not unsure:
            raise self._broken(part, f"{answered} answered it")
        if was_open and self.shown and self.whole and not self.is_marked and answering is not None:
            if self.token != answering.token:
                raise self._broken(part, f"{answering} answered it, and what was shown is of another attempt")
            if self.number < len(answering.streamed):
                raise self._broken(part, f"{answering} streamed more")
            self.met["ended whole"] += 1
