"""Messages in the formats of OpenAI, Anthropic and LangChain. Law: calls and results are sent in pairs.

A Message keeps the field names of the OpenAI chat format. Timestamps, metadata and unknown fields are not sent. Every
API refuses a whole conversation because of one result without a call, or one call without a result, so calls and
results are paired before they are converted.

A counter gives the number of tokens of a message: any callable that takes a Message and returns an int. Timestamps,
metadata and unknown fields are not counted. A malformed call or result is not treated as one.

Design: section 13.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from distributed_state.errors import ConfigurationError, InvalidValue
from distributed_state.values import codec
from distributed_state.values.model import Message

__all__ = [
    "from_anthropic",
    "from_langchain",
    "from_openai",
    "tiktoken_counter",
    "to_anthropic",
    "to_langchain",
    "to_openai",
]


class Call(NamedTuple):
    """One tool call: `arguments` is JSON text, as in the OpenAI chat format; `id` is '' for a call without one."""

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
    """A call in the form of OpenAI, of Anthropic, of LangChain or of a ToolCall."""
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

# Chat formats add these tokens to each message, as OpenAI documents for its models; others differ by a token or two.
_PER_MESSAGE = 4
_PER_NAME = 1
_PER_CALL = 8
# An image costs up to about this much (Anthropic: width * height / 750, at most some 1,600; OpenAI: up to 1,105).
_PER_IMAGE = 1600
_IMAGES = {"image", "image_url", "input_image"}
_WORD = re.compile(r"[A-Za-z]+|[0-9]+|[^A-Za-z0-9\s]|\n|[^\S\n]{2,}")


def estimate(message: Message) -> int:
    """Estimate the tokens of a message, without any dependency.

    In ASCII text a word counts one token, plus one for every six letters after the first (for every two in random
    letters such as keys); three digits count one token; every other character counts one. A character that is not ASCII
    counts one token less than its bytes in UTF-8, which is more than most models count. An image counts 1,600. The
    estimate is not an upper bound; use a counter made for your model where the number must be exact.
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

    Takes the name of an OpenAI model or of an encoding, or a `tiktoken.Encoding`. tiktoken downloads an encoding when
    it is first used; without network access, point TIKTOKEN_CACHE_DIR to a copy. Roles, calls and images are counted as
    `estimate` counts them. Raises ConfigurationError if tiktoken or the encoding is missing.
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
    except Exception as error:  # tiktoken's download, cache and parser raise many kinds
        raise ConfigurationError(
            f"the tiktoken encoding {encoding} cannot be loaded: {error}; without a network, point "
            "TIKTOKEN_CACHE_DIR to a folder that has it, or give a tiktoken.Encoding"
        ) from error


def counted(counter: Counter, message: Message) -> int:
    """A counter's result for a message. Raises InvalidValue if that is not a count."""
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
    """Every text of a message, and None for an image. A message without a role is a framework's; all text counts."""
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
        elif kind != "tool_use":  # tool_use is counted as a call
            yield json.dumps(part, ensure_ascii=False)


Orphans = Literal["repair", "refuse"]
NO_RESULT = "(no result was recorded for this call; it may or may not have had an effect)"


@dataclass(slots=True)
class _Step:
    """A message, and its calls with the results found so far."""

    message: Message
    place: int
    calls: list[Call]
    results: list[Message | None] = field(default_factory=list)


