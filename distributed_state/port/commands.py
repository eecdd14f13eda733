"""Commands as bytes, Lua scripts as commands, and error replies.

Law: only this module encodes words, and translates errors of servers and the driver into those of the package.

hiredis can encode commands too, but it does not check the result of converting a number to text: a signal handler that
raised meanwhile, or an integer too long to be written, crashed the interpreter (SIGSEGV in `pack_command`).

The text of a script that is sent to a server is its file with its includes and its constants.

Design: sections 4, 19.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import redis.exceptions as driver

from distributed_state.errors import Backpressure, ConfigurationError, NotPermitted, StateError, WarmUnavailable

LOST = (driver.ConnectionError, driver.TimeoutError, OSError, EOFError)
BROKEN = (driver.RedisError, *LOST)
ELSEWHERE = frozenset(("READONLY", "CLUSTERDOWN", "MASTERDOWN"))  # another server may have the keys now
_AWAY = ELSEWHERE | {"MOVED", "ASK", "TRYAGAIN", "LOADING", "BUSY", "NOREPLICAS", "UNBLOCKED"}
_DISK = "MISCONF"  # the server cannot write its append-only file, or its RDB file
_OF_A_REPLICA = "cannot be used with replica instances"  # the answer to WAIT and WAITAOF

ONE_OF_A_CLUSTER = "this server belongs to a cluster, which a Unix socket cannot reach: use redis+cluster://host:port"


class ReplyError(Exception):
    """An error reply of the server; `word` is its first word, such as "NOSCRIPT"."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.word = text.partition(" ")[0]

    @property
    def demoted(self) -> bool:
        """Whether the error says that the server is a replica."""
        return self.word == "READONLY" or _OF_A_REPLICA in str(self)


def translate(error: BaseException, place: str) -> StateError:
    """Translate an error of the server or of the driver into one of the package.

    `place` is the server without its password.
    """
    if isinstance(error, StateError):
        return error
    text = str(error)
    word = text.partition(" ")[0]
    if isinstance(error, (driver.AuthenticationError, driver.AuthorizationError)) or word in ("WRONGPASS", "NOAUTH"):
        return NotPermitted(f"{place}: the server refused user name or password ({text})")
    if isinstance(error, driver.NoPermissionError) or word == "NOPERM":
        return NotPermitted(f"{place}: the user lacks a right: {text}")
    if isinstance(error, driver.InvalidResponse):
        return ConfigurationError(f"{place}: the server at this address is not Redis or Valkey ({text[:80]})")
    if refused := [each for each in _causes(error) if isinstance(each, ssl.SSLCertVerificationError)]:
        return ConfigurationError(f"{place}: the server's certificate is not trusted: {refused[0].verify_message}")
    if isinstance(error, driver.OutOfMemoryError) or word == "OOM":
        return Backpressure(f"{place}: Redis is at maxmemory and nothing more is evictable; nothing was written")
    if text == ONE_OF_A_CLUSTER:
        return ConfigurationError(f"{place}: {text}")
    if "SELECT is not allowed in cluster mode" in text:
        return ConfigurationError(f"{place}: this is a server of a cluster, which has only database 0")
    if word == "TRYAGAIN":
        return WarmUnavailable(f"{place}: the keys are on their way to another server of the cluster ({text})")
    if word == _DISK:
        return WarmUnavailable(
            f"{place}: Redis refuses writes until it can write to its disk: make room there, or see its log ({text})"
        )
    # The driver removes the error word from its text.
    demoted = isinstance(error, driver.ReadOnlyError) or (isinstance(error, ReplyError) and error.demoted)
    if demoted or isinstance(error, LOST) or word in _AWAY:
        away = WarmUnavailable(f"{place}: {text or type(error).__name__}")
        away.demoted = demoted
        return away
    return ConfigurationError(f"{place}: {type(error).__name__}: {text}")


