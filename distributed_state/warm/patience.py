"""The one place for patience: what gets no answer is sent again until its call has waited for `retry_for` seconds.

Law: whoever has a caller waiting asks through this, and only what may be carried out twice. What has a loop of its own
uses the port, which tries once.

Design: section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_state.errors import Backpressure, WarmUnavailable
from distributed_state.port import Call, Port, Script, Words, waited
from distributed_state.values import chance


class Patience:
    """A port that is asked again while Redis does not answer."""

    def __init__(self, port: Port, retry_for: float, timeout: float) -> None:
        self.port = port
        self._retry_for = retry_for
        self._limit = retry_for or timeout
        self.retried = 0

    def left(self) -> float:
        """Seconds for which the present call may wait yet for somebody who waits for Redis."""
        account = waited.present()
        return max(0.0, self._limit - (0.0 if account is None else account.seconds(self.port.monotonic())))

    async def command(self, *words: Any) -> Any:
        """One command, patiently; one that may be carried out twice."""
        return await self.patiently(self.port.command, *words)

    async def commands(self, commands: Sequence[Words]) -> list[Any]:
        """Commands in one round trip, patiently. Raises the first answer that is an error."""
        return await self.patiently(self.port.commands, commands)  # type: ignore[no-any-return]  # a list, as there

    async def script(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        """One script, patiently; one that may be carried out twice."""
        return await self.patiently(self.port.script, script, keys, arguments)

    async def scripts(self, calls: Sequence[Call]) -> list[Any]:
        """Scripts in one round trip, patiently. An answer that is an error is returned in its place.

        Of several servers some may be away: only what they were asked is asked again.
        """
        answers: list[Any] = [None] * len(calls)
        left = list(range(len(calls)))

        async def ask() -> None:
            for at, answer in zip(left, await self.port.scripts([calls[at] for at in left]), strict=True):
                answers[at] = answer
            left[:] = [at for at in left if isinstance(answers[at], WarmUnavailable)]
            if left:
                raise answers[left[0]]

        try:
            await self.patiently(ask)
        except WarmUnavailable:
            if len(left) == len(calls):
                raise
        return answers

    async def patiently(self, call: Any, *arguments: Any) -> Any:
        """Repeat while Redis does not answer, with jitter, until its call has waited for `retry_for` seconds."""
        if waited.present() is None:
            with waited.call():
                return await self._until_answered(call, *arguments)
        return await self._until_answered(call, *arguments)

    async def _until_answered(self, call: Any, *arguments: Any) -> Any:
        try:
            return await call(*arguments)
        except WarmUnavailable as error:
            return await self.again(error, call, *arguments)
        except Backpressure as error:
            self.full(error)
            raise

    def full(self, error: Backpressure) -> None:
        """Hear that a server had no memory for a write."""

    async def again(self, first: WarmUnavailable, call: Any, *arguments: Any) -> Any:
        """Repeat what failed so, with jitter, for what is left of `retry_for`; then raise that first error."""
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