def paired(
    messages: Iterable[Message | dict[str, Any]], orphans: Orphans, safe: Callable[[str], str] = str
) -> list[Message]:
    """The messages with the result of each call directly after the call, and every id used only once.

    Calls come out as `tool_calls` in the OpenAI shape and results as messages of the role tool, however they were
    stored. "repair" adds a result to a call without one, which says so, and drops a result without a call. `safe`
    converts an id to one that the receiver accepts.
    """
    if orphans not in ("repair", "refuse"):
        raise InvalidValue(f"orphans is 'repair' or 'refuse', not {orphans!r:.80}")
    steps: list[_Step] = []
    waiting: list[tuple[str, _Step, int]] = []  # calls without a result, the newest last
    for place, given in enumerate(messages):
        message = given if isinstance(given, Message) else codec.as_message(given, f"messages[{place}]")
        if message.role is None:
            raise InvalidValue(f"messages[{place}]: has no role, so it cannot be sent to a model; leave it out")
        for each in plain(message):
            if each.role != "tool":
                step = _Step(each, place, calls(each))
                step.results = [None] * len(step.calls)
                steps.append(step)
                waiting += [(call.id, step, number) for number, call in enumerate(step.calls)]
                continue
            asked = next((one for one in reversed(waiting) if one[0] == (each.tool_call_id or "")), None)
            if asked is not None:
                waiting.remove(asked)
                asked[1].results[asked[2]] = each
            elif observed := _observed(each, place):
                steps.append(observed)
            elif orphans == "refuse":
                raise InvalidValue(f"messages[{place}]: a result of the call {each.tool_call_id!r}, which is missing")
    if waiting and orphans == "refuse":
        name, step, _ = waiting[0]
        raise InvalidValue(f"messages[{step.place}]: the call {name!r} has no result")
    used: set[str] = set()
    return [message for step in steps for message in _written(step, used, safe)]


def _observed(result: Message, place: int) -> _Step | None:
    """The call that `AgentState.record_observation` kept in the metadata of its result; None without one."""
    metadata = result.metadata or {}
    call = _call(metadata.get("tool_call"))
    if call is None or "thought" not in metadata:
        return None
    asking = Message(role="assistant", content=metadata["thought"] or None)
    return _Step(asking, place, [call._replace(id=result.tool_call_id or "")], [result])


def _written(step: _Step, used: set[str], safe: Callable[[str], str]) -> list[Message]:
    if not step.calls:
        return [step.message]
    renamed = [call._replace(id=_unused(safe(call.id) or "call", used)) for call in step.calls]
    written = [changed(step.message, tool_calls=[as_openai(call) for call in renamed])]
    for call, result in zip(renamed, step.results, strict=True):
        found = result or Message(role="tool", content=NO_RESULT)
        written.append(changed(found, tool_call_id=call.id))
    return written


def _unused(id: str, used: set[str]) -> str:
    """Give a reused id a suffix: some models number their calls from 0 in each turn; some APIs refuse repeated ids."""
    name = id
    number = 1
    while name in used:
        number += 1
        name = f"{id}-{number}"
    used.add(name)
    return name


