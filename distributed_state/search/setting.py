"""How a store is searched: what it was opened with, and what its database says. Law: one archive has one answer.

Functions that the user gave (`embed`, an index of the user's own) are called here: whatever they raise, the caller gets
a StateError.

Design: section 21.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import orjson

from distributed_state.cold.search_store import SearchStore
from distributed_state.errors import ConfigurationError, StateError, Unavailable
from distributed_state.port import Port
from distributed_state.values.search import KINDS, Embed, Kind, Search, SearchIndex

OFF = (
    "search: it is off in this namespace: open the store with search=True, or with search=Search(...), "
    "or run `distributed-state index`"
)
_HARMLESS = "text"


class Setting:
    """What a store knows of its index. `lazily`: the first search switches it on."""

    def __init__(self, given: Search | bool | None, *, lazily: bool, migrate: bool) -> None:
        if given is not None and not isinstance(given, (bool, Search)):
            raise ConfigurationError(f"search: give True or Search(...), not {given!r:.80}")
        self._given = Search() if given is True else given or None
        self._never = given is False
        self._lazily = lazily and not self._never
        self._migrate = migrate
        self.on = False
        self.stored = ""  # what the database says, once it was looked at
        self._take(self._given or Search())
        if self._given is not None:
            _require_sense(self._given)

    def _take(self, search: Search) -> None:
        self.language: str = search.language
        self.kinds: tuple[Kind, ...] = search.kinds
        self.encrypted: bool = search.encrypted
        self.dimensions: int | None = search.dimensions
        self.embed: Embed | None = search.embed
        self.index: SearchIndex | None = search.index

    @property
    def wanted(self) -> bool:
        """Whether the store was opened with search."""
        return self._given is not None

    def look_again(self) -> None:
        """It may have been switched off, or made otherwise."""
        self.on = False

    async def renew(self, port: Port, search: SearchStore) -> None:
        """Look whether another process removed it, or made it otherwise."""
        if self.on and await port.sql(search.settings) != self.stored:
            self.on = False

    async def follows(self, port: Port, search: SearchStore) -> bool:
        """Whether there is an index here that this store can follow."""
        if not self.on and not self._never:
            await self._look(port, search, create=self._migrate and self.wanted)
        return self.on and not self._lacking()

    async def require(self, port: Port, search: SearchStore, *, create: bool = False) -> None:
        """Have an index, or raise ConfigurationError: off, other settings, a function that was not given, no right."""
        create = create or (self._migrate and (self.wanted or self._lazily))
        if not self.on and not await self._look(port, search, create=create):
            raise ConfigurationError(OFF)
        if lacking := self._lacking():
            raise ConfigurationError(lacking)

    def _lacking(self) -> str:
        if self.dimensions is not None and self.embed is None:
            return (
                "search: its index has vectors: open the store with the same search=Search(embed=..., dimensions=...)"
            )
        if self._elsewhere and self.index is None:
            return "search: its index is elsewhere: open the store with the same search=Search(index=...)"
        return ""

    async def _look(self, port: Port, search: SearchStore, *, create: bool) -> bool:
        found = await port.sql(search.settings)
        if found is None and create:
            languages = await port.sql(search.languages)
            if self.language not in languages:
                raise ConfigurationError(
                    f"search: no language {self.language!r:.80} here: {', '.join(sorted(languages))}"
                )
            found = await port.sql(search.switch_on, self._text(), self.dimensions)
        if found is None:
            return False
        if self._given is not None and found != self._text():
            raise ConfigurationError(
                f"search: the index was made with {found}, not with {self._text()}: open the store as then, "
                "or remove the index with `distributed-state index --remove` and begin anew"
            )
        self._adopt(orjson.loads(found))
        self.stored, self.on = found, True
        return True

    @property
    def _elsewhere(self) -> bool:
        return self.index is not None or self._made_elsewhere

    _made_elsewhere = False

    def _text(self) -> str:
        values = {"language": self.language, "kinds": sorted(self.kinds), "encrypted": self.encrypted}
        more = {"dimensions": self.dimensions, "elsewhere": self.index is not None}
        return orjson.dumps(values | more, option=orjson.OPT_SORT_KEYS).decode()

    def _adopt(self, found: dict[str, Any]) -> None:
        self.language, self.encrypted, self.dimensions = found["language"], found["encrypted"], found["dimensions"]
        self.kinds = tuple(kind for kind in KINDS if kind in found["kinds"])
        self._made_elsewhere = bool(found["elsewhere"])


def _require_sense(search: Search) -> None:
    if (search.embed is None) != (search.dimensions is None):
        raise ConfigurationError("search: `embed` and `dimensions` are given together")
    if search.dimensions is not None and (type(search.dimensions) is not int or not 1 <= search.dimensions <= 16000):
        raise ConfigurationError(f"search: dimensions is an int from 1 to 16000, not {search.dimensions!r:.80}")
    if search.embed is not None and search.index is not None:
        raise ConfigurationError("search: an index of your own makes its vectors itself: leave out `embed`")
    if not search.kinds or set(search.kinds) - set(KINDS):
        raise ConfigurationError(f"search: kinds are some of {', '.join(KINDS)}, not {search.kinds!r:.80}")
    if not isinstance(search.language, str):
        raise ConfigurationError(f"search: language is a name, not {search.language!r:.80}")


# Functions that the user gave: `embed`, an index of the user's own


async def call_user(port: Port, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the user's returns, be it a coroutine or not. Raises Unavailable whatever it raises."""
    try:
        if inspect.iscoroutinefunction(function):
            return await port.complete(function(*arguments))
        found = await port.thread(function, *arguments)
        return await port.complete(found) if inspect.isawaitable(found) else found
    except StateError:
        raise
    except Exception as error:
        raise Unavailable(f"search: `{what}` failed with {type(error).__name__}: {str(error)[:200]}") from error


async def embedded(port: Port, setting: Setting, texts: list[str]) -> list[str]:
    """A vector of each text, as SQL writes it."""
    if not texts:
        return []
    assert setting.embed is not None
    answer = await call_user(port, "embed", setting.embed, texts)
    try:
        vectors = [[float(number) for number in vector] for vector in answer]
    except Exception as error:  # an object of the user's own may raise anything
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigurationError(f"search: `embed` returned what is no list of vectors ({what})") from error
    if len(vectors) != len(texts):
        raise ConfigurationError(f"search: `embed` returned {len(vectors)} vectors for {len(texts)} texts")
    for vector in vectors:
        if len(vector) != setting.dimensions or not all(map(math.isfinite, vector)):
            what = f"a vector of {len(vector)} numbers, {setting.dimensions} finite ones were announced"
            raise ConfigurationError(f"search: `embed` returned {what}")
    return ["[" + ",".join(map(repr, vector)) + "]" for vector in vectors]


async def embedded_singly(port: Port, setting: Setting, texts: list[str]) -> list[str | None]:
    """The same, and None for a text that `embed` refuses: halved until it is alone. Raises if that refuses any text."""
    try:
        return [*await embedded(port, setting, texts)]
    except StateError:
        # Is it a text of these, or is there no model today? Asked each time: the model may go at any moment.
        await embedded(port, setting, [_HARMLESS])
    if len(texts) == 1:
        try:
            # Once more: its answer may have been lost, and what is left out stays left out until it is changed.
            return [*await embedded(port, setting, texts)]
        except StateError:
            return [None]
    middle = len(texts) // 2
    first = await embedded_singly(port, setting, texts[:middle])
    return first + await embedded_singly(port, setting, texts[middle:])
