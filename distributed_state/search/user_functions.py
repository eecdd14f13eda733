"""Calls what the user gave: `embed`, an index of the user's own. Law: whatever it raises, the caller gets a StateError.

Design: section 21.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from distributed_state.errors import ConfigurationError, StateError, Unavailable
from distributed_state.port import Port
from distributed_state.search.setting import Setting

_HARMLESS = "text"


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
