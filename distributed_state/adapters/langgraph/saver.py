"""LangGraph's saver on a store: `DistributedStateSaver(store)`. Law: a blocking method runs the asyncio one to its end.

LangGraph calls both blocking and asyncio methods of one saver object, the blocking ones also from coroutines of a
running loop. The logic is in `threads` and `checkpoints`; this module interprets LangGraph's arguments. If the saver
has owners, a thread cannot begin without one. A save within a turn carries the turn's lease, which the server checks.

Design: section 22.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial, wraps
from types import TracebackType
from typing import Any, TypeVar, cast

from langchain_core.messages import AIMessage
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.types import Command

from distributed_state import AsyncSession, AsyncStateStore, InvalidValue, Locked, StateStore
from distributed_state.adapters.langgraph import checkpoints
from distributed_state.adapters.langgraph.recent import Addressed, Recent, Run
from distributed_state.adapters.langgraph.threads import Thread, id_of, namespace_of, thread_of
from distributed_state.adapters.stores import ASK, Opening, Streamed, Used, ending, finish, open_store

_held: ContextVar[frozenset[str]] = ContextVar("distributed_state_langgraph_turns", default=frozenset())
RunnableConfig = Any  # langchain_core's TypedDict; only "configurable" is read
_HANDLES = 1000
_INTERRUPT = re.compile(r"[0-9a-f]{32}(\.[0-9]+)?")
F = TypeVar("F", bound=Callable[..., Any])


class _OfTheRun:
    """A method that runs in the context in which it was taken from its object: see `Run`."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __get__(self, saver: Any, kind: type | None = None) -> Any:
        if saver is None:
            return self._method
        method = self._method.__get__(saver)
        run = Run()
        return wraps(method)(partial(run.call, method))


def of_the_run(method: F) -> F:
    """Let a method of the saver run in the context of the run that took it."""
    return cast(F, _OfTheRun(method))


