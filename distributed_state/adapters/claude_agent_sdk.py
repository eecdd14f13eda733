"""Sessions of the Claude Agent SDK, kept in a store: `ClaudeAgentOptions(session_store=DistributedSessionStore(...))`.

Law: an append is one commit, and an entry is stored once, however often the SDK sends it.

| SDK | here |
|---|---|
| session | `store.session("claude/project/session")` |
| entry of its transcript | a message: role and content, and under `claude` the rest |
| summary | field `claude` |
| entry of a subagent's transcript | an item of the collection `subagents` |
| subpath | an item of the collection `subpaths`: how many entries it has |

Design: section 22.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, cast

from distributed_state import (
    ABSENT,
    AsyncSession,
    AsyncStateStore,
    Conflict,
    Deleted,
    DeleteItem,
    Item,
    PutItem,
    StateStore,
    WarmUnavailable,
)
from distributed_state.adapters.stores import (
    Streamed,
    Used,
    every,
    infos_below,
    joined,
    lacking,
    named,
    newest,
    open_store,
    parted,
)
from distributed_state.results import SessionInfo

try:
    from claude_agent_sdk import (
        AssistantMessage,
        Message,
        ResultMessage,
        SessionKey,
        SessionListSubkeysKey,
        SessionStore,
        SessionStoreEntry,
        SessionStoreListEntry,
        SessionSummaryEntry,
        StreamEvent,
        TextBlock,
        UserMessage,
        fold_session_summary,
        project_key_for_directory,
    )
except ImportError as error:
    raise lacking("claude-agent-sdk", error) from error

Entry = dict[str, Any]
_OURS = "claude"  # the field with the summary, and the field of a message with the rest of its entry
_SUBPATHS, SUBAGENTS = "subpaths", "subagents"
_AT_ONCE = 500
_ROUNDS = 100
# Times of one form are in the order of their texts.
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


class DistributedSessionStore(SessionStore):
    """Transcripts of Claude's sessions that any worker can resume: for `ClaudeAgentOptions(session_store=...)`.

    Example::

        sessions = DistributedSessionStore(store, user="ada")
        key = {"project_key": "-srv-shop", "session_id": "5f0b3f7e-8f0c-4d8c-9d0a-0f4a1f6f2b11"}
        await sessions.append(key, [{"type": "user", "message": {"role": "user", "content": "A sauna, please"}}])
        assert len(await sessions.load(key)) == 1

    `store` is an open StateStore or AsyncStateStore, which its owner closes. Creating the object does no I/O, so it can
    be made for each request: `options` are those of `store.session`: `user`, `idle`, `lifetime`, ... With `user`, only
    that user's sessions are listed, and continued by `continue_conversation`. `prefix` begins the ids of the sessions.

    An entry whose `uuid` is stored already is not stored again, so the SDK may repeat a batch, and
    `import_session_to_store` may be repeated. A session that was deleted begins again only with the first entry of a
    conversation; a run in progress gets Deleted, which the SDK reports as a MirrorErrorMessage, as it does with every
    error of the store (`distributed_state.StateError`). For asyncio; trio is not supported.
    """

    def __init__(self, store: AsyncStateStore | StateStore, *, prefix: str = "claude/", **options: Any) -> None:
        self._store = open_store(store).aio
        self._prefix = prefix
        self._options = options

    def session_record(self, session_id: str, project_key: str | None = None) -> AsyncSession:
        """Return the session of the store that holds a transcript, for its lock, turns, history and forks. No I/O.

        Example::

            record = sessions.session_record("5f0b3f7e-8f0c-4d8c-9d0a-0f4a1f6f2b11", "-srv-shop")
            async with record.lock(wait=60):  # runs of one session take turns
                entries = await sessions.load(key)

        Without a `project_key` it is the SDK's for the current directory.
        """
        project_key = project_key_for_directory() if project_key is None else project_key
        id = self._prefix + joined(named(project_key, "a project's key"), named(session_id, "a session's id"))
        record: AsyncSession = self._store.session(id, **self._options)
        return record

    # SessionStore

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Add the entries that are not stored yet, in their order; 500 are one commit."""
        transcript = self._transcript(key)
        for at in range(0, len(entries), _AT_ONCE):
            await _add(transcript, cast(list[Entry], entries[at : at + _AT_ONCE]))

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """Read all entries of a transcript as they were given, None if there are none."""
        return cast(list[SessionStoreEntry], await self._transcript(key).entries()) or None

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """List the sessions of a project; `mtime` is when one last changed, in milliseconds by the server's clock."""
        return [{"session_id": id, "mtime": _mtime(info)} for id, info in await self._listed(project_key)]

    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        """Read the summaries of a project's sessions, which every append keeps up to date."""
        listed = await self._listed(project_key)
        fields = await newest(self.session_record(id, project_key) for id, _ in listed)
        return [
            {"session_id": id, "mtime": _mtime(info), "data": found[_OURS]["summary"]}
            for (id, info), found in zip(listed, fields, strict=True)
            if _OURS in found
        ]

    async def delete(self, key: SessionKey) -> None:
        """Remove a session permanently, with its subagents and history; with a `subpath` only that transcript."""
        record = self._record(key)
        subpath = key.get("subpath")
        if subpath is None:
            await self._store.erase(record.id)
        else:
            await _Subagent(record, subpath).delete()

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        """List the subpaths of a session's subagents."""
        record = self.session_record(key["session_id"], key["project_key"])
        return [item.key for item in await every(record.items(_SUBPATHS))]

    def _record(self, key: SessionKey) -> AsyncSession:
        return self.session_record(key["session_id"], key["project_key"])

    def _transcript(self, key: SessionKey) -> _Main | _Subagent:
        subpath = key.get("subpath")
        return _Main(self._record(key), key) if subpath is None else _Subagent(self._record(key), subpath)

    async def _listed(self, project_key: str) -> list[tuple[str, SessionInfo]]:
        prefix = self._prefix + joined(project_key, "")
        mine = {name: self._options[name] for name in ("user",) if name in self._options}
        found = await infos_below(self._store, prefix, **mine)
        return [(parted(info.id.removeprefix(prefix))[0], info) for info in found]