def of_its_disk(error: StateError) -> bool:
    """Whether a server refuses writes because it cannot write to its disk."""
    return f"({_DISK} " in str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes within one attempt; a handshake's own error is below the driver's."""
    while error is not None and not isinstance(error, StateError):
        yield error
        error = error.__cause__ or error.__context__


_HEADS = [b"$%d\r\n" % length for length in range(1000)]


def encode(word: Any) -> bytes:
    """Encode one word. Raises TypeError if it is not a word, and ValueError if it cannot be written."""
    if type(word) is bytes:
        return word
    if isinstance(word, str):
        return word.encode()
    if type(word) is int:
        return b"%d" % word
    if isinstance(word, float):
        return float.__repr__(word).encode()  # not the object's own __repr__, which may be overridden
    if isinstance(word, bytes | memoryview):
        return bytes(word)
    raise TypeError(f"a word of a command is bytes, str, int or float, not {type(word).__name__}")


def write(words: Iterable[Any]) -> bytes:
    """Encode words, without the count that begins a command."""
    parts: list[bytes] = []
    for word in words:
        if (kind := type(word)) is not bytes:
            word = word.encode() if kind is str else b"%d" % word if kind is int else encode(word)
        length = len(word)
        parts += (_HEADS[length] if length < 1000 else b"$%d\r\n" % length, word, b"\r\n")
    return b"".join(parts)


def packed(words: Sequence[Any]) -> bytes:
    """Encode one command."""
    return b"*%d\r\n%b" % (len(words), write(words))


Filled = tuple[Any, ...]
Words = Filled | list[Any]  # a list is a call that is sent with the data id of its connection: see `identities`
_KEPT = 1000  # cached beginnings of calls for each connection, of some 500 bytes each


def filled(words: Words, data_id: str) -> Filled:
    """Return a command as it is sent on a connection with this data id."""
    if type(words) is tuple:
        return words
    at = 3 + words[2]
    words[at] = data_id  # type: ignore[index]  # a list: the place may hold the value of an earlier sending
    if len(words) > at + 1 and type(words[at + 1]) is tuple:  # its constants
        return (*words[: at + 1], *words[at + 1], *words[at + 2 :])
    return tuple(words)


class Packer:
    """Encodes commands as they are sent on one connection, with its data id.

    The words with which a call of a script on these keys begins, including its constants (see `Script.call`), are
    encoded once and cached: encoding thirty words takes a tenth of the time of a commit.
    """

    __slots__ = ("_beginnings", "data_id")

    def __init__(self, data_id: str = "") -> None:
        self.data_id = data_id
        self._beginnings: dict[tuple[Any, ...], bytes] = {}

    def pack(self, commands: Sequence[Words]) -> bytes:
        """Encode commands."""
        if len(commands) == 1:
            return self._packed(commands[0])
        return b"".join(map(self._packed, commands))

    def _packed(self, words: Words) -> bytes:
        if type(words) is tuple:
            return packed(words)
        at = 4 + words[2]  # after the data id
        constants = words[at] if len(words) > at else None
        if type(constants) is not tuple or words[0] != b"EVALSHA":
            return packed(filled(words, self.data_id))
        name = (words[1], *words[3 : at - 1], constants)  # all keys: calls on one record may differ in any of them
        beginning = self._beginnings.get(name)
        if beginning is None:
            beginning = self._begin(name, (*words[: at - 1], self.data_id, *constants))
        count = len(words) - 1 + len(constants)
        return b"*%d\r\n%b%b" % (count, beginning, write(words[at + 1 :]))

    def _begin(self, name: tuple[Any, ...], words: Filled) -> bytes:
        if len(self._beginnings) >= _KEPT:
            self._beginnings.clear()
        beginning = self._beginnings[name] = write(words)
        return beginning


_CONSTANT = re.compile(rb"^local (\w+) = (\d+) -- @constant", re.MULTILINE)
_INCLUDE = re.compile(rb"^[ \t]*--+[ \t]*@include(.*)$", re.MULTILINE)


class _ReadOnce:
    """An attribute that is made at its first use and kept in the object. Law: no lock.

    functools.cached_property of Python 3.11 has one lock for all objects: a child that was forked while a thread of its
    parent read a script could never read one. If it is made twice at once, both results are equal.
    """

    def __init__(self, make: Callable[[Any], bytes]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        made = vars(owner)[self._make.__name__] = self._make(owner)
        return made


@dataclass(frozen=True)
class Script:
    """A Lua script by name; its text is read from the package once.

    A line `-- @include name` stands for the text of `lua/include/name.lua`. `living`: its first argument is the data id
    of its connection. `constants`: those that differ from the text of the file.
    """

    name: str
    living: bool = False
    constants: tuple[tuple[str, int], ...] = ()

    @_ReadOnce
    def text(self) -> bytes:
        """Return the text with its includes. Raises FileNotFoundError for a missing include."""
        folder = resources.files("distributed_state").joinpath("warm", "lua")

        text = folder.joinpath(f"{self.name}.lua").read_bytes()
        # A missing include is an error: to Lua the line is a comment, and the script would run without that part.
        return _INCLUDE.sub(
            lambda line: folder.joinpath("include", f"{line[1].strip().decode()}.lua").read_bytes(), text
        )

    @_ReadOnce
    def sha(self) -> bytes:
        """The digest by which the server knows the script once it is loaded."""
        return hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()

    def given(self, **constants: int) -> Script:
        """Return the script with these numbers in its lines `local name = number -- @constant`."""
        stand = {name.decode(): int(number) for name, number in _CONSTANT.findall(self.text)}
        if constants.keys() - stand.keys():
            raise ValueError(f"{self.name}.lua has the constants {', '.join(stand)}, not {', '.join(constants)}")
        others = tuple((name, number) for name, number in sorted(constants.items()) if number != stand[name])
        if not others:
            return self
        script = Script(self.name, self.living, others)
        numbers = {name.encode(): b"%d" % number for name, number in others}
        vars(script)["text"] = _CONSTANT.sub(
            lambda line: b"local %b = %b -- @constant" % (line[1], numbers.get(line[1], line[2])), self.text
        )
        return script

    def call(self, keys: Sequence[bytes], arguments: Sequence[Any]) -> Words:
        """Return the words of one EVALSHA.

        The first argument of a living script may be a tuple: constants of every call.
        """
        if self.living:
            return [b"EVALSHA", self.sha, len(keys), *keys, b"", *arguments]
        return (b"EVALSHA", self.sha, len(keys), *keys, *arguments)

    def first_call(self, words: Words) -> Words:
        """Return the same call for a server that does not know the script yet."""
        first = [b"EVAL", self.text, *words[2:]]
        return first if isinstance(words, list) else tuple(first)
