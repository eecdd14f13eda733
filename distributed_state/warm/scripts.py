"""The scripts that run in Redis, and the client that sends them. Law: each script is named once, here.

A call without a reply is sent again until it has waited for `retry_for` seconds. Functions for which a caller waits
send their scripts through this client, and only scripts that may run twice. Background jobs use the port, which tries
once.

Design: sections 4, 5.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from distributed_state.errors import Backpressure, WarmUnavailable
from distributed_state.port import Call, Port, Script, Words, waited
from distributed_state.values import chance

COMMIT = Script("commit", living=True)
READ = Script("read", living=True)
READ_ITEMS = Script("items", living=True)
LIST_ITEMS = Script("list_items", living=True)
UNCHANGED = Script("unchanged", living=True)
HYDRATE = Script("hydrate", living=True)
MARK_ARCHIVED = Script("mark_archived", living=True)
TRIM = Script("trim", living=True)
MARK = Script("mark", living=True)
TAIL = Script("tail", living=True)
CLAIM = Script("claim")
JOIN = Script("join")
MINT = Script("mint", living=True)
INSTALL = Script("install", living=True)
RENAME = Script("rename", living=True)
RESERVE = Script("reserve", living=True)
DISCARD = Script("discard", living=True)
DROP = Script("drop")
REWRITE = Script("rewrite")
EMIT = Script("emit", living=True)
INTEREST = Script("interest")
ADVANCE = Script("advance")
BEAT = Script("beat")
REVOKE = Script("revoke")
ROLL = Script("roll")
PRUNE = Script("prune")
DUE = Script("due")
DEFER = Script("defer")
FILL = Script("fill")
REDACT = Script("redact")
ACQUIRE = Script("acquire", living=True)
RELEASE = Script("release")
RENEW = Script("renew", living=True)
OUTPUT = Script("output", living=True)
FOLLOW = Script("follow", living=True)
STOP = Script("stop", living=True)
SHED = Script("shed")
PROBE = Script("probe", living=True)
CONFIRM = Script("confirm", living=True)


class RetryingClient:
    """Sends commands and scripts to Redis, and repeats them while it does not answer."""

    def __init__(self, port: Port, retry_for: float, timeout: float) -> None:
        self.port = port
        self._retry_for = retry_for
        self._limit = retry_for or timeout
        self.retried = 0

    def left(self) -> float:
        """Return the seconds for which the present call may still wait for Redis."""
        account = waited.present()
        return max(0.0, self._limit - (0.0 if account is None else account.seconds(self.port.monotonic())))

    async def command(self, *words: Any) -> Any:
        """Execute one command, which may run twice."""
        return await self.retry(self.port.command, *words)

    async def commands(self, commands: Sequence[Words]) -> list[Any]:
        """Execute commands in one round trip. Raises the first error reply."""
        return await self.retry(self.port.commands, commands)  # type: ignore[no-any-return]  # a list, as there

    async def script(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        """Call one script, which may run twice."""
        return await self.retry(self.port.script, script, keys, arguments)

    async def scripts(self, calls: Sequence[Call]) -> list[Any]:
        """Call scripts in one round trip. An error reply is returned in its place.

        Some of several servers may be down: only the calls to these are sent again.
        """
        return await self.missing(len(calls), lambda left: self.port.scripts([calls[at] for at in left]))

    async def missing(self, count: int, ask: Callable[[list[int]], Awaitable[list[Any]]]) -> list[Any]:
        """Ask until there are `count` answers: `ask` gets the places of those that are missing.

        An answer that is still missing after `retry_for` seconds is WarmUnavailable; raised if all are.
        """
        answers: list[Any] = [None] * count
        left = list(range(count))

        async def attempt() -> None:
            for at, answer in zip(left, await ask(left), strict=True):
                answers[at] = answer
            left[:] = [at for at in left if isinstance(answers[at], WarmUnavailable)]
            if left:
                raise answers[left[0]]

        try:
            await self.retry(attempt)
        except WarmUnavailable:
            if len(left) == count:
                raise
        return answers

    @waited.one_call
    async def retry(self, call: Any, *arguments: Any) -> Any:
        """Repeat while Redis does not answer, with jitter, until its call has waited for `retry_for` seconds."""
        try:
            return await call(*arguments)
        except WarmUnavailable as error:
            return await self.again(error, call, *arguments)
        except Backpressure as error:
            self.full(error)
            raise

    def full(self, error: Backpressure) -> None:
        """Called when a server had no memory for a write."""

    async def again(self, first: WarmUnavailable, call: Any, *arguments: Any) -> Any:
        """Repeat a failed call, with jitter, for the rest of `retry_for`; then raise the first error."""
        began = self.port.monotonic()
        pause = 0.02
        with waited.call() as account:
            while (left := self._retry_for - account.seconds(self.port.monotonic())) > 0:
                self.retried += 1
                await self.port.sleep(min(left, pause * chance.source.uniform(0.5, 1.0)))
                pause = min(pause * 2, 0.5)
                account.add(began)
                try:
                    return await call(*arguments)
                except WarmUnavailable:
                    account.add(began)
        raise first