class DistributedStateSaver(BaseCheckpointSaver[str]):
    """Keeps LangGraph's checkpoints in a store, for the sync and the asyncio API, with one commit for each checkpoint.

    Example::

        from langgraph.graph import StateGraph

        with DistributedStateSaver.from_conn_string(archive="memory") as saver:
            builder = StateGraph(dict)
            builder.add_node("greet", lambda state: {"said": "hello"})
            builder.set_entry_point("greet")
            graph = builder.compile(checkpointer=saver)
            graph.invoke({}, {"configurable": {"thread_id": "t1"}})

    Each thread is a session of the store, named by `prefix` and the thread's id: it has the store's history, encryption
    and events, and ends after `idle` or `lifetime` seconds if those are given. `user` names the entry of "configurable"
    that holds a thread's owner, for `store.forget`: a run that begins a thread without an owner raises InvalidValue.

    A run continues from the newest checkpoint of its thread. If another run saved a checkpoint meanwhile, the commit
    raises Conflict; other savers would lose the earlier turn. A run from a checkpoint given by id makes a branch, as
    usual. With `exclusive` every run must hold its thread: see `turn`. A run that began before its thread was deleted
    raises Deleted: erased data does not come back.
    """

    def __init__(
        self,
        store: StateStore | AsyncStateStore,
        *,
        serde: SerializerProtocol | None = None,
        exclusive: bool = False,
        prefix: str = "langgraph/",
        user: str | None = None,
        idle: float | None = None,
        lifetime: float | None = None,
    ) -> None:
        super().__init__(serde=serde)
        self.exclusive = exclusive
        self.prefix = prefix
        self.user = user
        self._lives: Any = {"idle": idle, "lifetime": lifetime}
        self._store = open_store(store)
        # Handles have no state of a call and can be shared: creating one takes a tenth of the time of a read.
        self._record = lru_cache(_HANDLES)(self._session)
        self._recent = Recent()

    @classmethod
    def from_conn_string(
        cls,
        url: str | None = None,
        *,
        archive: str | None = None,
        saver: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Opening[DistributedStateSaver]:
        """Open a store only for this saver: `with ... as saver` or `async with ... as saver`.

        `url`, `archive` and further settings are those of `StateStore.open`; `saver` has options of the saver itself.
        """
        return Opening(lambda store: cls(store, **(saver or {})), url, archive, settings)

    def setup(self) -> None:
        """Do nothing: the store creates its tables when it is opened. Other savers require this call."""

    def turn(
        self,
        config: RunnableConfig,
        *,
        request_id: str | None = None,
        ttl: float = 30.0,
        wait: float = 5.0,
        **options: Any,
    ) -> Turn:
        """Hold a thread for one run: `with saver.turn(config): graph.invoke(..., config)`, or `async with`.

        Other workers that want to run the thread wait, for at most `wait` seconds (LockTimeout), and then continue from
        the state that this run left. The lease is renewed while the process lives; if it is still lost, later saves of
        the run are refused (Fenced). With `exclusive=True`, saves to a thread that is not held are refused (Locked).

        The `with` gives a turn of the thread's session, `store.session(prefix + thread_id)`; `options` are further ones
        of `session.turn`. Checkpoints that the run saves are commits of their own, under the turn's lease. A run whose
        turn is `repeated` is not run again: its result is `turn.outcome`.
        """
        lives = {**self._lives, "user": owner_of(config, self.user)}
        asked = {"request_id": request_id, "ttl": ttl, "wait": wait, "revive": True, **options}
        return Turn(self._store, self.prefix + thread_of(config), lives, asked)

    # Reading

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Read a checkpoint, or the newest if the config has no id, as the server has it now."""
        return finish(self.aget_tuple(config))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Read a checkpoint, as `get_tuple`."""
        return await self._thread(config).get(namespace_of(config), id_of(config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Read checkpoints page by page, newest first; without a config those of all threads, thread by thread."""
        for thread in finish(self._threads(config)):
            asked = checkpoints.Asked(config, filter, before, limit)
            while not asked.done:
                yield from finish(checkpoints.page(thread, asked))
            if limit is not None:
                limit -= asked.count

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Read checkpoints page by page, as `list`."""
        for thread in await self._threads(config):
            asked = checkpoints.Asked(config, filter, before, limit)
            while not asked.done:
                for found in await checkpoints.page(thread, asked):
                    yield found
            if limit is not None:
                limit -= asked.count

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Read the writes to delta channels since they were stored whole, along the parents of a checkpoint."""
        return finish(self.aget_delta_channel_history(config=config, channels=channels))

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Read the writes to delta channels, as `get_delta_channel_history`."""
        return await checkpoints.delta_history(self._thread(config), namespace_of(config), id_of(config), channels)

    # Saving

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a checkpoint in one commit; return the config that names it. Raises Conflict: see the class."""
        return finish(self.aput(config, checkpoint, metadata, new_versions))

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a checkpoint, as `put`."""
        thread = self._saving(config)
        namespace = namespace_of(config)
        await thread.put(config, namespace, id_of(config), checkpoint, metadata, new_versions)
        named = {"thread_id": thread.id, "checkpoint_ns": namespace, "checkpoint_id": Addressed(checkpoint["id"])}
        return {"configurable": named}

    @of_the_run
    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save a task's writes in one commit: existing writes stay, except special ones, which are replaced."""
        finish(self.aput_writes(config, writes, task_id, task_path))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save a task's writes, as `put_writes`."""
        checkpoint_id = config["configurable"]["checkpoint_id"]
        await self._saving(config).put_writes(config, namespace_of(config), checkpoint_id, writes, task_id, task_path)

    def _saving(self, config: RunnableConfig) -> Thread:
        thread = self._thread(config)
        if self.exclusive:
            demand_held(self.prefix + thread.id)
        demand_owner(thread, config, self.user)
        return thread

    def get_next_version(self, current: str | None, channel: None) -> str:
        """Return a channel's next version: a number that grows, and a random part."""
        number = 0 if current is None else int(str(current).partition(".")[0])
        return f"{number + 1:032}.{random.random():016}"

    # Removing and copying

    def delete_thread(self, thread_id: str) -> None:
        """Erase a thread in every tier: checkpoints, writes and history. Runs in progress are refused (Deleted)."""
        finish(self.adelete_thread(thread_id))

    async def adelete_thread(self, thread_id: str) -> None:
        """Erase a thread, as `delete_thread`."""
        await checkpoints.delete(self._store.aio, self._named(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove the checkpoints and writes of these runs, in all threads."""
        finish(self.adelete_for_runs(run_ids))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove the checkpoints and writes of these runs, as `delete_for_runs`."""
        for thread in await self._threads(None, run_ids):
            await checkpoints.delete_runs(thread, frozenset(run_ids))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread: to a new id by reference, without copying data; into an existing thread it is added."""
        finish(self.acopy_thread(source_thread_id, target_thread_id))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread, as `copy_thread`."""
        into = self._named(target_thread_id)
        await checkpoints.copy(self._named(source_thread_id), into, self.prefix + into.id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep the newest checkpoint of each namespace, and those that its delta channels need; or "delete" all."""
        finish(self.aprune(thread_ids, strategy=strategy))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Prune threads, as `prune`."""
        for thread_id in thread_ids:
            await checkpoints.prune(self._store.aio, self._named(thread_id), strategy)

    # Threads

    def _session(self, thread_id: str, owner: str | None) -> AsyncSession:
        # By the setting, a run that began before its thread expired would leave writes without their checkpoint.
        return ending(self._store.aio.session(self.prefix + thread_id, user=owner, **self._lives))

    def _named(self, thread_id: str, config: RunnableConfig | None = None) -> Thread:
        id = str(thread_id)
        return Thread(self._record(id, owner_of(config, self.user)), id, self.serde, self._recent)

    def _thread(self, config: RunnableConfig) -> Thread:
        return self._named(thread_of(config), config)

    async def _threads(self, config: RunnableConfig | None, runs: Sequence[str] | None = None) -> Sequence[Thread]:
        if config is not None and "thread_id" in config.get("configurable", {}):
            return [self._thread(config)]
        return [self._named(each) for each in await checkpoints.thread_ids(self._store.aio, self.prefix, runs)]


# Owners


def owner_of(config: Any, name: str | None) -> str | None:
    """The owner that a config names, None without one."""
    owner = (config or {}).get("configurable", {}).get(name) if name else None
    return None if owner is None else str(owner)


def demand_owner(thread: Thread, config: Any, name: str | None) -> None:
    """Refuse to begin a thread without an owner. An existing thread belongs to the owner who began it.

    The configs that LangGraph returns, of a state or of its history, name a thread but not an owner.
    """
    if name is None or owner_of(config, name) is not None:
        return
    if thread.known.head is None if thread.known.known else id_of(config) is None:
        raise InvalidValue(
            f"thread {thread.id!r:.80} would begin without an owner: with user={name!r}, "
            f'a run names the owner of its thread in config["configurable"][{name!r}]'
        )


# Turns


class Turn:
    """The time in which one run holds its thread, for the sync and the asyncio API."""

    def __init__(
        self, store: AsyncStateStore | StateStore, record_id: str, lives: Mapping[str, Any], asked: Mapping[str, Any]
    ) -> None:
        self._store = store
        self._id = record_id
        self._lives = lives
        self._asked = asked
        self._before: frozenset[str] = frozenset()

    def _begin(self, turn: Any) -> Any:
        self._before = _held.get()
        if not turn.repeated:
            _held.set(self._before | {self._id})
        return turn

    def __enter__(self) -> Any:
        self._turn: Any = self._store.blocking.session(self._id, **self._lives).turn(**self._asked)
        return self._begin(self._turn.__enter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _held.set(self._before)
        self._turn.__exit__(kind, error, trace)

    async def __aenter__(self) -> Any:
        self._turn = self._store.aio.session(self._id, **self._lives).turn(**self._asked)
        return self._begin(await self._turn.__aenter__())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _held.set(self._before)
        await self._turn.__aexit__(kind, error, trace)


def stream(turn: Any, parts: Any) -> Streamed[Any]:
    """Stream what a graph yields into a turn; iterate over the result, which yields the same parts.

    Example::

        async with saver.turn(config, request_id="r1") as turn:
            answer = stream(turn, graph.astream(question, config, stream_mode=["messages"], version="v2"))
            async for part in answer:
                ...
            turn.outcome = answer.text

    `parts` come from `graph.astream(..., version="v2")`, or from `graph.stream` in a blocking turn. Followers are shown
    the text of a model's messages as str; other messages, and what else a model's message has, as `{"type": "messages",
    "ns": [...], "node": ..., "data": <message>}`; parts of other modes as LangGraph yields them, with values as JSON.
    The turn counts the tokens of a model's messages, which need the mode "messages": see `turn.usage`.
    """
    counted = set[str | None]()

    def used(part: dict[str, Any]) -> Iterator[Used]:
        message, metadata = part["data"] if part["type"] == "messages" else (None, {})
        if isinstance(message, AIMessage) and message.usage_metadata:
            # Several chunks of a message may report a part each.
            usage, calls = message.usage_metadata, int(message.id not in counted)
            counted.add(message.id)
            model = message.response_metadata.get("model_name") or metadata.get("ls_model_name")
            yield Used(model, usage["input_tokens"], usage["output_tokens"], calls)

    return Streamed(turn, parts, _shown, used)


def _shown(part: Any) -> Iterator[Any]:
    if not isinstance(part, dict) or "type" not in part:
        raise InvalidValue(f'stream takes what graph.astream(..., version="v2") yields, not {part!r:.80}')
    if part["type"] != "messages":
        yield part
        return
    message, metadata = part["data"]
    if isinstance(message, AIMessage):
        yield str(message.text)
    if not isinstance(message, AIMessage) or _has_more(message):
        # Without the rest of the metadata: a run's config is in it, which is not for those who follow.
        yield {"type": "messages", "ns": part["ns"], "node": metadata.get("langgraph_node"), "data": message}


def _has_more(message: AIMessage) -> bool:
    """Whether a model's message, or a part of it, has more than text."""
    calls = [*message.tool_calls, *message.invalid_tool_calls, *getattr(message, "tool_call_chunks", ())]
    return bool(calls) or any(isinstance(each, dict) and each.get("type") != "text" for each in message.content)


# Interrupts


def resume(turn: Any) -> Command[Any] | None:
    """Take the answers to interrupts from a turn's inbox; return what resumes the graph with them, None without any.

    Example::

        async with saver.turn(config) as turn:  # or in a handler, with its turn
            await graph.ainvoke(resume(turn) or {"city": "Oslo"}, config)

    `store.asks()` lists what `interrupt` asked, and `session.answer(value, name)` posts the answer. An answer that the
    graph has already, because its worker died before the turn ended, is taken and not given again.
    """
    answers = {each.number: each.message for each in turn.inbox if _interrupt_of(each.message)}
    if not answers:
        return None
    names = {_interrupt_of(each): each for each in answers.values()}
    open_ones = {name: each for name, each in names.items() if turn.get(ASK + name) is not None}
    turn.take(*answers)
    given = {name[:32]: (each.metadata or {}).get("value", each.content) for name, each in open_ones.items()}
    return Command(resume=given)


def _interrupt_of(message: Any) -> str:
    """The name of the interrupt that a message answers, else an empty str."""
    name = (message.metadata or {}).get("answers")
    return name if isinstance(name, str) and _INTERRUPT.fullmatch(name) else ""


def demand_held(record_id: str) -> None:
    """Raise Locked unless the running task or OS thread holds this thread."""
    if record_id not in _held.get():
        raise Locked(
            f"{record_id!r:.200} is saved exclusively, and this run does not hold it: "
            "run inside `with saver.turn(config):`, or `async with`"
        )
