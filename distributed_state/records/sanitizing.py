"""Prepares a value for storing. Law: a value is converted only if the caller asked for it.

The order is: `on_invalid="stringify"`, the handle's hook, the store's hook. The result must be a JSON value, or bytes.

Design: section 4.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypedDict

from distributed_state.errors import InvalidValue, StateError
from distributed_state.values import codec
from distributed_state.values.model import Message

OnInvalid = Literal["error", "stringify"]
Clean = Callable[[str, Any], Any]
CleanMessage = Callable[[Message], Message]
_DEEPEST = 200


class Sanitizing(TypedDict, total=False):
    """The options of a handle that concern stored values."""

    on_invalid: OnInvalid
    clean: Clean | None
    clean_messages: CleanMessage | None


class Options(Sanitizing, total=False):
    """The options of any handle."""

    actor: str


class ContextOptions(Options, total=False):
    """The options of a context: the owner, whether the id was generated here, the idle time and the end in ms."""

    user: str | None
    fresh: bool
    lifetime: tuple[int, int]


class SessionOptions(Options, total=False):
    """The options of a session's handle."""

    idle: float | None
    lifetime: float | None


class Sanitizer:
    """Prepares fields and messages of one handle."""

    def __init__(self, on_invalid: str, clean: list[Clean], clean_messages: list[CleanMessage]) -> None:
        if on_invalid not in ("error", "stringify"):
            raise InvalidValue(f"on_invalid is 'error' or 'stringify', not {on_invalid!r:.80}")
        self._stringify = on_invalid == "stringify"
        self._clean = clean
        self._clean_messages = clean_messages

    def field(self, key: str, value: Any) -> Any:
        """The value to store for this one."""
        if self._stringify and not isinstance(value, bytes):
            value = stringified(value, repr(key))
        for hook in self._clean:
            given = value
            value = _call(hook, repr(key), key, value)
            if value is None and given is not None:
                raise InvalidValue(f"{key!r}: the clean hook returned None; it must return the value to store")
        return value

    def message(self, message: Message | dict[str, Any]) -> Message | dict[str, Any]:
        """The message to store for this one."""
        if self._stringify:
            fields = message.to_dict() if isinstance(message, Message) else message
            message = stringified(fields, "message") if isinstance(fields, dict) else fields
        for hook in self._clean_messages:
            message = message if isinstance(message, Message) else codec.as_message(message)
            message = _call(hook, "message", message)
            if not isinstance(message, Message):
                raise InvalidValue(
                    f"message: the clean_messages hook returned a {type(message).__name__}, not a Message"
                )
        return message


def sanitizer(options: Sanitizing, clean: Clean | None, clean_messages: CleanMessage | None) -> Sanitizer | None:
    """A sanitizer for a handle's options and its store's hooks; None if nothing was chosen."""
    if not options and clean is None and clean_messages is None:
        return None
    fields = [hook for hook in (options.get("clean"), clean) if hook is not None]
    messages = [hook for hook in (options.get("clean_messages"), clean_messages) if hook is not None]
    unknown = options.keys() - Sanitizing.__annotations__.keys()
    if unknown:
        raise TypeError(f"a handle has no option {', '.join(sorted(unknown))}")
    for hook in (*fields, *messages):
        if not callable(hook) or inspect.iscoroutinefunction(hook):
            raise InvalidValue(f"a clean hook is a plain function, not {hook!r:.80}")
    return Sanitizer(options.get("on_invalid", "error"), fields, messages)


def _call(hook: Callable[..., Any], place: str, *given: Any) -> Any:
    try:
        return hook(*given)
    except StateError:
        raise
    except Exception as error:
        raise InvalidValue(f"{place}: the clean hook raised {type(error).__name__}: {error}") from error


def stringified(value: Any, place: str) -> Any:
    """The same value with `str()` of everything that JSON cannot hold, at any depth; tuples become lists.

    Raises InvalidValue for a value that contains itself, is nested too deep, or has two keys with the same text.
    """
    return _stringified(value, place, ())


def _stringified(value: Any, place: str, around: tuple[int, ...]) -> Any:
    if not isinstance(value, (dict, list, tuple)):
        return _leaf(value, place)
    if id(value) in around:
        raise InvalidValue(f"{place}: contains itself")
    if len(around) > _DEEPEST:
        raise InvalidValue(f"{place:.200}: nested more than {_DEEPEST} levels deep")
    around = (*around, id(value))
    if not isinstance(value, dict):
        return [_stringified(item, f"{place}[{at}]", around) for at, item in enumerate(value)]
    found = {}
    for key, item in value.items():
        name = key if type(key) is str else _text(key, place)
        if name in found:
            raise InvalidValue(f"{place}: two keys become {name!r:.80}")
        found[name] = _stringified(item, f"{place}[{name!r:.80}]", around)
    return found


def _leaf(value: Any, place: str) -> Any:
    if type(value) in (str, bool) or value is None:
        return value
    try:
        codec.encode(value)
    except InvalidValue:
        return _text(value, place)
    return value


def _text(value: Any, place: str) -> str:
    try:
        return str(value)
    except Exception as error:
        raise InvalidValue(f"{place}: str() of a {type(value).__name__} raised {type(error).__name__}") from error
