"""The sync and the asyncio API: the same names, parameters and docstrings on both."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, MutableMapping
from typing import Any

import generate_blocking
import pytest
from blocking_text import in_blocking_words

from distributed_state import AsyncTurn
from distributed_state.remote.session import AsyncRemoteTurn

pytestmark = pytest.mark.unit


def pair(entry: str, file: generate_blocking.File) -> tuple[type, type]:
    """A class of the sync API and its asyncio counterpart."""
    module, name, sync_name = generate_blocking.classes_of(entry)
    ours = importlib.import_module(f"{generate_blocking.PACKAGE}.{file.module}")
    return getattr(ours, sync_name), getattr(importlib.import_module(module), name)


COUNTERPARTS = generate_blocking.rules().counterparts
# Tested with the agents' other parts; and the part of a store whose methods are the store's.
APART = {"AsyncAgent", "AsyncHost", "AsyncLastState", "AsyncFleet"}
PAIRS = [
    pair(entry, file)
    for file in generate_blocking.FILES
    for entry in file.classes
    if generate_blocking.classes_of(entry)[1] not in APART
]
INNER = {async_class: generate_blocking.INNER.get(async_class.__name__, set()) | {"wrap"} for _, async_class in PAIRS}
pairs = pytest.mark.parametrize(
    ("sync_class", "async_class"), PAIRS, ids=[sync_class.__name__ for sync_class, _ in PAIRS]
)


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    found = {name: getattr(kind, name) for name in public(kind) - INNER.get(kind, set())}
    return {name: each for name, each in found.items() if callable(each)}


def blocking(text: str) -> str:
    """How a type of the asyncio API reads on the blocking one."""
    text = re.sub(r"\bAsync\w+", lambda match: COUNTERPARTS.get(match[0], match[0]), text)
    return text.replace(" | Awaitable[T]", "").replace(" | Awaitable[Mapping[str, Any]]", "")


@pairs
def test_they_offer_the_same_methods(sync_class: type, async_class: type) -> None:
    assert methods(sync_class).keys() == methods(async_class).keys()
    assert methods(sync_class) or sync_class.__name__ in (
        "TransactionBody",
        "RemoteTransactionBody",
        "RemoteTurnBody",
        "Edit",
        "Stoppable",
    )
    assert hasattr(sync_class, "__enter__") == hasattr(async_class, "__aenter__")
    assert hasattr(sync_class, "__exit__") == hasattr(async_class, "__aexit__")


@pairs
def test_they_take_the_same_parameters(sync_class: type, async_class: type) -> None:
    for name, method in methods(sync_class).items():
        ours, theirs = inspect.signature(method), inspect.signature(methods(async_class)[name])
        assert list(ours.parameters) == list(theirs.parameters), name
        for one, other in zip(ours.parameters.values(), theirs.parameters.values(), strict=True):
            assert (one.kind, one.default) == (other.kind, other.default), f"{name}({one.name})"
            assert str(one.annotation) == blocking(str(other.annotation)), f"{name}({one.name})"
        assert str(ours.return_annotation) == blocking(str(theirs.return_annotation)), name


@pairs
def test_they_say_the_same(sync_class: type, async_class: type) -> None:
    """But for examples, which are in the words of their API."""
    for name, method in methods(sync_class).items():
        assert method.__doc__, f"{name} has no docstring"
        assert method.__doc__ == in_blocking_words(methods(async_class)[name].__doc__ or "", COUNTERPARTS), name


@pairs
def test_the_sync_api_does_not_speak_of_the_other(sync_class: type, async_class: type) -> None:
    for method in methods(sync_class).values():
        assert "async with" not in (method.__doc__ or "")
        assert "await" not in (method.__doc__ or "")
        assert "Async" not in (method.__doc__ or "")


@pairs
def test_what_blocks_here_is_awaited_there(sync_class: type, async_class: type) -> None:
    """No coroutine leaks out of the sync API, and only what does no I/O is plain on the other."""
    plain = {"session", "user", "app", "task", "batch", "transaction", "lock", "on", "open", "turn", "edit"}
    plain |= {"items", "put_item", "delete_item"}
    plain |= {"acting_as", "durable", "invalidate", "events", "announce", "output", "handler", "stop_working"}
    if async_class in (AsyncTurn, AsyncRemoteTurn):
        plain = methods(async_class).keys() - {
            "arrived",
            "messages",
            "window",
            "call",
            "load_state",
            "save_state",
            "stream",
            "flush",
        }  # a view in memory
    for name, method in methods(async_class).items():
        assert inspect.iscoroutinefunction(method) == (name not in plain), name
        assert not inspect.iscoroutinefunction(methods(sync_class)[name])


@pairs
def test_the_sync_api_holds_no_logic(sync_class: type, async_class: type) -> None:
    """One line a method, but for the shortcut of a hot read, and `on`, which has to say that blocking code calls."""
    longer = {"get": 2, "open": 6, "acquire": 2, "on": 3}
    for name, method in methods(sync_class).items():
        if hasattr(MutableMapping, name) and name not in vars(sync_class):
            continue
        source = textwrap.dedent(inspect.getsource(getattr(method, "__func__", method)))
        function = ast.parse(source).body[0]
        assert isinstance(function, ast.FunctionDef)
        assert len(function.body) - 1 <= longer.get(name, 1), name  # the docstring is the first


@pairs
def test_properties_exist_on_both(sync_class: type, async_class: type) -> None:
    for name in public(sync_class):
        if isinstance(inspect.getattr_static(sync_class, name), property):
            words = inspect.getsource(async_class) if not hasattr(async_class, name) else ""
            ours = [base for base in async_class.__mro__[1:] if base.__module__.startswith("distributed_state")]
            inherited = "".join(inspect.getsource(base) for base in ours)
            assert hasattr(async_class, name) or re.search(rf"self\.(\w+, self\.)*{name}\b", words + inherited), name


def shape(text: str) -> list[str]:
    """What a file says but for its imports, however it is formatted."""
    body = ast.parse(text).body
    return [ast.unparse(node) for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize("file", generate_blocking.FILES, ids=lambda file: file.module)
def test_the_blocking_files_are_fresh(file: generate_blocking.File) -> None:
    """Whoever changes an asyncio class runs tools/generate_blocking.py; its --check looks at the format, too."""
    assert shape(generate_blocking.path_of(file).read_text()) == shape(generate_blocking.unformatted(file))


def test_a_changed_file_is_shown_and_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The control of the test above: `--check` finds one changed character, says where, and writes nothing."""
    file = generate_blocking.FILES[0]
    path = generate_blocking.path_of(file)
    before = path.read_text()
    monkeypatch.setattr(generate_blocking, "FILES", (file,))
    monkeypatch.setattr(generate_blocking, "generated", lambda _: before.replace("class Lease", "class Leases", 1))
    assert generate_blocking.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert path.name in said
    assert "-class Lease:\n+class Leases:\n" in said
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "`async with store.events() as e: async for each in e: ...`",
            "`with store.events() as e: for each in e: ...`",
        ),
        ("    import asyncio\n\n    asyncio.run(main(1))\n", "\n    main(1)\n"),
        ("async def main() -> None:\n    await f(await g())", "def main() -> None:\n    f(g())"),
        ("AsyncTransaction, AsyncOther, `async` code", "TransactionBody, AsyncOther, `async` code"),
    ],
)
def test_examples_are_in_the_words_of_their_api(said: str, expected: str) -> None:
    assert in_blocking_words(said, COUNTERPARTS) == expected


def test_what_the_generator_cannot_tell_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A sentence that is to be replaced and is not there any more must not leave the other API's in its place."""
    monkeypatch.setattr(generate_blocking, "PHRASES", {"AsyncLease": (("what nobody says", ""),)})
    monkeypatch.setattr(generate_blocking, "formatted", lambda text, path: text)  # no process
    assert generate_blocking.main(["--check"]) == 2
    assert "what nobody says" in capsys.readouterr().err