# Transcripts


class _Main:
    """The entries of a session itself: messages, and a field with their summary."""

    def __init__(self, record: AsyncSession, key: SessionKey) -> None:
        self._record = record
        self._key = key
        self._head: Any = None

    async def newest(self) -> str | None:
        """Read what is known of the transcript; return the greatest time of its entries, None if there are none."""
        self._head = await self._record.get(_OURS, fresh=True)
        return None if self._head is None else str(self._head["newest"])

    async def entries(self) -> list[Entry]:
        return [_entry(stored) for stored in await self._record.raw_messages(fresh=True) if _OURS in stored]

    async def add(self, entries: list[Entry], newest: str, **more: Any) -> None:
        """Add these, if nothing was added since `newest` was read; else raise Conflict."""
        data, count = (self._head["summary"], self._head["count"]) if self._head else ({}, 0)
        before: SessionSummaryEntry = {"session_id": self._key["session_id"], "mtime": 0, "data": data}
        summary = fold_session_summary(before, self._key, cast(list[SessionStoreEntry], entries))["data"]
        await self._record.write(
            # The count differs after each append, also where the rest does not.
            set={_OURS: {"newest": newest, "summary": summary, "count": count + len(entries)}},
            append=map(_message, entries),
            expect={_OURS: self._head or ABSENT},
            **more,
        )

    def begins(self, entries: list[Entry]) -> bool:
        """Whether a deleted session may begin again with these: they continue nothing that was deleted."""
        first = next((entry for entry in entries if "parentUuid" in entry), {"parentUuid": "of something else"})
        return first["parentUuid"] is None and first.get("logicalParentUuid") is None


class _Subagent:
    """The entries of one of a session's subagents: items, and one more that counts them."""

    def __init__(self, record: AsyncSession, subpath: str) -> None:
        self._record = record
        self._subpath = subpath
        self._prefix = f"{subpath}\n"
        self._head: Item | None = None

    async def newest(self) -> str | None:
        self._head = await self._record.items(_SUBPATHS).find(self._subpath)
        return None if self._head is None else str(self._head.value["newest"])

    async def entries(self) -> list[Entry]:
        return [item.value for item in await every(self._record.items(SUBAGENTS), prefix=self._prefix)]

    async def add(self, entries: list[Entry], newest: str, **more: Any) -> None:
        count = self._head.value["count"] if self._head else 0
        head = {"newest": newest, "count": count + len(entries)}
        await self._record.write(
            items=[
                PutItem(collection=_SUBPATHS, key=self._subpath, value=head, equals=self._head),
                *(
                    PutItem(collection=SUBAGENTS, key=f"{self._prefix}{number:09}", value=entry)
                    for number, entry in enumerate(entries, count)
                ),
            ],
            **more,
        )

    def begins(self, entries: list[Entry]) -> bool:
        return False

    async def delete(self) -> None:
        for _ in range(_ROUNDS):
            await self.newest()
            if self._head is None:
                return
            items = await every(self._record.items(SUBAGENTS), prefix=self._prefix)
            gone = [DeleteItem(collection=SUBAGENTS, key=item.key) for item in items]
            for at in range(0, len(gone), _AT_ONCE):
                await self._record.write(items=gone[at : at + _AT_ONCE])
            try:
                last = DeleteItem(collection=_SUBPATHS, key=self._subpath, equals=self._head)
                await self._record.write(items=[last])
                return
            except Conflict:  # entries were added meanwhile
                continue
        raise WarmUnavailable(f"{self._subpath:.80}: entries are added faster than they can be deleted")


