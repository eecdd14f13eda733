"""LangChain's chat history in a store, for `RunnableWithMessageHistory` and chains.

Law: a method is one read or one commit, and a message reads back equal to the added one, with the same class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_state import AsyncStateStore, InvalidValue, StateStore
from distributed_state.adapters.stores import Conversation, finish, lacking, named, open_store
from distributed_state.formats import from_langchain, to_langchain

try:
    from langchain_core.chat_history import BaseChatMessageHistory
    from langchain_core.messages import BaseMessage, ToolMessage, message_to_dict, messages_from_dict
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
