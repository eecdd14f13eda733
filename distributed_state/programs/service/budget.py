"""Bytes that a worker holds for its clients. Law: they are counted before they are there, and given back in any case.

There is one budget. Bodies count as they arrive; a slow one makes room (`connections.py`). A request waits for what its
body takes once it is read, and for what its answer takes: that is known of the last one of its kind, and guessed
otherwise. It gives it back when the socket has taken the answer. A party leaves a part free for others, as with places
(`Shares`), and the request that waits longest is not overtaken for ever. An answer larger than the whole budget goes
alone. Streams of events count what they buffer, and buffer little where they buffer much together.

What is large goes back to the system when it is free. glibc learns from each large block that is freed to keep the next
ones, and has an arena for each thread: after bodies and answers of a megabyte each, a worker kept 150 MB more than it
used. What is small it gives back from the end of its heap only, where some byte is always in use: after 6,000 half
heads it kept 45 MB more.

Design: section 24.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from starlette.exceptions import HTTPException

_SMALL = 16 * 1024  # a request this small does not wait: even in every place they hold a few megabytes together
_PAGE = 128 * 1024  # bytes that are read from which on more may come
_SIZES = 10_000  # kinds of answers whose size is remembered
_FADES = 0.9  # of what was known, with each smaller one
_LOADING = 0.25  # seconds after which a request of unknown size waits for a server, and holds nothing yet
_PRESSING = 2.0  # seconds after which a waiting request disconnects slow readers of its own party
_OVERTAKEN = 2.0  # seconds after which no other request goes first
_A_STREAM = 256 * 1024  # bytes that a stream of events buffers at most
_TRIM, _MAP, _ARENAS = -1, -3, -8  # of mallopt(3)
_LARGE_BLOCK = 256 * 1024


class Budget:
    """A number of bytes: at most three quarters for answers, at least a quarter for bodies."""

    def __init__(self, most: int, patience: float = 10.0) -> None:
        self.most = most
        self.arrived = 0
        """Bytes of bodies, of what is made of them, and of answers that nobody took anything for."""
        self.buffered = 0
        """Bytes that streams of events have not sent yet."""
        self._patience = patience
        self._parties: Counter[str] = Counter()  # what each has taken, but for what is small
        self._large = self._small = 0
        self._all: dict[Taken, None] = {}  # the oldest first
        self._waiting: list[_Waiting] = []

    @property
    def taken(self) -> int:
        """Bytes that requests have taken."""
        return self._large + self._small

    @property
    def held(self) -> int:
        """All bytes that are counted now."""
        return self.arrived + self.taken + self.buffered

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    # Answers

    async def take(self, party: str, size: int) -> Taken:
        """Take this many bytes once they are free. Raises HTTPException 503 if that takes too long."""
        loop = asyncio.get_running_loop()
        if self.waits(party, size):
            waiting = _Waiting(party, size, loop.time(), loop.create_future())
            self._waiting.append(waiting)
            try:
                await self._granted(waiting)
            except BaseException:
                if waiting.granted.done() and not waiting.granted.cancelled():
                    self._count(party, -size)  # it was granted at the moment when it gave up
                raise
            finally:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)
                self._grant()
        else:
            self._count(party, size)
        taken = Taken(self, party, size)
        self._all[taken] = None
        return taken

    async def _granted(self, waiting: _Waiting) -> None:
        loop = asyncio.get_running_loop()
        until = waiting.since + self._patience
        while (left := until - loop.time()) > 0:
            await asyncio.wait((waiting.granted,), timeout=min(left, _PRESSING))
            if waiting.granted.done():
                return
            self._press(waiting)
            self._grant()
        if not waiting.granted.done():
            detail = f"this worker holds as many bytes of requests and answers as it may, {self.most}"
            raise HTTPException(503, detail, {"Retry-After": "1"})

    def change(self, taken: Taken, size: int) -> None:
        """Let it hold this many bytes."""
        self._count(taken.party, -taken.size)
        self._count(taken.party, size)
        less = size < taken.size
        taken.size = size
        if less:
            self._grant()

    async def exchange(self, taken: Taken, size: int) -> None:
        """Let it hold this many bytes once they are free. Raises HTTPException 503 if that takes too long."""
        granted = await self.take(taken.party, size)
        self._all.pop(granted)
        self._count(granted.party, -granted.size)
        taken.become(size)

    def end(self, taken: Taken) -> None:
        """Let it hold nothing."""
        self._all.pop(taken, None)
        self._count(taken.party, -taken.size)
        self._grant()

    def _count(self, party: str, size: int) -> None:
        if abs(size) <= _SMALL:
            self._small += size
            return
        self._large += size
        self._parties[party] += size
        if not self._parties[party]:
            del self._parties[party]

    def waits(self, party: str, size: int) -> bool:
        """Whether a request that takes this many bytes would wait."""
        now = asyncio.get_running_loop().time()
        return size > _SMALL and (self._comes_after(party, now) or not self._fits(party, size))

    def _comes_after(self, party: str, now: float) -> bool:
        """Whether somebody waits who goes first: one of its party, or one who has waited long."""
        return any(each.party == party or now - each.since > _OVERTAKEN for each in self._waiting)

    def _fits(self, party: str, size: int) -> bool:
        if not self._large:
            return True  # it goes alone, however large it is
        own = self._parties[party]
        free = self.most - self.taken - min(self.arrived + self.buffered, self.most // 2)
        # The rest is for bodies. A party leaves half as much free as it has: one alone gets two thirds.
        free = min(free, self.most * 3 // 4 - self.taken)
        return size <= free and (not own or own + size <= 2 * (free - size))

    def _grant(self) -> None:
        """Let those in that fit, in the order in which they came; of one party none goes before another."""
        if not self._waiting:
            return
        now = asyncio.get_running_loop().time()
        passed = set[str]()
        for each in list(self._waiting):
            if each.party in passed:
                continue
            if self._fits(each.party, each.size):
                self._waiting.remove(each)
                if not each.granted.done():
                    self._count(each.party, each.size)
                    each.granted.set_result(None)
            elif now - each.since > _OVERTAKEN:
                return
            else:
                passed.add(each.party)

    def _press(self, waiting: _Waiting) -> None:
        """Disconnect clients of its party that read slowly, the oldest answer first, until it fits."""
        for each in list(self._all):
            if waiting.granted.done():
                return
            if each.party == waiting.party and each.reader is not None:
                each.reader(_PRESSING)

    # Bodies

    def arrive(self, size: int) -> bool:
        """Count bytes of a body; False: there is no room for them."""
        self.arrived += size
        return self.has_room

    @property
    def has_room(self) -> bool:
        """Whether bodies are within their part: a quarter of the budget, and whatever is free."""
        return self.arrived <= max(self.most // 4, self.most - self.taken)

    def leave(self, size: int) -> None:
        """So many bytes of bodies are held no longer."""
        self.arrived -= size
        self._grant()

    # Streams

    def stream(self) -> Buffered:
        """The buffer of one stream of events."""
        return Buffered(self)


class Taken:
    """The bytes that one request has taken and not given back yet."""

    __slots__ = ("_budget", "party", "reader", "size", "written")

    def __init__(self, budget: Budget, party: str, size: int) -> None:
        self._budget: Budget | None = budget
        self.party = party
        self.size = size
        self.written = False
        """Whether the answer is with the socket: then the connection gives it back."""
        self.reader: Callable[[float], bool] | None = None
        """Disconnects the client if it has read slowly for this many seconds; whether it did."""

    def become(self, size: int) -> None:
        """Hold this many bytes from now on, whether or not they are free: they are in memory already."""
        if self._budget is not None:
            self._budget.change(self, size)

    def give_back(self) -> None:
        """Hold nothing. A second time it does nothing."""
        if self._budget is not None:
            budget, self._budget, self.reader = self._budget, None, None
            budget.end(self)


@dataclass(eq=False, slots=True)
class _Waiting:
    party: str
    size: int
    since: float
    granted: asyncio.Future[None]


class Growing:
    """Room for an answer whose size becomes known while it is read: `copies` times the bytes read, plus `beside`.

    A request that needs more than it holds waits, and holds nothing meanwhile: no request waits for a waiting one. A
    large answer waits once, for the size of the largest answer, up to half the budget. Any excess is only counted.
    """

    def __init__(self, budget: Budget, taken: Taken, beside: int, copies: int, largest: int) -> None:
        self._budget = budget
        self._taken = taken
        self._beside = beside
        self._copies = copies
        self._enough = min(largest * copies, budget.most // 2)

    def take(self, size: int) -> bool:
        """Take room for this many bytes that were read; False: the caller must drop them, and `wait`."""
        taken, wanted = self._taken, size * self._copies + self._beside
        if wanted > taken.size and taken.size < self._enough:
            wanted = self._wanted(size)
            taken.become(0)
            if self._budget.waits(taken.party, wanted):
                return False
        if wanted > taken.size:
            taken.become(wanted)
        return True

    async def wait(self, size: int) -> None:
        """Wait for room for this many bytes that are read. Raises HTTPException 503 if that takes too long."""
        await self._budget.exchange(self._taken, self._wanted(size))

    def _wanted(self, size: int) -> int:
        return max(size * self._copies + self._beside, self._enough if size > _PAGE else 0)


class Buffered:
    """The bytes that a stream of events holds: little where all of them together hold much."""

    __slots__ = ("_budget", "_over", "size")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._over = False
        self.size = 0

    def count(self, size: int) -> None:
        """Count bytes that came, or went."""
        if not self._over:
            self.size += size
            self._budget.buffered += size

    def give_back(self) -> None:
        """Hold nothing from now on."""
        self.count(-self.size)
        self._over = True

    @property
    def full(self) -> bool:
        """Whether it should be emptied before it takes another event."""
        return self.size >= _A_STREAM or self._budget.buffered >= self._budget.most // 4


class Sizes:
    """How much answers of a kind held, as far as that is known."""

    def __init__(self, guess: int) -> None:
        self._guess = guess
        self._known: OrderedDict[tuple[str, ...], float] = OrderedDict()

    async def take(self, budget: Budget, party: str, kind: tuple[str, ...], beside: int, times: int) -> Taken:
        """Take the size of the last answer of this kind, `times` over, plus `beside`.

        Raises HTTPException 503.
        """
        known = self._known.get(kind)
        if known is not None:
            return await budget.take(party, int(known) * times + beside)
        taken = await budget.take(party, self._guess + beside)
        # One that waits for a server would keep others waiting for what is not there.
        asyncio.get_running_loop().call_later(_LOADING, _shrink, taken, self._guess + beside, beside)
        return taken

    def note(self, kind: tuple[str, ...], size: int) -> None:
        """Remember how large an answer was."""
        self._known[kind] = max(float(size), self._known.get(kind, 0.0) * _FADES)
        self._known.move_to_end(kind)
        if len(self._known) > _SIZES:
            self._known.popitem(last=False)


def _shrink(taken: Taken, guess: int, rest: int) -> None:
    if taken.size == guess:
        taken.become(rest)


# Memory of the process


def return_large_blocks() -> None:
    """Have large blocks mapped each by itself. Without glibc this does nothing."""
    if tell := _of_glibc("mallopt"):
        tell(_MAP, _LARGE_BLOCK)
        tell(_TRIM, _LARGE_BLOCK)
        tell(_ARENAS, 2)


def trim_memory() -> None:
    """Give back whole pages that are free, wherever they lie: 0.3 ms, and 16 ms for 100 MB. Likewise."""
    if give := _of_glibc("malloc_trim"):
        give(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    try:
        return cast("Callable[..., int]", getattr(ctypes.CDLL(None), name))  # ctypes has no types for what it finds
    except (AttributeError, OSError, TypeError):
        return None