def as_openai(call: Call) -> dict[str, Any]:
    """A call as OpenAI writes it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def changed(message: Message, **fields: Any) -> Message:
    """The message with other fields."""
    return Message.model_construct(**{**message.to_dict(), **fields})


def plain(message: Message) -> list[Message]:
    """The message without blocks of calls and results in its content, and without the older `function_call`."""
    given = message.to_dict()
    old = given.get("function_call")
    parts = message.content if isinstance(message.content, list) else []
    if message.role == "function":
        # A result in this format names the function, not the call; only one call at a time was possible.
        return [changed(message, role="tool", tool_call_id=f"function-{message.name}")]
    if message.role == "assistant" and isinstance(old, dict) and not message.tool_calls:
        call = {"id": f"function-{old.get('name')}", "type": "function", "function": old}
        return [changed(message, tool_calls=[call], function_call=None)]
    kinds = {part.get("type") for part in parts if isinstance(part, dict)}
    if not kinds & {"tool_use", "tool_result"}:
        return [message]
    rest = [part for part in parts if not (isinstance(part, dict) and part.get("type") in ("tool_use", "tool_result"))]
    found = [_result(part) for part in parts if isinstance(part, dict) and part.get("type") == "tool_result"]
    made = [as_openai(call) for call in calls(message)]
    if rest or made or not found:
        fields: dict[str, Any] = {"content": text_of(rest)}
        found.append(changed(message, **fields, tool_calls=made) if made else changed(message, **fields))
    return found


def _result(block: dict[str, Any]) -> Message:
    fields: dict[str, Any] = {"content": text_of(block.get("content") or "")}
    if block.get("is_error"):
        fields["metadata"] = {"is_error": True}
    return codec.as_message({"role": "tool", "tool_call_id": block.get("tool_use_id"), **fields})


def text_of(content: Any) -> Any:
    """Content as text if it is a single part of text, None if it is an empty list, else unchanged."""
    if isinstance(content, list):
        if not content:
            return None
        if len(content) == 1 and isinstance(content[0], dict) and content[0].keys() == {"type", "text"}:
            return content[0]["text"]
    return content


# Anthropic requires that a conversation starts with a user's message.
BEGINNING = "(the conversation begins)"
_OPENAI_PARTS = {"text", "image_url", "input_audio", "file", "refusal"}
_ANTHROPIC_PARTS = {"text", "image", "document", "search_result", "thinking", "redacted_thinking"}
_PRIVATE = {"thinking", "redacted_thinking"}  # signed by one vendor for its own API
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.DOTALL)


# OpenAI


def to_openai(messages: Iterable[Message | dict[str, Any]], *, orphans: Orphans = "repair") -> list[dict[str, Any]]:
    """Convert messages for the OpenAI chat API.

    By default orphans are repaired, because an API that refused a conversation once would refuse it in every later
    turn. A call without a result gets a result that says that the result is unknown. A result without a call is left
    out. A late result is moved to its call. With `orphans="refuse"` the first two raise InvalidValue.
    """
    return [_to_openai(message) for message in paired(messages, orphans)]


def _to_openai(message: Message) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, list):
        content = [part for each in content for part in _openai_part(each)] or ""
    made: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "tool":
        if isinstance(content, list) and any(part["type"] != "text" for part in content):
            raise InvalidValue(f"the result of the call {message.tool_call_id!r}: OpenAI takes only text in a result")
        return made | {"content": content or "", "tool_call_id": message.tool_call_id}
    if message.name:
        made["name"] = message.name
    if message.role == "assistant" and message.tool_calls:
        return made | {"content": content or None, "tool_calls": message.tool_calls}
    return made | {"content": "" if content is None else content}


def _openai_part(part: Any) -> list[Any]:
    if isinstance(part, str):
        return [{"type": "text", "text": part}]
    kind = _kind(part)
    if kind in _PRIVATE:
        return []
    if kind == "text":
        return [{"type": "text", "text": part.get("text", "")}]
    if kind == "image":
        source = part.get("source") or {}
        data = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return [{"type": "image_url", "image_url": {"url": source.get("url") or data}}]
    if kind not in _OPENAI_PARTS:
        raise InvalidValue(f"a part of type {kind!r} cannot be sent to OpenAI; it takes {_names(_OPENAI_PARTS)}")
    return [part]


def from_openai(messages: Iterable[Any]) -> list[Message]:
    """Read messages of the OpenAI chat API: dicts, or the objects that its library returns."""
    return [codec.as_message(_fields(each, place), f"messages[{place}]") for place, each in enumerate(messages)]


# Anthropic


def to_anthropic(
    messages: Iterable[Message | dict[str, Any]], *, orphans: Orphans = "repair"
) -> tuple[str, list[dict[str, Any]]]:
    """Convert messages for the Anthropic API: the system prompt, and the messages in alternating roles.

    All system messages, at any position, become the prompt: as user messages they would lose their authority. Messages
    without text or other parts are left out. If the conversation starts with an assistant's message, a user's message
    is put before it. Orphans: as in `to_openai`.
    """
    system: list[str] = []
    made: list[dict[str, Any]] = []
    for message in paired(messages, orphans, _safe_id):
        if message.role in ("system", "developer"):
            system.append(_system_text(message))
            continue
        role, parts = _anthropic_blocks(message)
        if not made and role == "assistant" and parts:
            made.append({"role": "user", "content": [{"type": "text", "text": BEGINNING}]})
        if made and made[-1]["role"] == role:
            made[-1]["content"] += parts
        elif parts:
            made.append({"role": role, "content": parts})
    for each in made:
        if len(each["content"]) == 1 and each["content"][0].keys() == {"type", "text"}:
            each["content"] = each["content"][0]["text"]
    return "\n\n".join(text for text in system if text), made


def _safe_id(id: str) -> str:
    """Anthropic accepts letters, digits, '_' and '-' in the id of a call."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", id)