async def _add(transcript: _Main | _Subagent, given: list[Entry]) -> None:
    more: dict[str, Any] = {}
    for _ in range(_ROUNDS):
        newest = await transcript.newest()
        # One that is stored has a time up to the newest. Only if there may be one are all entries read.
        later = newest is None or all(_time(entry) > newest for entry in given if "uuid" in entry)
        entries = unknown(given, () if later else await transcript.entries())
        if not entries:
            return
        try:
            await transcript.add(entries, max([newest or "", *map(_time, entries)]), **more)
            return
        except Conflict:
            more = {}
        except Deleted as error:
            if not transcript.begins(given):
                raise
            more = {"revive": True, "expect_version": error.version}
    raise WarmUnavailable("a session is written faster than an entry can be added")


def unknown(entries: Iterable[Entry], known: Sequence[Entry]) -> list[Entry]:
    """Those of the entries whose `uuid` is not among the known ones, each once; and those without a `uuid`."""
    seen = {entry["uuid"] for entry in known if isinstance(entry.get("uuid"), str)}
    found = []
    for entry in entries:
        id = entry.get("uuid")
        if not isinstance(id, str) or id not in seen:
            found.append(entry)
            seen.add(id)
    return found


def _time(entry: Entry) -> str:
    """The time of an entry, or "" if its time cannot be compared with others."""
    time = entry.get("timestamp")
    return time if isinstance(time, str) and _TIME.fullmatch(time) else ""


def _mtime(info: SessionInfo) -> int:
    return int(info.updated * 1000)


def _message(entry: Entry) -> Entry:
    """An entry as a message: with the role and content of the chat message in it, if there is one."""
    said = entry.get("message")
    if isinstance(said, dict) and said.get("role") in ("user", "assistant"):
        content = said.get("content")
        if isinstance(content, str | list):
            rest = {name: value for name, value in said.items() if name != "content"}  # which is stored once
            return {"role": said["role"], "content": content, _OURS: {**entry, "message": rest}}
    return {"type": "entry", _OURS: entry}


def _entry(stored: Entry) -> Entry:
    entry: Entry = stored[_OURS]
    if "role" in stored:
        entry["message"]["content"] = stored["content"]
    return entry


# Streaming a run


# Anthropic counts tokens that it read from its cache, or wrote there, apart from the others.
_INPUT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def stream(turn: Any, messages: AsyncIterator[Message]) -> Streamed[Message]:
    """Stream the messages of a run into a turn; iterate over the return value, which yields the same messages.

    Example::

        async with sessions.session_record(id).turn(request_id="r1") as turn:
            answer = stream(turn, query(prompt="For the weekend", options=options))
            async for message in answer:
                ...
            turn.outcome = answer.text

    Followers are shown the agent's texts as str, each once: with `include_partial_messages` the deltas, otherwise whole
    texts. An answer with more than text, a tool's result and the run's result follow as JSON: `{"type":
    "AssistantMessage", "content": [...], ...}`. Texts of subagents are not shown by themselves. The turn counts the
    tokens of each result, all under the model that answered: see `turn.usage`.
    """
    streaming = False  # whether the text of the next whole message was shown by its deltas

    def shown(message: Message) -> Iterator[Any]:
        nonlocal streaming
        if isinstance(message, StreamEvent):
            delta = message.event.get("delta") or {}
            if message.parent_tool_use_id is None and delta.get("type") == "text_delta":
                streaming = True
                yield delta["text"]
        elif isinstance(message, AssistantMessage) and message.parent_tool_use_id is None:
            texts = [block.text for block in message.content if isinstance(block, TextBlock)]
            yield from () if streaming else texts
            streaming = False if texts else streaming
            if len(texts) < len(message.content):
                yield _named(message)
        elif isinstance(message, AssistantMessage | UserMessage | ResultMessage):
            yield _named(message)

    model: str | None = None

    def used(message: Message) -> Iterator[Used]:
        nonlocal model
        if isinstance(message, AssistantMessage) and message.parent_tool_use_id is None:
            model = message.model
        elif isinstance(message, ResultMessage) and message.usage:
            usage = message.usage
            yield Used(model, sum(usage.get(name) or 0 for name in _INPUT), usage.get("output_tokens"))

    return Streamed(turn, messages, shown, used)


def _named(message: Message) -> dict[str, Any]:
    return {"type": type(message).__name__, **vars(message)}
