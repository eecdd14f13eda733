"""Messages as OpenAI, Anthropic and LangChain write them. Law: what is made here has no call without its result.

A Message keeps the field names of the OpenAI chat format. Timestamps, metadata and unknown fields are not sent.

Design: section 13.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from distributed_state.conversation.tool_call_format import Call, calls
from distributed_state.conversation.tool_pairing import Orphans, as_openai, paired, plain, text_of
from distributed_state.errors import ConfigurationError, InvalidValue
from distributed_state.values import codec
from distributed_state.values.model import Message

# Anthropic takes a conversation only from a user's message on.
BEGINNING = "(the conversation begins)"
_OPENAI_PARTS = {"text", "image_url", "input_audio", "file", "refusal"}
_ANTHROPIC_PARTS = {"text", "image", "document", "search_result", "thinking", "redacted_thinking"}
_PRIVATE = {"thinking", "redacted_thinking"}  # signed by one vendor for itself
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.DOTALL)


# OpenAI


def to_openai(messages: Iterable[Message | dict[str, Any]], *, orphans: Orphans = "repair") -> list[dict[str, Any]]:
    """Write messages as the OpenAI chat API takes them.

    By default orphans are repaired, because a history cannot be argued with: refused once, it would be refused in
    every later turn. A call without a result gets one that says that none is known, a result without a call is left
    out, a late result is put behind its call. With `orphans="refuse"` the first two raise InvalidValue.
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
    """Write messages as the Anthropic API takes them: the system prompt, and the messages in alternating roles.

    All system messages become the prompt, wherever they stand: in a user's mouth they would lose their weight. What
    has no text and no other part is left out. A conversation that an assistant begins gets a user's message before
    it. Orphans: as in `to_openai`.
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
    """Anthropic takes letters, digits, '_' and '-' in the id of a call."""
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
    assert message.role is not None  # `paired` refuses such a message
    return message.role, made


def _anthropic_part(part: Any) -> list[dict[str, Any]]:
    text = {"type": "text", "text": part} if isinstance(part, str) else part
    kind = _kind(text)
    if kind == "refusal":
        text = {"type": "text", "text": text.get("refusal")}
        kind = "text"
    if kind == "text":
        return [text] if str(text.get("text") or "").strip() else []  # empty ones are refused
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
    """The arguments as an object. Models write broken JSON at times; that is handed on as text."""
    try:
        found = json.loads(call.arguments or "{}")
    except ValueError:
        found = call.arguments
    return found if isinstance(found, dict) else {"arguments": found}


def from_anthropic(system: Any, messages: Iterable[Any]) -> list[Message]:
    """Read what the Anthropic API takes or returns: a system prompt (text, blocks or None) and messages."""
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
    """Write messages as LangChain's objects (extra `langchain`). Orphans: as in `to_openai`."""
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
                error = "the arguments are no JSON object"
                bad.append({"name": call.name, "args": call.arguments, "id": call.id, "error": error})
        bad = [each | {"type": "invalid_tool_call"} for each in bad]
        return core.AIMessage(content=content, tool_calls=good, invalid_tool_calls=bad, **name)
    if message.role == "user":
        return core.HumanMessage(content=content, **name)
    # As langchain-openai marks them.
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
        content = [part for part in parts if part.get("type") != "tool_use"]  # these are in tool_calls too
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
    """A dict, or what a model of pydantic says of itself."""
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
