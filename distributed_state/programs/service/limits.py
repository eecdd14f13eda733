"""Limits of a worker, and limits and quotas of tenants.

Law: everything that a client could make grow without bound has its limit here. A tenant beyond its limit is refused,
and does not affect others.

A tenant is a prefix of ids; for callers of all tenants the actor takes its place. A request counts for each prefix that
contains its caller's: otherwise a tenant whose admin makes tokens for tenants within it would have their quotas, too.

`Rates` limit requests and bytes a second in this worker: behind a balancer that spreads requests evenly, a fleet of n
workers allows n times as many. Their headers are RateLimit and RateLimit-Policy of the IETF's draft "RateLimit header
fields for HTTP". `Traffic` shows operators the load by tenant: each rate is a sum that weights requests by their age.
`Quota` limits how many records and items a tenant has. They are counted in the archive once a minute, not at each
request, so the bounds are not exact: new records of other workers and unarchived records are not in the count.

`Shares` are places in the worker. A tenant with many requests that wait for leases or turns could otherwise take all
places, so a tenant must leave as many places free as it has. A single tenant gets half of them, two get a third each.
Callers of all tenants are not limited by shares: they have all rights anyway. Source: A. Choudhury and E. Hahne,
"Dynamic queue length thresholds for shared-memory packet switches" (1998).

`Budget` is the bytes that a worker holds for its clients. They are counted before they are allocated, and always given
back. Bodies count as they arrive; slow ones are evicted (`connections.py`). A request waits for room for its parsed
body and for its answer, whose size is that of the last answer of its kind, or a guess. It gives the bytes back when the
socket has taken the answer. A party leaves a part free for others, as with places, and the request that waits longest
is not overtaken forever. An answer larger than the whole budget runs alone. Event streams count their buffers; the more
all of them buffer, the less each may.

Freed memory must go back to the system. glibc raises its threshold with each large block that is freed, and has an
arena for each thread: after bodies and answers of a megabyte each, a worker kept 150 MB more than it used. glibc
returns small blocks only from the end of its heap, where some byte is always in use: after 6,000 incomplete heads it
kept 45 MB more.

Design: section 24.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from starlette.exceptions import HTTPException

from distributed_state.port import waited
from distributed_state.programs.service.authentication import Caller
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.lifecycle import lifecycle_of
from distributed_state.values.model import escape


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, sizes in bytes."""

    # For each connection: a client beyond these limits is answered 408 if possible, and disconnected.
    head: float = 10.0  # for the head of a request: until its first byte, and from that to its end
    arriving: float = 10.0  # for a body, and a second more for each `rate` bytes of it that came
    leaving: float = 10.0  # for a client to read its answer, and a second more for each `rate` bytes that it read
    rate: int = 16 * 1024  # bytes a second: the slowest rate at which a client may send and read
    idle: int = 75  # between requests: longer than most proxies keep a connection, because the proxy should close it
    connections: int = 4096  # at once, or fewer if the process may not open as many descriptors
    per_address: int = 0  # connections of one client's address, 0: any number; behind a proxy all are the proxy's
    in_flight: int = 64 * 2**20  # bytes of bodies, answers in progress, and unsent events
    room: float = 10.0  # for room among these bytes: a request that waits longer is answered 503

    # For each request.
    body: int = 2**20  # a larger one is answered 413 before all of it is read
    depth: int = 64  # of arrays and objects within each other
    values: int = 50_000  # in a body, however they are nested
    fields: int = 5_000  # that one request sets: Redis serves no other request meanwhile
    messages: int = 1_000  # that one request appends
    answer: int = 16 * 2**20  # a larger answer is refused, because it would be built in memory
    request: float = 30.0  # for the work of one request, once its body has arrived
    busy: float = 10.0  # how long a turn waits for another one of the same conversation
    requests: int = 512  # at once; more are answered 429. Requests whose body has not arrived are not counted here.
    # Requests whose caller is still being checked have a limit of their own, of the same size.

    # For each tenant, 0: any number. Each worker counts on its own.
    tenant_requests: float = 0.0  # a second, and ten seconds' worth at once; more are answered 429
    tenant_bytes: float = 0.0  # a second, of bodies and answers; likewise
    tenant_metrics: int = 0  # how many tenants have metrics of their own: the first ones
    tenant_conversations: int = 0  # counted in the archive once a minute, so not exact; more are answered 429
    tenant_tasks: int = 0  # likewise
    tenant_users: int = 0
    tenant_items: int = 0  # of all its records together

    # For event streams.
    streams: int = 512  # open at once; more are answered 429
    followers: int = 2048  # streams of the output of turns, likewise
    heartbeat: float = 15.0  # between comments on a stream without events
    slow: float = 10.0  # a stream of events whose client reads nothing for this long is closed

    # For the worker itself.
    notice: float = 1.0  # at shutdown: how long /readyz fails before connections are refused
    drain: float = 15.0  # then: for the requests that are running
    archive: float = 5.0  # then: to archive pending commits, if this worker archives
    close: float = 5.0  # then: to close the connections to the servers
    check: float = 1.0  # for the probe of one server by /readyz, and how long its result is cached


