"""Tool calls in stored messages, and the number of tokens of a message. Law: only what a model is sent is counted.

A counter is any callable that takes a Message and returns an int. Timestamps, metadata and unknown fields are not
counted. A malformed call or result is not treated as one.

Design: section 13.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from distributed_state.errors import ConfigurationError, InvalidValue
from distributed_state.values.model import Message


class Call(NamedTuple):
    """One tool call: `arguments` is JSON text, as in the OpenAI chat format; `id` is '' if it has none."""

    id: str
    name: str
    arguments: str


def calls(message: Message) -> list[Call]:
    """The tool calls that a message makes, in `tool_calls` or as `tool_use` blocks of its content."""
    found = [_call(each) for each in _list(message.tool_calls)]
    found += [_call(block) for block in blocks(message, "tool_use")]
    return [call for call in found if call is not None]


def results(message: Message) -> list[str]:
    """The ids of the calls that a message answers."""
    found = [message.tool_call_id] if message.role == "tool" else []
    found += [block.get("tool_use_id") for block in blocks(message, "tool_result")]
    return [id for id in found if isinstance(id, str) and id]


def blocks(message: Message, kind: str) -> list[dict[str, Any]]:
    """The parts of one type in a message's content."""
    return [part for part in _list(message.content) if isinstance(part, dict) and part.get("type") == kind]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _call(raw: Any) -> Call | None:
    """From the shape of OpenAI, of Anthropic, of LangChain or of a ToolCall."""
    if not isinstance(raw, dict):
        return None
    function = raw.get("function")
    inner: dict[str, Any] = function if isinstance(function, dict) else raw
    name = inner.get("name") or inner.get("tool_name")
    if not isinstance(name, str):
        return None
    given: Any = next((inner[key] for key in ("arguments", "args", "input") if inner.get(key) is not None), {})
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return Call(str(raw.get("id") or raw.get("call_id") or ""), name, arguments)


Counter = Callable[[Message], int]

# What chat formats spend around each message, as OpenAI documents it for its models; others differ by a token or two.
_PER_MESSAGE = 4
_PER_NAME = 1
_PER_CALL = 8
# An image costs up to about this much (Anthropic: width * height / 750, at most some 1,600; OpenAI: up to 1,105).
_PER_IMAGE = 1600
_IMAGES = {"image", "image_url", "input_image"}
_WORD = re.compile(r"[A-Za-z]+|[0-9]+|[^A-Za-z0-9\s]|\n|[^\S\n]{2,}")


def estimate(message: Message) -> int:
    """Estimate the tokens of a message, without any dependency.

    ASCII text: a word is one token and one more for every six letters after the first (random letters, as in keys:
    one for every two), digits go three to a token, every other character is one. Other characters count as
    many tokens as they have bytes in UTF-8, less one, which is more than most models take. An image counts 1,600. It
    is an estimate, not a bound; give a counter of your model's own where it must be exact.
    """
    return _count(message, _estimate_text)


def _estimate_text(text: str) -> int:
    if text.isascii():
        return sum(_estimate_word(word) for word in _WORD.findall(text))
    ascii_part = "".join(letter if letter < "\x80" else "\x00" for letter in text).replace("\x00", " ")
    others = (len(letter.encode("utf-8", "surrogatepass")) - 1 for letter in text if letter >= "\x80")
    return _estimate_text(ascii_part) + sum(others)


def _estimate_word(word: str) -> int:
    size = len(word)
    if word[0].isdigit():
        return (size + 2) // 3
    if not word[0].isalpha():
        return 1
    return 1 + (size - 1) // 6 if size <= 20 else (size + 1) // 2


def tiktoken_counter(model_or_encoding: Any) -> Counter:
    """Make a counter that counts text exactly, with tiktoken (extra `tokens`).

    Takes the name of an OpenAI model or of an encoding, or a `tiktoken.Encoding`. tiktoken downloads an encoding at
    its first use; where there is no network, point TIKTOKEN_CACHE_DIR to a copy. What surrounds text (roles, calls,
    images) is counted as `estimate` counts it. Raises ConfigurationError if tiktoken or the encoding is missing.
    """
    encoding = _encoding(model_or_encoding) if isinstance(model_or_encoding, str) else model_or_encoding
    if not callable(getattr(encoding, "encode", None)):
        raise InvalidValue(f"tiktoken_counter takes a name or a tiktoken.Encoding, not {model_or_encoding!r:.80}")

    def count(message: Message) -> int:
        # Text such as <|endoftext|> in a conversation is text, not a command to the model.
        return _count(message, lambda text: len(encoding.encode(text, disallowed_special=())))

    return count


def _encoding(name: str) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise ConfigurationError("tiktoken is not installed: pip install 'distributed-state[tokens]'") from error
    known = tiktoken.list_encoding_names()
    try:
        encoding = name if name in known else tiktoken.encoding_name_for_model(name)
    except KeyError as error:
        text = f"tiktoken knows neither a model nor an encoding {name!r}; encodings: {', '.join(known)}"
        raise ConfigurationError(text) from error
    try:
        return tiktoken.get_encoding(encoding)
    except Exception as error:  # whatever its download, its cache and its parser may raise
        raise ConfigurationError(
            f"the tiktoken encoding {encoding} cannot be loaded: {error}; without a network, point "
            "TIKTOKEN_CACHE_DIR to a folder that has it, or give a tiktoken.Encoding"
        ) from error


def counted(counter: Counter, message: Message) -> int:
    """What a counter says of a message. Raises InvalidValue if that is no count."""
    count = counter(message)
    if type(count) is not int or count < 0:
        raise InvalidValue(f"a counter returns an int from 0 on, this one returned {count!r:.80}")
    return count


def _count(message: Message, text_tokens: Callable[[str], int]) -> int:
    total = _PER_MESSAGE + (_PER_NAME if message.name else 0)
    for text in _texts(message):
        total += _PER_IMAGE if text is None else text_tokens(text)
    return total + _PER_CALL * len(calls(message))


def _texts(message: Message) -> Iterator[str | None]:
    """Every text of a message, and None for an image. One without a role is what its framework makes of it: all."""
    if message.role is None:
        yield json.dumps(message.to_dict(), ensure_ascii=False)
        return
    yield from (text for text in (message.name, message.tool_call_id) if isinstance(text, str))
    yield from (text for call in calls(message) for text in call)
    yield from _parts(message.content)


def _parts(content: Any) -> Iterator[str | None]:
    for part in [content] if isinstance(content, str) else content or []:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            yield part
        elif kind in _IMAGES:
            yield None
        elif kind == "text" and isinstance(part.get("text"), str):
            yield part["text"]
        elif kind == "tool_result":
            yield from _parts(part.get("content"))
        elif kind != "tool_use":  # that is counted as a call
            yield json.dumps(part, ensure_ascii=False)
