"""LangChain's chat history in a store, for `RunnableWithMessageHistory` and chains.

Law: a method is one read or one commit, and a message reads back equal to the added one, with the same class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from distributed_state import AsyncStateStore, AsyncTurn, InvalidValue, StateStore, Turn
from distributed_state.adapters.stores import Conversation, Shown, Used, finish, lacking, named, open_store
from distributed_state.formats import from_langchain, to_langchain

try:
    from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
    from langchain_core.chat_history import BaseChatMessageHistory
    from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, message_to_dict, messages_from_dict
    from langchain_core.outputs import LLMResult
except ImportError as error:
    raise lacking("langchain", error) from error

_KEY = "langchain"


class DistributedChatMessageHistory(BaseChatMessageHistory):
    """The messages of a conversation, for LangChain. Blocking and asyncio methods may be mixed, on one object.

    Example::

        chain = RunnableWithMessageHistory(model, lambda id: DistributedChatMessageHistory(id, store))
        config = {"configurable": {"session_id": "user-123"}}
        answer = chain.invoke([HumanMessage("A weekend in Oslo, please")], config)
        assert DistributedChatMessageHistory("user-123", store).messages[-1] == answer

    `store` is an open StateStore or AsyncStateStore, which its owner closes. The messages are those of
    `store.session(session_id)`, in the package's usual fields, with LangChain's full message added: a window,
    `to_openai`, history and forks work on them, and messages appended there are read here. `options` are those of
    `store.session`: `user`, `idle`, `lifetime`, ... Errors are the store's own (`distributed_state.StateError`).
    """

    def __init__(self, session_id: str, store: AsyncStateStore | StateStore, **options: Any) -> None:
        super().__init__()
        self.session_id = named(session_id, "a session's id")
        self._session = open_store(store).aio.session(session_id, **options)
        self._conversation = Conversation(self._session)

    # LangChain declares a settable attribute; its histories for Redis and SQL cannot be set either.
    @property
    def messages(self) -> list[BaseMessage]:  # type: ignore[override]
        """Read all messages. Checks with the server for a newer version."""
        return finish(self.aget_messages())

    async def aget_messages(self) -> list[BaseMessage]:
        """Read all messages, as `messages`."""
        return _read(await self._conversation.read())

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add messages in one commit: all, next to one another, or none.

        A deleted conversation begins again, but an object that used it before the deletion raises Deleted.
        """
        finish(self.aadd_messages(messages))

    async def aadd_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add messages in one commit, as `add_messages`."""
        if messages:
            await self._conversation.append([*map(_written, messages)])

    def clear(self) -> None:
        """Remove all messages in one commit. Fields and history stay; `store.erase(session_id)` removes them too."""
        finish(self.aclear())

    async def aclear(self) -> None:
        """Remove all messages, as `clear`."""
        await self._session.replace_messages([])


def _written(message: BaseMessage) -> dict[str, Any]:
    """A message in the package's own fields, with LangChain's form in one more field."""
    if not isinstance(message, BaseMessage):
        kind = type(message).__name__
        raise InvalidValue(f"a history takes LangChain's messages, such as HumanMessage(...), not a {kind}")
    said = message_to_dict(message)
    rest = said["data"]
    try:
        fields = from_langchain([message])[0].to_dict()
    except InvalidValue:
        fields = {"type": said["type"]}  # a role or a part that the package's format lacks
    if fields.get("content", ...) == rest["content"]:
        del rest["content"]  # equal content is stored once
    return {**fields, _KEY: said}


def _read(found: list[dict[str, Any]]) -> list[BaseMessage]:
    return [message for stored in found for message in (_said if _KEY in stored else _foreign)(stored)]


def _said(stored: dict[str, Any]) -> list[BaseMessage]:
    said = stored[_KEY]
    return messages_from_dict([{**said, "data": {"content": stored.get("content"), **said["data"]}}])


def _foreign(stored: dict[str, Any]) -> list[BaseMessage]:
    """A message that was not appended by LangChain; an empty list if it is not a chat message."""
    if stored.get("role") is None:
        return []
    if stored["role"] == "tool":  # to_langchain leaves out a result without its call
        return [ToolMessage(stored.get("content") or "", tool_call_id=stored.get("tool_call_id"))]
    return to_langchain([{name: value for name, value in stored.items() if name != "number"}])[:1]


# Streaming a run


class _Handler(Shown, BaseCallbackHandler):
    raise_error = True  # LangChain would only log that the lease is lost
    run_inline = True

    def on_llm_new_token(self, token: Any, **more: Any) -> None:
        finish(self.show(_texts(token)))

    def on_llm_end(self, response: LLMResult, **more: Any) -> None:
        self.note(_used(response))

    def on_tool_start(self, serialized: Any, input_str: str, **more: Any) -> None:
        finish(self.show([_start(serialized, input_str, more)]))

    def on_tool_end(self, output: Any, **more: Any) -> None:
        finish(self.show([_end(output, more)]))

    def on_tool_error(self, error: BaseException, **more: Any) -> None:
        finish(self.show([_failure(error, more)]))


class _AsyncHandler(Shown, AsyncCallbackHandler):
    raise_error = True
    run_inline = True  # the tokens stay in their order

    async def on_llm_new_token(self, token: Any, **more: Any) -> None:
        await self.show(_texts(token))

    async def on_llm_end(self, response: LLMResult, **more: Any) -> None:
        self.note(_used(response))

    async def on_tool_start(self, serialized: Any, input_str: str, **more: Any) -> None:
        await self.show([_start(serialized, input_str, more)])

    async def on_tool_end(self, output: Any, **more: Any) -> None:
        await self.show([_end(output, more)])

    async def on_tool_error(self, error: BaseException, **more: Any) -> None:
        await self.show([_failure(error, more)])


def stream(turn: AsyncTurn | Turn) -> _AsyncHandler | _Handler:
    """Return a callback handler that streams a model's tokens, and calls of tools, into a turn.

    Example::

        async with store.session("user-123").turn(request_id="r1") as turn:
            said = stream(turn)
            answer = await chain.ainvoke(question, {"callbacks": [said]})
            turn.outcome = said.text

    Followers are shown tokens as str, the call of a tool as `{"type": "on_tool_start", "run_id": ..., "name": ...,
    "input": ...}`, and its end as `{"type": "on_tool_end", "run_id": ..., "output": ...}`, or `"on_tool_error"` with an
    `"error"`. The turn counts the tokens of each answer of a model: see `turn.usage`.
    """
    return _AsyncHandler(turn) if isinstance(turn, AsyncTurn) else _Handler(turn)


def _used(response: LLMResult) -> Iterator[Used]:
    for message in (getattr(each, "message", None) for some in response.generations for each in some):
        if isinstance(message, AIMessage) and message.usage_metadata:
            usage = message.usage_metadata
            yield Used(message.response_metadata.get("model_name"), usage["input_tokens"], usage["output_tokens"])


def _texts(token: Any) -> list[str]:
    """The texts of a token, which some models give as blocks."""
    blocks = token if isinstance(token, list) else [token]
    texts = (each.get("text") if isinstance(each, dict) else each for each in blocks)
    return [each for each in texts if isinstance(each, str)]


def _start(serialized: Any, input_str: str, more: dict[str, Any]) -> dict[str, Any]:
    name = more.get("name") or (serialized or {}).get("name")
    given = more.get("inputs")
    return {**_tool("start", more), "name": name, "input": input_str if given is None else given}


def _end(output: Any, more: dict[str, Any]) -> dict[str, Any]:
    return {**_tool("end", more), "output": output}


def _failure(error: BaseException, more: dict[str, Any]) -> dict[str, Any]:
    return {**_tool("error", more), "error": repr(error)}


def _tool(what: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"on_tool_{what}", "run_id": more.get("run_id")}