# Requests and bytes a second


_WINDOW = 10.0  # seconds whose quota may be used at once
_TENANTS = 10_000  # tenants with a counter; the one without requests for the longest time is dropped first


@dataclass(slots=True)
class _Bucket:
    """The rest of a quota, below zero if an answer was larger than the rest."""

    rate: float  # a second
    left: float
    since: float

    def fill(self, now: float) -> None:
        self.left = min(self.rate * _WINDOW, self.left + (now - self.since) * self.rate)
        self.since = now


class Rates:
    """Limits requests and bytes a second of each tenant; 0: no limit. `traffic` counts all requests."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        given = {"requests": float(limits.tenant_requests), "bytes": float(limits.tenant_bytes)}
        self._rates = {name: rate for name, rate in given.items() if rate}
        self._clock = clock
        self._tenants: OrderedDict[str, dict[str, _Bucket]] = OrderedDict()
        self.traffic = Traffic(clock)

    def __len__(self) -> int:
        return len(self._tenants)

    def ask(self, caller: Caller) -> None:
        """Count one request. Raises HTTPException 429 if the tenant's quota is used up."""
        self.traffic.note(caller, requests=1)
        if not self._rates:
            return
        for name, bucket in self._scarcest(caller).items():
            least = 1.0 if name == "requests" else 0.0
            if bucket.left < least:
                wait = max(1, math.ceil((least - bucket.left) / bucket.rate))
                headers = {"Retry-After": str(wait), **self.headers(caller)}
                raise HTTPException(429, f"the quota of {bucket.rate:g} {name} a second is used up", headers)
        self._use(caller, "requests", 1)

    def count(self, caller: Caller, size: int) -> None:
        """Count bytes of a body or an answer."""
        self.traffic.note(caller, size=size)
        self._use(caller, "bytes", size)

    def answered(self, caller: Caller, size: int) -> dict[str, str]:
        """Count the bytes of an answer, and return the headers that report the quotas."""
        self.count(caller, size)
        return self.headers(caller)

    def headers(self, caller: Caller) -> dict[str, str]:
        """Headers that report the quotas."""
        if not self._rates:
            return {}
        policies, left = [], []
        for name, bucket in self._scarcest(caller).items():
            unit = ';qu="content-bytes"' if name == "bytes" else ""
            policies.append(f'"{name}";q={bucket.rate * _WINDOW:.0f};w={_WINDOW:.0f}{unit}')
            full = math.ceil((bucket.rate * _WINDOW - bucket.left) / bucket.rate)
            left.append(f'"{name}";r={max(0, int(bucket.left))};t={full}')
        return {"RateLimit-Policy": ", ".join(policies), "RateLimit": ", ".join(left)}

    def _use(self, caller: Caller, name: str, many: int) -> None:
        if name in self._rates:
            for party in caller.parties:
                self._buckets(party)[name].left -= many

    def _scarcest(self, caller: Caller) -> dict[str, _Bucket]:
        """For each quota, the bucket with the least left among those that the caller counts for."""
        found = [self._buckets(party) for party in caller.parties]
        return {name: min((each[name] for each in found), key=lambda bucket: bucket.left) for name in self._rates}

    def _buckets(self, key: str) -> dict[str, _Bucket]:
        now = self._clock()
        buckets = self._tenants.get(key)
        if buckets is None:
            buckets = {name: _Bucket(rate, rate * _WINDOW, now) for name, rate in self._rates.items()}
            self._tenants[key] = buckets
            if len(self._tenants) > _TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(key)
        for bucket in buckets.values():
            bucket.fill(now)
        return buckets


# Traffic by tenant


_DECAY = 10.0  # seconds after which a request counts for about a third
_COUNTED_FOR = 60.0  # seconds that a count of conversations is shown


