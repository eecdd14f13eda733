"""A client of fakeredis that is called, not connected. Law: only this module uses private names of fakeredis.

fakeredis offers only redis-py's connections, which write each command as RESP for it to parse again. Below them,
`_process_command` takes the words of a command, `put_response` takes the reply, and `_decode_error` makes an error,
like redis-py without the first word, which is its kind.

Imported only where a store is embedded, as it takes a quarter of a second.

Design: section 19.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from fakeredis import FakeServer
from fakeredis._socket import FakeSocket
from fakeredis.commands_mixins.scripting_mixin import LUA_MODULE

from distributed_state.port.commands import ReplyError

_BYTECODE = b"\x1bLua"  # how Lua marks a compiled chunk

# A fakeredis without these fails here, not at the first command; one that no longer calls them fails the tests.
if missing := {"_process_command", "_decode_error", "put_response", "eval"} - set(dir(FakeSocket)):
    raise ImportError(f"its FakeSocket has no {', '.join(sorted(missing))}")


class EmbeddedClient(FakeSocket):
    """Serves one caller at a time. It holds the server's lock during a command, so each is atomic."""

    def __init__(self, server: FakeServer, hear: Callable[[Any], None] | None = None) -> None:
        """Make a client; `hear`, if given, gets its replies and received messages."""
        super().__init__(server, db=0, client_class=EmbeddedClient)
        self._answers: list[Any] = []
        self._hear = hear

    def answers(self, commands: Sequence[list[bytes]]) -> list[Any]:
        """Execute commands in order, and return the replies."""
        answers = self._answers = []
        for words in commands:
            self._process_command(words)
        return answers

    def put_response(self, msg: Any) -> None:
        """Called with the server's lock held if it was published, so nothing here may need the lock."""
        # RESP2 has no booleans.
        answer = int(msg) if isinstance(msg, bool) else msg
        if self._hear is None:
            self._answers.append(answer)
        else:
            self._hear(answer)

    def _decode_error(self, error: Any) -> Any:
        return ReplyError(error.value)

    def eval(self, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        """Call fakeredis' EVAL with the compiled script; fakeredis compiles at each call, 100 us for a commit."""
        if not script.startswith(_BYTECODE):
            sha, script = hashlib.sha1(script, usedforsecurity=False).hexdigest().encode(), compiled(script)
            self._server.script_cache[sha] = script
        return super().eval(script, numkeys, *keys_and_args)

    def leave(self) -> None:
        """Unsubscribe. The channels lose a subscriber at once, not when Python collects the object."""
        self._process_command([b"SUNSUBSCRIBE"])
        self.close()


@lru_cache(maxsize=256)
def compiled(script: bytes) -> bytes:
    """Return the compiled script; unchanged if it cannot be compiled, as the server reports that best."""
    lua = LUA_MODULE.LuaRuntime(encoding=None)
    try:
        return bytes(lua.eval("string.dump")(lua.compile(script)))
    except LUA_MODULE.LuaError:
        return script
