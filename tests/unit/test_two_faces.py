"""Two faces, one API: the same names, parameters and docstrings on both."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest

from distributed_state.conversation.session import AsyncSession
from distributed_state.conversation.turn import AsyncTurn
from distributed_state.conversation.typed_session import AsyncTypedSession
from distributed_state.events.consumer import AsyncEvents
from distributed_state.records.batch import AsyncBatch
from distributed_state.records.record import AsyncRecord
from distributed_state.records.transaction import AsyncTransaction
from distributed_state.records.typed import AsyncEdit, AsyncTypedRecord
from distributed_state.store import blocking as face_of_blocking
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.blocking_fleet import Events
from distributed_state.warm.lease import AsyncLease

PAIRS: list[tuple[type, type]] = [
    (face_of_blocking.StateStore, AsyncStateStore),
    (face_of_blocking.Session, AsyncSession),
    (face_of_blocking.Record, AsyncRecord),
    (face_of_blocking.Lease, AsyncLease),
    (face_of_blocking.Batch, AsyncBatch),
    (face_of_blocking.TransactionBody, AsyncTransaction),
    (face_of_blocking.Turn, AsyncTurn),
    (face_of_blocking.TypedSession, AsyncTypedSession),
    (face_of_blocking.TypedRecord, AsyncTypedRecord),
    (face_of_blocking.Edit, AsyncEdit),
    (Events, AsyncEvents),
]
# What the package calls on the asyncio objects from inside: no part of the API on either face.
INNER = {
    AsyncStateStore: {"tiers", "all_tiers", "hook"},
    AsyncLease: {"renewed", "lose", "acquire_and", "hand_over", "handed_over", "protect", "gone"},
    AsyncEdit: {"finish"},
    AsyncEvents: {"asks", "end", "join"},
}
TWINS = {"AsyncTransaction": "TransactionBody"} | {twin.__name__: face.__name__ for face, twin in PAIRS}
pairs = pytest.mark.parametrize(("face", "twin"), PAIRS, ids=[face.__name__ for face, _ in PAIRS])


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    found = {name: getattr(kind, name) for name in public(kind) - INNER.get(kind, set())}
    return {name: each for name, each in found.items() if callable(each)}


def blocking(text: str) -> str:
    """How the asyncio face's words read on the blocking one."""
    text = re.sub(r"\bAsync\w+", lambda match: TWINS.get(match[0], match[0]), text)
    return (
        text.replace("async with", "with")
        .replace("await ", "")
        .replace(" | Awaitable[T]", "")
        .replace(" | Awaitable[Mapping[str, Any]]", "")
        .replace("doctor.", "")
    )


@pairs
def test_they_offer_the_same_methods(face: type, twin: type) -> None:
    assert methods(face).keys() == methods(twin).keys()
    assert methods(face) or face in (face_of_blocking.TransactionBody, face_of_blocking.Edit)
    assert hasattr(face, "__enter__") == hasattr(twin, "__aenter__")
    assert hasattr(face, "__exit__") == hasattr(twin, "__aexit__")


@pairs
def test_they_take_the_same_parameters(face: type, twin: type) -> None:
    for name, method in methods(face).items():
        ours, theirs = inspect.signature(method), inspect.signature(methods(twin)[name])
        assert list(ours.parameters) == list(theirs.parameters), name
        for one, other in zip(ours.parameters.values(), theirs.parameters.values(), strict=True):
            assert (one.kind, one.default) == (other.kind, other.default), f"{name}({one.name})"
            assert str(one.annotation) == blocking(str(other.annotation)), f"{name}({one.name})"
        assert str(ours.return_annotation) == blocking(str(theirs.return_annotation)), name


@pairs
def test_they_say_the_same(face: type, twin: type) -> None:
    assert face.__doc__
    assert face.__doc__ == blocking(twin.__doc__ or "")
    for name, method in methods(face).items():
        assert method.__doc__, f"{name} has no docstring"
        assert method.__doc__ == blocking(methods(twin)[name].__doc__ or ""), name


@pairs
def test_the_blocking_face_does_not_speak_of_the_other(face: type, twin: type) -> None:
    for method in methods(face).values():
        assert "await" not in (method.__doc__ or "")
        assert "Async" not in (method.__doc__ or "")


@pairs
def test_what_blocks_here_is_awaited_there(face: type, twin: type) -> None:
    """No coroutine leaks out of the blocking face, and only what does no I/O is plain on the other."""
    plain = {"session", "user", "app", "task", "batch", "transaction", "lock", "on", "open", "turn", "edit"}
    plain |= {"acting_as", "invalidate", "events", "announce"}
    if twin is AsyncTurn:
        plain = methods(twin).keys() - {"messages", "window", "call", "load_state", "save_state"}  # a view in memory
    for name, method in methods(twin).items():
        assert inspect.iscoroutinefunction(method) == (name not in plain), name
        assert not inspect.iscoroutinefunction(methods(face)[name])


@pairs
def test_the_blocking_face_holds_no_logic(face: type, twin: type) -> None:
    """One line a method; the shortcut of a hot read is the one exception."""
    longer = {"get": 2, "open": 4, "acquire": 2}
    for name, method in methods(face).items():
        if hasattr(MutableMapping, name) and name not in vars(face):
            continue
        source = textwrap.dedent(inspect.getsource(getattr(method, "__func__", method)))
        function = ast.parse(source).body[0]
        assert isinstance(function, ast.FunctionDef)
        assert len(function.body) <= longer.get(name, 1), name


@pairs
def test_properties_exist_on_both(face: type, twin: type) -> None:
    for name in public(face):
        if isinstance(inspect.getattr_static(face, name), property):
            words = inspect.getsource(twin) if not hasattr(twin, name) else ""
            ours = [base for base in twin.__mro__[1:] if base.__module__.startswith("distributed_state")]
            inherited = "".join(inspect.getsource(base) for base in ours)
            assert hasattr(twin, name) or re.search(rf"self\.(\w+, self\.)*{name}\b", words + inherited), name