@dataclass(slots=True)
class _Tenant:
    requests: int = 0
    bytes: int = 0
    request_rate: float = 0.0
    byte_rate: float = 0.0
    at: float = 0.0
    conversations: int = 0
    counted: float = -math.inf


@dataclass(frozen=True, slots=True)
class TenantTraffic:
    """The traffic of a tenant, "" for callers of all: totals since the worker started, and current rates.

    Requests of tenants within it count both for it and for themselves.
    """

    prefix: str
    requests: int
    bytes: int
    requests_per_second: float
    bytes_per_second: float


class Traffic:
    """The traffic of one worker, by tenant."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def note(self, caller: Caller, *, requests: int = 0, size: int = 0) -> None:
        """Count requests and bytes."""
        for prefix in caller.tenants or ("",):
            self._note(prefix, requests, size)

    def _note(self, prefix: str, requests: int, size: int) -> None:
        tenant = self._tenants.get(prefix)
        if tenant is None:
            tenant = self._tenants[prefix] = _Tenant()
            if len(self._tenants) > _TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(prefix)
        now = self._clock()
        kept = math.exp((tenant.at - now) / _DECAY)
        tenant.at = now
        tenant.requests += requests
        tenant.bytes += size
        tenant.request_rate = tenant.request_rate * kept + requests / _DECAY
        tenant.byte_rate = tenant.byte_rate * kept + size / _DECAY

    def busiest(self, limit: int) -> list[TenantTraffic]:
        """The tenants with the highest request rates now."""
        now = self._clock()
        found = []
        for prefix, each in list(self._tenants.items()):
            kept = math.exp((each.at - now) / _DECAY)
            found.append(
                TenantTraffic(prefix, each.requests, each.bytes, each.request_rate * kept, each.byte_rate * kept)
            )
        return sorted(found, key=lambda each: each.requests_per_second, reverse=True)[:limit]

    async def conversations(self, prefix: str, count: Callable[[], Awaitable[int]]) -> int:
        """How many conversations a tenant has, counted once a minute."""
        tenant = self._tenants.get(prefix) or _Tenant()
        if self._clock() >= tenant.counted + _COUNTED_FOR:
            tenant.conversations = await count()
            tenant.counted = self._clock()
        return tenant.conversations


# Records and items


_NAMES = {  # by what is counted: a scope of records, or items
    "session": "conversations",
    "task": "tasks",
    "user": "users",
    "item": "items",
}
_AGE = 60.0  # seconds that a count is used for
_COUNTED_TENANTS = 10_000  # whose counts are remembered


@dataclass(slots=True)
class _Count:
    found: int = 0
    until: float = 0.0
    counting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Quota:
    """Counts the records and items of each tenant, and enforces a limit for each kind; 0: no limit."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._most: dict[str, int] = {
            "session": limits.tenant_conversations, "task": limits.tenant_tasks, "user": limits.tenant_users,
            "item": limits.tenant_items,
        }  # fmt: skip
        self._clock = clock
        self._counts: OrderedDict[tuple[str, str], _Count] = OrderedDict()

    def counts(self, caller: Caller, kind: str) -> bool:
        """Whether this kind is counted for the caller: never for a caller of all tenants."""
        return bool(self._most.get(kind) and caller.prefix)

    async def ask(self, store: AsyncStateStore, caller: Caller, kind: str, more: int = 1) -> None:
        """Count `more` of a kind. Raises HTTPException 429 if a tenant would exceed its limit."""
        if not more or not self.counts(caller, kind):
            return
        counts = {prefix: self._count(kind, prefix) for prefix in caller.tenants}
        for prefix, count in counts.items():
            async with count.counting:
                if self._clock() >= count.until:
                    # While SQL is unavailable the earlier count is used, and one request a minute tries SQL again.
                    count.until = self._clock() + _AGE
                    count.found = await self._counted(store, kind, prefix)
        most = self._most[kind]
        for prefix, count in counts.items():
            if count.found + more > most:
                wait = str(max(1, int(count.until - self._clock())))
                detail = f"{prefix!r:.80} already has {count.found} {_NAMES[kind]} of at most {most}"
                raise HTTPException(429, detail, {"Retry-After": wait})
        for count in counts.values():
            count.found += more

    def _count(self, kind: str, prefix: str) -> _Count:
        count = self._counts.setdefault((kind, prefix), _Count())
        self._counts.move_to_end((kind, prefix))
        if len(self._counts) > _COUNTED_TENANTS:
            self._counts.popitem(last=False)
        return count

    async def _counted(self, store: AsyncStateStore, kind: str, prefix: str) -> int:
        """Count records or items, up to the limit. No policy is asked: a writer may lack the right to list."""
        tiers = lifecycle_of(store).tiers()
        begin, most = escape(prefix), self._most[kind]
        if kind == "item":
            return await tiers.port.sql(partial(tiers.cold.count_items, begin, most))
        return await tiers.port.sql(partial(tiers.cold.count, kind, begin, most))


