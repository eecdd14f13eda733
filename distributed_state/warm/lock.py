"""One lock on the server, for its holder and its waiters. Law: waiters get it in order, and do not poll.

A waiter queues on the server and is woken through the link; in addition it asks again at long intervals, which keeps
its place and covers a holder that died. A free lock is offered to the head of its queue, and to the next waiter if the
head does not ask within the grace period. A waiter is woken only when it should ask the server: if the lock is offered
to another waiter, the first waiter in each process asks after the grace period, and later ones do not.

Design: section 8.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

from distributed_state.errors import ConfigurationError, InvalidValue, LockTimeout, StateError
from distributed_state.port import Call, Port
from distributed_state.values.keys import RecordKeys
from distributed_state.warm.answers import holder_of
from distributed_state.warm.client import OpId, Warm
from distributed_state.warm.link import Link
from distributed_state.warm.output import TurnOutput, stopped
from distributed_state.warm.scripts import ACQUIRE, RELEASE
from distributed_state.warm.telemetry import Facts, observed

log = logging.getLogger(__name__)
_WAITING_MS = 4000  # a waiter that does not ask for this long has died
_GRACE_MS = 500  # a waiter that was offered the lock and does not ask for this long has died


def check_times(wait: float, ttl: float, limit: float | None) -> None:
    """Raise InvalidValue or ConfigurationError unless these are valid times for `wait`, `ttl` and `limit`."""
    _check("wait", wait)
    _check("ttl", ttl)
    if limit is not None:
        _check("limit", limit)
    if ttl < 0.05:
        raise ConfigurationError(f"a lease of {ttl} s is too short; use at least 0.05")


def _check(name: str, seconds: Any) -> None:
    """Raise InvalidValue unless this is a valid time."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 <= seconds <= (math.inf if name == "wait" else 1e9) or (name == "limit" and not seconds):
        raise InvalidValue(f"{name} is a number of seconds, not {seconds!r:.80}")


def seizing(token: int) -> str:
    """Return the script's argument to take the lease with this fencing token from its holder. Raises InvalidValue."""
    if type(token) is not int or not 0 < token < 10**18:
        raise InvalidValue(f"a lease is named by its fencing token, not {token!r:.80}")
    return f"{token}@"


class Taken(NamedTuple):
    """A lock that was granted to the request sent at `sent`, with the record's epoch and version then.

    `waited`: seconds for which others held it. `trailing` is the answer of the script that was sent after it.
    """

    lock_value: str
    epoch: str
    version: int
    sent: float
    waited: float
    trailing: Any


def _facts(lock: Lock, *_: Any) -> Facts:
    return lock.telemetry.of(lock.keys)


