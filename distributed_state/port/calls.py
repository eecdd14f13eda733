"""Commands and scripts, the same on both faces, on top of a port's `exchange`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.exceptions as driver

from distributed_state.port import Call, Script, Words
from distributed_state.port.errors import translate

_TOGETHER = 1000  # answers of one exchange wait in the server's memory until all commands are sent


class Calls:
    """Law: a script that the server does not know is sent with its text, once."""

    _place: str

    async def exchange(self, commands: Sequence[Words]) -> list[Any]:
        raise AssertionError("the port's own")

    async def command(self, *words: Any) -> Any:
        return self._checked((await self.exchange((words,)))[0])

    async def script(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        words = script.call(keys, arguments)
        answer = (await self.exchange((words,)))[0]
        if isinstance(answer, driver.NoScriptError):
            return await self.command(*script.first_call(words))
        return self._checked(answer)

    async def scripts(self, calls: Sequence[Call]) -> list[Any]:
        words = [script.call(keys, arguments) for script, keys, arguments in calls]
        answers = await self._together(words)
        missing = [at for at, answer in enumerate(answers) if isinstance(answer, driver.NoScriptError)]
        if missing:
            # The first call of each script brings its text; those behind it find it there.
            first = {calls[at][0]: at for at in reversed(missing)}
            again = [calls[at][0].first_call(words[at]) if at in first.values() else words[at] for at in missing]
            for at, answer in zip(missing, await self._together(again), strict=True):
                answers[at] = answer
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