# Places in the worker


class Shares:
    """A number of places, shared fairly between tenants. `what` names them in the text of the error."""

    def __init__(self, places: int, what: str) -> None:
        self._places = places
        self._what = what
        self._all = 0
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._all

    def take(self, caller: Caller) -> None:
        """Take a place, until `leave`. Raises HTTPException if there is none, or none for this tenant."""
        free = self._places - self._all
        most = max(caller.tenants, key=self._taken.__getitem__, default="")
        if free <= 0 or (most and self._taken[most] >= free):
            own = f", {self._taken[most]} of them for {most!r:.80}" if most else ""
            raise HTTPException(
                429, f"this worker already has {self._places - free} of {self._places} {self._what}{own}"
            )
        self._all += 1
        self._taken.update(caller.tenants)

    def leave(self, caller: Caller) -> None:
        """Give a place back."""
        self._all -= 1
        for each in caller.tenants:
            self._taken[each] -= 1
            if not self._taken[each]:
                del self._taken[each]

    @contextmanager
    def one(self, caller: Caller) -> Iterator[None]:
        """Hold a place inside the block. Raises HTTPException."""
        self.take(caller)
        try:
            yield
        finally:
            self.leave(caller)


_SMALL = 16 * 1024  # a request this small does not wait: together, in all places, such requests hold a few megabytes
_PAGE = 128 * 1024  # bytes: after reading more than this, an answer may become large
_SIZES = 10_000  # kinds of answers whose size is remembered
_FADES = 0.9  # factor of the remembered size with each smaller answer
_LOADING = 0.25  # seconds after which a request of unknown size that still waits for a server counts as holding nothing
_PRESSING = 2.0  # seconds after which a waiting request disconnects slow readers of its own party
_OVERTAKEN = 2.0  # seconds of waiting after which other requests no longer go first
_A_STREAM = 256 * 1024  # bytes that a stream of events buffers at most
_TRIM, _MAP, _ARENAS = -1, -3, -8  # of mallopt(3)
_LARGE_BLOCK = 256 * 1024


