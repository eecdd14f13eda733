"""Commands and scripts, the same on both faces, on top of a port's `exchange`.

Each server has a script cache of its own, which is empty after a restart, a failover and SCRIPT FLUSH: of the scripts
of one exchange it may know the second and not the first. Law: each script runs after all that stand before it in its
exchange. What ran too early is sent once more after those whose text the server had to be sent; so every script that is
sent with others is one that may be repeated.

Design: sections 4, 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.exceptions as driver

from distributed_state.port import Call, Script, Words
from distributed_state.port.errors import translate

_TOGETHER = 1000  # answers of one exchange wait in the server's memory until all commands are sent


class Calls:
    """What a port can do beside `exchange`."""

    _place: str

    async def exchange(self, commands: Sequence[Words]) -> list[Any]:
        raise AssertionError("the port's own")

    def node_of(self, key: bytes) -> str:
        return self._place

    def nodes(self) -> list[str]:
        return [self._place]

    async def exchange_with(self, node: str, commands: Sequence[Words]) -> list[Any]:
        return await self.exchange(commands)

    async def relocate(self) -> None:
        return None

    async def command(self, *words: Any) -> Any:
        return self._checked((await self.exchange((words,)))[0])

    async def command_with(self, node: str, *words: Any) -> Any:
        return self._checked((await self.exchange_with(node, (words,)))[0])

    async def commands(self, commands: Sequence[Words]) -> list[Any]:
        return [self._checked(answer) for answer in await self.exchange(commands)]

    async def script(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        words = script.call(keys, arguments)
        answer = (await self.exchange((words,)))[0]
        if isinstance(answer, driver.NoScriptError):
            return await self.command(*script.first_call(words))
        return self._checked(answer)

    async def scripts(self, calls: Sequence[Call]) -> list[Any]:
        words = [script.call(keys, arguments) for script, keys, arguments in calls]
        answers = await self._together(words)
        # Again and again, as the cache may be emptied meanwhile; each time the first that was unknown is done.
        while unknown := [at for at, answer in enumerate(answers) if isinstance(answer, driver.NoScriptError)]:
            again = words[unknown[0] :]
            # The first call of each script brings its text; those after it find it there.
            for script in {calls[at][0] for at in unknown}:
                at = next(at for at, call in enumerate(calls[unknown[0] :]) if call[0] is script)
                again[at] = script.first_call(again[at])
            answers[unknown[0] :] = await self._together(again)
        return [translate(each, self._place) if isinstance(each, Exception) else each for each in answers]

    async def _together(self, words: Sequence[Words]) -> list[Any]:
        answers: list[Any] = []
        for at in range(0, len(words), _TOGETHER):
            answers += await self.exchange(words[at : at + _TOGETHER])
        return answers

    def _checked(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise translate(answer, self._place) from answer
        return answer