def _system_text(message: Message) -> str:
    parts = [message.content] if isinstance(message.content, str) else message.content or []
    texts = [part if isinstance(part, str) else part.get("text") for part in parts if isinstance(part, (str, dict))]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidValue("a system message for Anthropic holds text only")
    return "\n\n".join(str(text) for text in texts)


def _anthropic_blocks(message: Message) -> tuple[str, list[dict[str, Any]]]:
    parts = [message.content] if isinstance(message.content, str) else message.content or []
    made = [block for part in parts for block in _anthropic_part(part)]
    if message.role == "tool":
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": message.tool_call_id}
        result["content"] = message.content if isinstance(message.content, str) else made
        if (message.metadata or {}).get("is_error"):
            result["is_error"] = True
        return "user", [result]
    for call in calls(message):
        made.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)})
    assert message.role is not None  # `paired` refuses a message without a role
    return message.role, made


def _anthropic_part(part: Any) -> list[dict[str, Any]]:
    text = {"type": "text", "text": part} if isinstance(part, str) else part
    kind = _kind(text)
    if kind == "refusal":
        text = {"type": "text", "text": text.get("refusal")}
        kind = "text"
    if kind == "text":
        return [text] if str(text.get("text") or "").strip() else []  # the API refuses empty text
    if kind == "image_url":
        url = text.get("image_url")
        url = str(url.get("url") if isinstance(url, dict) else url)
        found = _DATA_URL.fullmatch(url)
        if found:
            return [{"type": "image", "source": {"type": "base64", "media_type": found[1], "data": found[2]}}]
        return [{"type": "image", "source": {"type": "url", "url": url}}]
    if kind not in _ANTHROPIC_PARTS:
        raise InvalidValue(f"a part of type {kind!r} cannot be sent to Anthropic; it takes {_names(_ANTHROPIC_PARTS)}")
    return [text]


def _input(call: Call) -> dict[str, Any]:
    """The arguments as an object. Models sometimes write broken JSON, which is passed on as text."""
    try:
        found = json.loads(call.arguments or "{}")
    except ValueError:
        found = call.arguments
    return found if isinstance(found, dict) else {"arguments": found}


def from_anthropic(system: Any, messages: Iterable[Any]) -> list[Message]:
    """Read a system prompt (text, blocks or None) and messages that the Anthropic API takes or returns."""
    texts = [system] if isinstance(system, str) else [_fields(block, 0).get("text") for block in system or []]
    made = [codec.as_message({"role": "system", "content": text}, "system") for text in texts if text]
    for place, each in enumerate(messages):
        fields = _fields(each, place)
        if place == 0 and text_of(fields.get("content")) == BEGINNING:
            continue
        content = fields.get("content")
        if isinstance(content, list):
            content = text_of([block if isinstance(block, str) else _fields(block, place) for block in content])
        message = codec.as_message({"role": fields.get("role"), "content": content}, f"messages[{place}]")
        made += plain(message)
    return made


# LangChain


def to_langchain(messages: Iterable[Message | dict[str, Any]], *, orphans: Orphans = "repair") -> list[Any]:
    """Convert messages to LangChain's objects (extra `langchain`). Orphans: as in `to_openai`."""
    core = _langchain()
    try:
        return [_to_langchain(core, message) for message in paired(messages, orphans)]
    except ValidationError as error:
        raise codec.refused(error, "message") from None