class Budget:
    """A number of bytes: at most three quarters for answers, at least a quarter for bodies."""

    def __init__(self, most: int, wait: float = 10.0) -> None:
        self.most = most
        self.arrived = 0
        """Bytes of bodies, of the values made from them, and of answers that no request has taken bytes for."""
        self.buffered = 0
        """Bytes that streams of events have not sent yet."""
        self._wait = wait
        self._parties: Counter[str] = Counter()  # bytes taken by each party, without small amounts
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
                with waited.queued():
                    await self._granted(waiting)
            except BaseException:
                if waiting.granted.done() and not waiting.granted.cancelled():
                    self._count(party, -size)  # it was granted at the moment at which it stopped waiting
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
        until = waiting.since + self._wait
        while (left := until - loop.time()) > 0:
            await asyncio.wait((waiting.granted,), timeout=min(left, _PRESSING))
            if waiting.granted.done():
                return
            self._press(waiting)
            self._grant()
        if not waiting.granted.done():
            detail = f"this worker holds the maximum number of bytes of requests and answers, {self.most}"
            raise HTTPException(503, detail, {"Retry-After": "1"})

    def change(self, taken: Taken, size: int) -> None:
        """Set the bytes that a request holds."""
        self._count(taken.party, -taken.size)
        self._count(taken.party, size)
        less = size < taken.size
        taken.size = size
        if less:
            self._grant()

    async def exchange(self, taken: Taken, size: int) -> None:
        """Set the bytes that a request holds, once they are free. Raises HTTPException 503 if that takes too long."""
        granted = await self.take(taken.party, size)
        self._all.pop(granted)
        self._count(granted.party, -granted.size)
        taken.become(size)

    def end(self, taken: Taken) -> None:
        """Release all bytes of a request."""
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
        """Whether another waiting request goes first: one of the same party, or one that has waited long."""
        return any(each.party == party or now - each.since > _OVERTAKEN for each in self._waiting)

    def _fits(self, party: str, size: int) -> bool:
        if not self._large:
            return True  # it runs alone, however large it is
        own = self._parties[party]
        free = self.most - self.taken - min(self.arrived + self.buffered, self.most // 2)
        # The rest is for bodies. A party leaves half as many bytes free as it has: a single party gets two thirds.
        free = min(free, self.most * 3 // 4 - self.taken)
        return size <= free and (not own or own + size <= 2 * (free - size))

    def _grant(self) -> None:
        """Grant the waiting requests that fit, in the order of arrival, which is strict within a party."""
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
        """Disconnect clients of a request's party that read slowly, the oldest answer first, until the request fits."""
        for each in list(self._all):
            if waiting.granted.done():
                return
            if each.party == waiting.party and each.reader is not None:
                each.reader(_PRESSING)

    # Bodies

    def arrive(self, size: int) -> bool:
        """Count bytes of a body; False if there is no room for them."""
        self.arrived += size
        return self.has_room

    @property
    def has_room(self) -> bool:
        """Whether bodies fit: into a quarter of the budget, or into all that is free."""
        return self.arrived <= max(self.most // 4, self.most - self.taken)

    def leave(self, size: int) -> None:
        """Stop counting this many bytes of bodies."""
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
        """Whether the socket has the answer; the connection then releases the bytes."""
        self.reader: Callable[[float], bool] | None = None
        """Disconnects the client if it has read slowly for this many seconds; returns whether it did."""

    def become(self, size: int) -> None:
        """Hold this many bytes from now on, even if they are not free, as they are already in memory."""
        if self._budget is not None:
            self._budget.change(self, size)

    def give_back(self) -> None:
        """Hold nothing. A second call has no effect."""
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

    A request that needs more bytes than it holds releases them while it waits, so that requests never wait for waiting
    ones. A large answer waits once, for the size of the largest answer, up to half the budget. Bytes beyond that are
    only counted.
    """

    def __init__(self, budget: Budget, taken: Taken, beside: int, copies: int, largest: int) -> None:
        self._budget = budget
        self._taken = taken
        self._beside = beside
        self._copies = copies
        self._enough = min(largest * copies, budget.most // 2)

    def take(self, size: int) -> bool:
        """Take room for this many bytes that were read; if False, the caller must drop them, and `wait`."""
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
    """The bytes that an event stream holds: fewer are allowed while all streams together hold many."""

    __slots__ = ("_budget", "_over", "size")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._over = False
        self.size = 0

    def count(self, size: int) -> None:
        """Count bytes that were added, or with a negative size, removed."""
        if not self._over:
            self.size += size
            self._budget.buffered += size

    def give_back(self) -> None:
        """Hold nothing from now on."""
        self.count(-self.size)
        self._over = True

    @property
    def full(self) -> bool:
        """Whether waiting events should be sent before another one is taken."""
        return self.size >= _A_STREAM or self._budget.buffered >= self._budget.most // 4


class Sizes:
    """The known sizes of answers, by kind."""

    def __init__(self, guess: int) -> None:
        self._guess = guess
        self._known: OrderedDict[tuple[str, ...], float] = OrderedDict()

    async def take(self, budget: Budget, party: str, kind: tuple[str, ...], beside: int, times: int) -> Taken:
        """Take `times` the size of the last answer of this kind, plus `beside`.

        Raises HTTPException 503.
        """
        known = self._known.get(kind)
        if known is not None:
            return await budget.take(party, int(known) * times + beside)
        taken = await budget.take(party, self._guess + beside)
        # While the request waits for a server, its guessed bytes are unused and would keep others waiting.
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
    """Let glibc map each large block separately, so that it is returned when freed. No effect without glibc."""
    if tell := _of_glibc("mallopt"):
        tell(_MAP, _LARGE_BLOCK)
        tell(_TRIM, _LARGE_BLOCK)
        tell(_ARENAS, 2)


def trim_memory() -> None:
    """Return all free pages to the system: takes 0.3 ms, and 16 ms for 100 MB. No effect without glibc."""
    if give := _of_glibc("malloc_trim"):
        give(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    try:
        return cast("Callable[..., int]", getattr(ctypes.CDLL(None), name))  # ctypes has no types for what it finds
    except (AttributeError, OSError, TypeError):
        return None
