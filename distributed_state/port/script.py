"""A Lua script and the words that call it. Law: what the server is sent is the file, its includes and its constants.

Design: section 4.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

Filled = tuple[Any, ...]
Words = Filled | list[Any]  # a list is a call that is told the life of the connection it is sent on: see `lives`

_CONSTANT = re.compile(rb"^local (\w+) = (\d+) -- @constant", re.MULTILINE)
_INCLUDE = re.compile(rb"^[ \t]*--+[ \t]*@include(.*)$", re.MULTILINE)


class _ReadOnce:
    """What is made at the first use and kept in the object. Law: without a lock.

    functools.cached_property of Python 3.11 has one for all objects: a child that was forked while a thread of its
    parent read a script could read none ever after. Made twice at once, it is the same.
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

    A line `-- @include name` stands for the text of `lua/include/name.lua`. `living`: its first argument is the life of
    the data that the connection was made in. `constants`: those that do not stand in that text.
    """

    name: str
    living: bool = False
    constants: tuple[tuple[str, int], ...] = ()

    @_ReadOnce
    def text(self) -> bytes:
        """What the server is sent, includes and all. Raises FileNotFoundError for an include that is not there."""
        folder = resources.files("distributed_state").joinpath("warm", "lua")
        text = folder.joinpath(f"{self.name}.lua").read_bytes()
        # Never passed over in silence: to Lua the line is a comment, and the script would run without that piece.
        return _INCLUDE.sub(
            lambda line: folder.joinpath("include", f"{line[1].strip().decode()}.lua").read_bytes(), text
        )

    @_ReadOnce
    def sha(self) -> bytes:
        """The digest by which the server knows the script once it is loaded."""
        return hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()

    def given(self, **constants: int) -> Script:
        """The script with these numbers in its lines `local name = number -- @constant`; itself if they stand there."""
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
        """The words of one EVALSHA. The first argument of a living script may be a tuple: constants of every call."""
        if self.living:
            return [b"EVALSHA", self.sha, len(keys), *keys, b"", *arguments]
        return (b"EVALSHA", self.sha, len(keys), *keys, *arguments)

    def first_call(self, words: Words) -> Words:
        """The same call for a server that does not know the script yet."""
        first = [b"EVAL", self.text, *words[2:]]
        return first if isinstance(words, list) else tuple(first)
