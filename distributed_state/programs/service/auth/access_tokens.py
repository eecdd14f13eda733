"""Recognizes callers by tokens of SQL. Law: a request with a token that is known waits for no server.

What was read of a token counts for some seconds and is then read again in the background, so that a revoked one is
refused within `Ages.revoked` seconds. While SQL is away a token that was known goes on for `Ages.away` seconds; one
that was not can be neither accepted nor refused. Of all that is to be read, one query runs at a time, and what is asked
for meanwhile goes together into the next: a stranger who guesses costs no more queries than one who does not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from hmac import compare_digest

from starlette.exceptions import HTTPException

from distributed_state.errors import ColdUnavailable, Unauthenticated, Unavailable
from distributed_state.programs.service.auth.strangers import Strangers
from distributed_state.programs.service.callers import Caller
from distributed_state.values.access_tokens import RIGHTS, FoundToken, digest, id_of

log = logging.getLogger(__name__)
Find = Callable[[Collection[str]], Awaitable[dict[str, FoundToken]]]
_KNOWN = 10_000  # tokens that are remembered, and as many ids of which there is none
_TOGETHER = 500  # ids in one query
_WAITING = 10_000  # unknown ids that are to be asked for; more are answered 429
_PAUSE = 0.02  # between two queries


@dataclass(frozen=True, slots=True)
class Ages:
    """How old what is known of a token may be, in seconds."""

    fresh: float = 2.0  # older: it is read again, in the background
    revoked: float = 4.0  # older: the request waits for that
    wait: float = 0.9  # and so long at most, if the token was known
    wait_unknown: float = 5.0  # and so long if it was not
    away: float = 60.0  # older: it does not count any more, even while SQL is away


@dataclass(slots=True)
class _Known:
    found: FoundToken | None  # None: there is no such token
    caller: Caller
    read: float  # when it was asked for, by the monotonic clock


class AccessTokens:
    """The tokens that callers showed, as far as they are remembered."""

    def __init__(self, ages: Ages | None = None, strangers: Strangers | None = None) -> None:
        self._ages = ages or Ages()
        self._strangers = strangers or Strangers()
        self._find: Find | None = None
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._absent: OrderedDict[str, float] = OrderedDict()  # apart: guesses push out no token that there is
        self._wanted: dict[str, asyncio.Future[_Known | None]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._silent = False  # SQL did not answer when it was last asked

    def begin(self, find: Find) -> None:
        """Read tokens by this from now on."""
        self._find = find

    async def close(self) -> None:
        """Stop reading. Who waits for that is told so."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        self._give_up([*self._wanted])

    async def caller(self, text: str) -> Caller:
        """Whose token this is. Raises Unauthenticated, or Unavailable if SQL cannot say."""
        id = id_of(text)
        if id is None or self._find is None:
            raise Unauthenticated
        known = self._known.get(id)
        now = time.monotonic()
        if known is None or now - known.read > self._ages.fresh:
            known = await self._read(id, known, now)
        if known is None or known.found is None or not compare_digest(known.found.digest, digest(text)):
            raise Unauthenticated
        left = known.found.left
        # Now, not when the request came: a token may have been read since, and 0 is what a revoked one has left.
        if left is not None and time.monotonic() >= known.read + left:
            raise Unauthenticated
        return known.caller

    async def _read(self, id: str, known: _Known | None, now: float) -> _Known | None:
        """What is known of a token, read anew if it has to be."""
        absent = self._absent.get(id)
        if known is None and absent is not None and now - absent <= self._ages.fresh:
            return None
        if known is None and len(self._wanted) >= _WAITING:
            raise HTTPException(429, "too many unknown tokens are being looked up")
        reading = self._ask(id)
        age = 0.0 if known is None else now - known.read
        # Who has waited in vain tells the others that they need not: else an outage would slow every request down.
        if known is not None and (age <= self._ages.revoked or (self._silent and age <= self._ages.away)):
            return known
        try:
            if known is None:
                wait = self._ages.wait if self._silent else self._ages.wait_unknown
                return await self._strangers.wait(reading, wait)
            async with asyncio.timeout(self._ages.wait):
                return await asyncio.shield(reading)
        except (ColdUnavailable, TimeoutError) as error:
            self._silent = True
            if known is not None and age <= self._ages.away:
                return known
            raise Unavailable("tokens cannot be checked now") from error

    def _ask(self, id: str) -> asyncio.Future[_Known | None]:
        """What SQL says of an id, once it does."""
        wanted = self._wanted.get(id)
        if wanted is None:
            wanted = self._wanted[id] = asyncio.get_running_loop().create_future()
            wanted.add_done_callback(_look_at)
        if self._reading is None:
            self._reading = asyncio.create_task(self._ask_all())
        return wanted

    async def _ask_all(self) -> None:
        try:
            while self._wanted:
                await self._ask_some([*self._wanted][:_TOGETHER])
                await asyncio.sleep(_PAUSE)
        finally:
            self._reading = None

    async def _ask_some(self, ids: list[str]) -> None:
        assert self._find is not None, "begin comes first"
        began = time.monotonic()
        try:
            found = await self._find(ids)
        except Exception as error:
            if not isinstance(error, ColdUnavailable):
                log.error("tokens cannot be read", exc_info=error)
            self._give_up(ids)
            return
        self._silent = False
        for id in ids:
            self._wanted.pop(id).set_result(self._remember(id, found.get(id), began))

    def _give_up(self, ids: list[str]) -> None:
        for id in ids:
            self._wanted.pop(id).set_exception(ColdUnavailable("tokens cannot be read"))

    def _remember(self, id: str, found: FoundToken | None, read: float) -> _Known | None:
        if found is None:
            self._known.pop(id, None)
            self._absent[id] = read
            if len(self._absent) > _KNOWN:
                self._absent.popitem(last=False)
            return None
        self._absent.pop(id, None)
        token = found.token
        rights = frozenset(each for each in RIGHTS if each in token.rights)  # a newer release may have more
        caller = Caller(token.actor or f"token:{id}", token.prefix, rights, f"token:{id}")
        known = self._known[id] = _Known(found, caller, read)
        self._known.move_to_end(id)  # by when it was read: who is used is read every few seconds
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return known


def _look_at(future: asyncio.Future[_Known | None]) -> None:
    if not future.cancelled():
        future.exception()  # nobody may have waited for it