def _langchain() -> Any:
    try:
        import langchain_core.messages
    except ImportError as error:
        text = "langchain-core is not installed: pip install 'distributed-state[langchain]'"
        raise ConfigurationError(text) from error
    return langchain_core.messages


def _to_langchain(core: Any, message: Message) -> Any:
    content = "" if message.content is None else message.content
    name = {"name": message.name} if message.name else {}
    if message.role == "tool":
        failed = (message.metadata or {}).get("is_error")
        status = "error" if failed else "success"
        return core.ToolMessage(content=content, tool_call_id=message.tool_call_id, status=status, **name)
    if message.role == "assistant":
        good = []
        bad = []
        for call in calls(message):
            arguments = _input(call)
            if arguments == _json(call.arguments):
                good.append({"name": call.name, "args": arguments, "id": call.id, "type": "tool_call"})
            else:
                error = "the arguments are not a JSON object"
                bad.append({"name": call.name, "args": call.arguments, "id": call.id, "error": error})
        bad = [each | {"type": "invalid_tool_call"} for each in bad]
        return core.AIMessage(content=content, tool_calls=good, invalid_tool_calls=bad, **name)
    if message.role == "user":
        return core.HumanMessage(content=content, **name)
    # The marks that langchain-openai uses.
    extra = {"additional_kwargs": {"__openai_role__": "developer"}} if message.role == "developer" else {}
    return core.SystemMessage(content=content, **name, **extra)


def _json(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return None


def from_langchain(messages: Iterable[Any]) -> list[Message]:
    """Read LangChain's message objects."""
    core = _langchain()
    return [_from_langchain(core, each, f"messages[{place}]") for place, each in enumerate(messages)]


def _from_langchain(core: Any, given: Any, place: str) -> Message:
    if not isinstance(given, core.BaseMessage):
        raise InvalidValue(f"{place}: a {type(given).__name__} is not a LangChain message")
    roles = {core.HumanMessage: "user", core.AIMessage: "assistant", core.SystemMessage: "system"}
    roles |= {core.ToolMessage: "tool", core.FunctionMessage: "function"}
    role = next((role for kind, role in roles.items() if isinstance(given, kind)), getattr(given, "role", None))
    if given.additional_kwargs.get("__openai_role__") == "developer":
        role = "developer"
    content = given.content
    if isinstance(content, list):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        content = [part for part in parts if part.get("type") != "tool_use"]  # tool_calls has these calls too
    fields: dict[str, Any] = {"role": role, "content": content}
    if given.name:
        fields["name"] = given.name
    if isinstance(given, core.ToolMessage):
        fields["tool_call_id"] = given.tool_call_id
        if given.status == "error":
            fields["metadata"] = {"is_error": True}
    if isinstance(given, core.AIMessage):
        made = [(call, json.dumps(call["args"], ensure_ascii=False)) for call in given.tool_calls]
        made += [(call, call["args"] or "") for call in given.invalid_tool_calls]
        if made:
            calls = [Call(call["id"] or "", call["name"] or "", arguments) for call, arguments in made]
            fields["tool_calls"] = [as_openai(call) for call in calls]
            fields["content"] = content or None
    return codec.as_message(fields, place)


# All


def _fields(given: Any, place: int) -> dict[str, Any]:
    """A dict, or the fields of a pydantic model."""
    if hasattr(given, "model_dump"):
        given = given.model_dump(exclude_none=True)
    if not isinstance(given, Mapping):
        raise InvalidValue(f"messages[{place}]: a {type(given).__name__} is not a message")
    return dict(given)


def _kind(part: Any) -> Any:
    if not isinstance(part, Mapping):
        raise InvalidValue(f"a part of a message is text or an object with a type, not a {type(part).__name__}")
    return part.get("type")


def _names(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds))
