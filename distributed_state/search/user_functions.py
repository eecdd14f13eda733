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
    vectors = list(await call_user(port, "embed", setting.embed, texts))
    if len(vectors) != len(texts):
        raise ConfigurationError(f"search: `embed` returned {len(vectors)} vectors for {len(texts)} texts")
    written = []
    for vector in vectors:
        numbers = [float(number) for number in vector]
        if len(numbers) != setting.dimensions or not all(map(math.isfinite, numbers)):
            what = f"a vector of {len(numbers)} numbers, {setting.dimensions} finite ones were announced"
            raise ConfigurationError(f"search: `embed` returned {what}")
        written.append("[" + ",".join(map(repr, numbers)) + "]")
    return written