class Lock:
    """A record's lock; `holder` is the name under which it is requested. `mode` is x (exclusive) or a (advisory)."""

    output: TurnOutput | None = None  # ends with the lock
    stop_keys: Sequence[bytes] = ()  # keys by which a step of a workflow is asked to stop

    def __init__(
        self,
        warm: Warm,
        waiters: Waiters,
        start: Callable[[int], Any],
        keys: RecordKeys,
        holder: str,
        *,
        wait: float,
        ttl: float,
        mode: str,
        seize: str,
    ) -> None:
        self._warm = warm
        self._waiters = waiters
        self._start = start
        self.keys = keys
        self.telemetry = warm.telemetry
        self.holder = holder
        self._wait = wait
        self.ttl = ttl
        self._mode = mode
        self._seize = seize
        self._order = b""  # this waiter's place in the queue
        self._asking: Coroutine[Any, Any, tuple[Any, Any]] | None = None

    @observed("lease.acquire", "warm", _facts)
    async def take(self, trailing_call: Call | None) -> Taken:
        """Wait for the lock, or raise LockTimeout."""
        port = self._warm.port
        deadline = port.monotonic() + self._wait
        waiter: Waiter | None = None
        refused: float | None = None
        self._order = b""
        try:
            while True:
                sent = port.monotonic()
                self._asking = self._ask(trailing_call)
                answer, trailing = await port.shield(self._asking)
                if answer[0] == b"ok":
                    self._order = b""
                    waited = 0.0 if refused is None else sent - refused
                    return Taken(answer[1].decode(), answer[2].decode(), int(answer[3]), sent, waited, trailing)
                if answer[0] == b"stopped":
                    raise stopped(self.keys, self._warm.codec_of(self.keys.ref.text), answer[1].decode())
                if answer[0] == b"uninitialised":
                    await self._start(self.keys.partition)
                    continue
                refused = sent if refused is None else refused
                left = deadline - port.monotonic()
                if left <= 0:
                    held = holder_of(answer[1].decode()) if answer[1] else "a waiter before us"
                    raise LockTimeout(f"{self.keys.ref.text[:200]}: still held by {held} after {self._wait:g} s")
                if waiter is None:
                    waiter = self._waiters.join(self.keys.lock_channel, self.holder)
                pause = self._waiters.pause(self.keys.lock_channel)
                # The holder's expiry publishes nothing, so its time to live limits the wait as well.
                await waiter.sleep(min(left, answer[2] / 1000 + 0.002 if answer[2] > 0 else pause, pause))
        finally:
            if waiter is not None:
                self._waiters.leave(self.keys.lock_channel, self.holder)

    async def _ask(self, trailing_call: Call | None) -> tuple[Any, Any]:
        """Ask for the lock. Shielded: a waiter that is cancelled meanwhile needs its place to leave the queue."""
        keys = self.keys
        touched = [keys.lock, keys.wait, keys.meta, keys.record, keys.channel, keys.lock_channel, keys.leases]
        touched += self.stop_keys
        place = self.holder if self._wait > 0 else ""
        times = [_WAITING_MS, _GRACE_MS]
        asked = [self._mode, self.holder, int(self.ttl * 1000), place, self._order, *times, self._seize]
        answer, trailing = await self._warm.ask((ACQUIRE, touched, asked), trailing_call)
        if answer[0] == b"wait":
            self._order = answer[3]
        return answer, trailing

    @property
    def asked(self) -> bool:
        """Whether a request for the lock is running, even if its caller was interrupted."""
        asking = self._asking
        return asking is not None and inspect.getcoroutinestate(asking) in (
            inspect.CORO_RUNNING,
            inspect.CORO_SUSPENDED,
        )

    def leave_call(self) -> Call:
        """Return the call that releases the lock or leaves the queue, whatever the outcome of the request."""
        keys, arguments = self._release_keys, [self.holder, self._order, _GRACE_MS, "", ""]
        if self.output is not None and not self.output.ended:
            keys = [*keys, self.keys.output, self.keys.output_channel]
            arguments += self.output.end_words()
        return RELEASE, keys, arguments

    def release_call(self, op: OpId) -> Call:
        """Return the call that releases the lock if this commit is applied, to be sent after it."""
        return RELEASE, self._release_keys, [self.holder, "", _GRACE_MS, self._warm.replica, op.sequence]

    @observed("lease.release", "warm", _facts)
    async def give_back(self, deadline: float) -> bool:
        """Release the lock, or leave the queue; False if another holder has it.

        Repeated until `deadline`, as others wait.
        """
        try:
            return bool(await self._warm.retry(self._give_back, self.leave_call(), deadline, itertools.count()))
        except StateError as error:
            # The lock expires by itself; an error here would hide the exception of the body.
            text = "lease of %s could not be released; it ends in %.1f s: %s"
            about = self.keys.ref.text[:200]
            log.warning(text, about, self.ttl, error, extra={"record": about})
            return True

    async def _give_back(self, call: Call, deadline: float, tries: Iterator[int]) -> bool:
        if next(tries) and self._warm.port.monotonic() >= deadline:
            return True
        answer = await self._warm.port.script(*call)
        return bool(answer[0] != b"lost")

    @property
    def _release_keys(self) -> list[bytes]:
        keys = self.keys
        return [keys.lock, keys.wait, keys.lock_channel, keys.record, keys.leases]


class Waiters:
    """The waiters of one replica, by the channel of their lock and the name under which they ask."""

    def __init__(self, port: Port, link: Link) -> None:
        self._port = port
        self._link = link
        self._mutex = port.mutex()
        self._waiting: dict[bytes, dict[str, Waiter]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def join(self, channel: bytes, name: str) -> Waiter:
        """Add a waiter that is woken from now on; `leave` must follow."""
        waiter = Waiter(self._port)
        with self._mutex:
            self._waiting.setdefault(channel, {})[name] = waiter
        self._link.watch(channel, self._wake)
        if self._link.confirmed(channel):
            waiter.ask()
        return waiter

    def leave(self, channel: bytes, name: str) -> None:
        """Remove a waiter."""
        with self._mutex:
            waiting = self._waiting.get(channel, {})
            waiting.pop(name, None)
            if waiting:
                return
            self._waiting.pop(channel, None)
            self._link.leave(channel)

    def pause(self, channel: bytes) -> float:
        """Seconds after which a waiter asks without being woken, to keep its place; sooner without a link."""
        return (_WAITING_MS if self._link.confirmed(channel) else _GRACE_MS) / 2000

    def _wake(self, channel: bytes, payload: bytes) -> None:
        """Wake waiters after an offer of the lock.

        An empty payload (the channel is confirmed) means that an offer may have been missed.
        """
        _, _, offered = payload.decode().partition(":")
        with self._mutex:
            waiting = dict(self._waiting.get(channel, {}))
        others = []
        for name, waiter in waiting.items():
            if not payload or name == offered:
                waiter.ask()
            else:
                others.append(waiter)
        for first in others[:1]:
            first.ask(self._port.monotonic() + _GRACE_MS / 1000 + 0.002)


class Waiter:
    """The time when a waiter should ask again."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._signal = port.signal()
        self._at = math.inf

    def ask(self, at: float = 0.0) -> None:
        """Ask at this time instead, unless the waiter should ask at once already."""
        if not at or self._at:
            self._at = at
        self._signal.set()

    async def sleep(self, seconds: float) -> None:
        """Wait until that time, at most `seconds`."""
        end = self._port.monotonic() + seconds
        while (left := min(end, self._at) - self._port.monotonic()) > 0:
            await self._signal.wait(left)
            self._signal.clear()
        # The next request covers everything received until now.
        self._at = math.inf
