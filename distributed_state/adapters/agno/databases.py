"""The two databases of Agno over a store. Law: the logic is written once, in `records`, for asyncio.

Every method is created here: methods for sessions, runs, memories and metrics await `records` or run it to its end; all
others call `others`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from functools import wraps
from typing import Any

from agno.db.base import AsyncBaseDb, BaseDb
from agno.run.agent import RunEvent
from agno.run.team import TeamRunEvent

from distributed_state import AsyncSession, AsyncStateStore, Session, StateStore
from distributed_state.adapters.agno.records import NeedsOthers, Records, joined
from distributed_state.adapters.stores import Streamed, Used, finish, open_store

try:
    from agno.run.background import _background_tasks
except ImportError:  # not public; without it nothing waits until Agno has stored an interrupted run
    _background_tasks = set()

# Methods of the database itself, not of a family of data.
_BASE = {"to_dict", "from_dict", "close"}


def _public(kind: type) -> dict[str, Callable[..., Any]]:
    return {name: each for name, each in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def _ours(work: Callable[..., Coroutine[Any, Any, Any]], blocking: bool) -> Callable[..., Any]:
    if blocking:

        @wraps(work)
        def method(self: Any, *args: Any, **more: Any) -> Any:
            return finish(work(self._work, *args, **more))
    else:

        @wraps(work)
        async def method(self: Any, *args: Any, **more: Any) -> Any:
            return await work(self._work, *args, **more)

    return method


def _others(name: str, base: Callable[..., Any]) -> Callable[..., Any]:
    """A method of another family, sent to `others`. Without them, Agno's own implementation is kept if it has one."""
    needed = getattr(base, "__isabstractmethod__", False)

    def call(self: Any, *args: Any, **more: Any) -> Any:
        if self.others is not None:
            return getattr(self.others, name)(*args, **more)
        if needed:
            kind = type(self).__name__
            raise NeedsOthers(
                f"{name}: {kind} keeps sessions, runs, user memories and metrics; give it others= for the rest"
            )
        return base(self, *args, **more)

    async def awaited(self: Any, *args: Any, **more: Any) -> Any:
        return await call(self, *args, **more)

    # Before a call, Agno checks whether the method is a coroutine function.
    method = wraps(base)(awaited if inspect.iscoroutinefunction(base) else call)
    method.__dict__.pop("__isabstractmethod__", None)
    return method


def _tables(db: Any) -> tuple[str, str, str, str]:
    return db.session_table_name, db.runs_table_name, db.memory_table_name, db.metrics_table_name


def _database(base: type, blocking: bool) -> Any:
    """A class with every method of Agno's base class, each ours or another database's."""
    work = _public(Records)
    methods = {name: _others(name, each) for name, each in _public(base).items() if name not in _BASE}
    methods |= {name: _ours(each, blocking) for name, each in work.items()}
    return type(f"_{base.__name__}", (base,), methods)


_Blocking: Any = _database(BaseDb, blocking=True)
_Async: Any = _database(AsyncBaseDb, blocking=False)


class DistributedDb(_Blocking):  # type: ignore[misc] # the base is created above
    """Agno's database for blocking code: sessions, runs, user memories and metrics in a store, the rest in `others`.

    Example::

        with StateStore.open(archive="memory") as store:  # or with the URLs of Redis and of PostgreSQL
            agent = Agent(id="a1", db=DistributedDb(store))
            agent.db.upsert_session(AgentSession(session_id="s1", agent_id="a1", session_data={}))
            agent.update_session_state({"city": "Oslo"}, session_id="s1")
            assert agent.get_session_state("s1") == {"city": "Oslo"}

    Two workers may change a session at once without undoing each other's changes: a save writes only the changes since
    the session was read, for each key of its state. The last write of a key wins. `others` is another BaseDb for the
    other families (knowledge, evals, traces, ...); without it, their methods raise NotImplementedError, and AgentOS
    answers 501. Metrics are counted from the sessions here.
    """

    def __init__(self, store: StateStore | AsyncStateStore, *, others: BaseDb | None = None, **names: Any) -> None:
        # `names`: the names of Agno's tables, and the id of the database
        super().__init__(**names)
        self.others = others
        self._store = open_store(store)
        self._work = Records(self._store.aio, *_tables(self))

    def session_record(self, session_id: str, *, user_id: str | None = None) -> Session:
        """Return the store's session that holds a session of Agno, for its other operations. No I/O."""
        record: Session = self._store.blocking.session(joined(self.session_table_name, session_id), user=user_id)
        return record

    def table_exists(self, table_name: str) -> bool:
        """Return whether a table of this name can be used."""
        return table_name in _tables(self) or (self.others is not None and bool(self.others.table_exists(table_name)))


class AsyncDistributedDb(_Async):  # type: ignore[misc] # the base is created above
    """Agno's database for asyncio code, as DistributedDb; `others` is another AsyncBaseDb."""

    def __init__(self, store: AsyncStateStore | StateStore, *, others: AsyncBaseDb | None = None, **names: Any) -> None:
        super().__init__(**names)
        self.others = others
        self._store = open_store(store)
        self._work = Records(self._store.aio, *_tables(self))

    def session_record(self, session_id: str, *, user_id: str | None = None) -> AsyncSession:
        """Return the store's session that holds a session of Agno, for its other operations. No I/O."""
        return self._store.aio.session(joined(self.session_table_name, session_id), user=user_id)

    async def table_exists(self, table_name: str) -> bool:
        """Return whether a table of this name can be used."""
        return table_name in _tables(self) or (
            self.others is not None and bool(await self.others.table_exists(table_name))
        )


# Streaming a run

_CONTENT = (RunEvent.run_content.value, TeamRunEvent.run_content.value)
_COMPLETED = (RunEvent.run_completed.value, TeamRunEvent.run_completed.value)


def stream(turn: Any, events: Any) -> Streamed[Any]:
    """Stream the events of a run into a turn; iterate over the return value, which yields the same events.

    Example::

        async with db.session_record("s1", user_id="ada").turn(request_id="r1") as turn:
            run = agent.arun("A sauna, please", session_id="s1", user_id="ada", stream=True, stream_events=True)
            answer = stream(turn, run)
            async for event in answer:
                ...
            turn.outcome = answer.text

    Followers are shown deltas of the answer as str, and other events, also those of a team's members, as Agno's JSON.
    In a blocking turn, `events` come from `agent.run`. The turn counts the tokens of completed runs: see `turn.usage`.
    """
    return Streamed(turn, _stored(events) if hasattr(events, "__aiter__") else events, _shown, _used)


async def _stored(events: Any) -> AsyncIterator[Any]:
    """The events; when they end, Agno has stored the run, for which it begins a task if the run is interrupted."""
    others = set(_background_tasks)
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    finally:
        loop = asyncio.get_running_loop()
        saving = [task for task in _background_tasks - others if task.get_loop() is loop and "_persist" in repr(task)]
        if saving:
            await asyncio.wait(saving)


def _shown(event: Any) -> Iterator[Any]:
    content = getattr(event, "content", None)
    is_delta = getattr(event, "event", "") in _CONTENT and isinstance(content, str) and not event.parent_run_id
    yield content if is_delta else event.to_dict()


def _used(event: Any) -> Iterator[Used]:
    metrics = getattr(event, "metrics", None)
    if getattr(event, "event", "") in _COMPLETED and metrics is not None:
        models = [each for some in (metrics.details or {}).values() for each in some]
        for each in models or [metrics]:
            yield Used(getattr(each, "id", None), each.input_tokens, each.output_tokens)
