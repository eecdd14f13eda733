"""A pytest plugin that runs LangGraph's own tests on another saver. Law: nothing of theirs is copied or edited.

Loaded into a run of the tests that stand in the source archives of langgraph, langgraph-checkpoint and
langgraph-checkpoint-postgres. The savers and stores that their fixtures make are replaced at one place each, and of
their tests those stay that take one. ADAPTER says what stands in: "theirs" is their own in memory (the control: as many
must pass), "ours" is this package, with the servers that WARM and ARCHIVE name. Those that made one are counted.
"""

from __future__ import annotations

import inspect
import os
import re
from types import ModuleType

import langgraph_stand_ins as stand_ins
import made
import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.store.memory import InMemoryStore

pytest_plugins = ["made"]

FIXTURES = ("sync_checkpointer", "async_checkpointer", "sync_store", "async_store")
OURS = os.environ["ADAPTER"] == "ours"
MEMORY = re.compile(r"\b(?:InMemorySaver|MemorySaver)\(")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if _wanted(item)]
    kept = set(map(id, chosen))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = chosen
    if OURS:
        _replace({item.module for item in chosen if isinstance(item, pytest.Function)})
    else:
        _note(InMemorySaver)
        _note(InMemoryStore)


def _wanted(item: pytest.Item) -> bool:
    """Those that take a saver, of the kind that is replaced, or make a memory saver by name."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    kinds = [given[name] for name in FIXTURES if name in given]
    if kinds:
        return all(kind in ("memory", "in_memory") for kind in kinds) and given.get("cache") != "sqlite"
    return isinstance(item, pytest.Function) and bool(MEMORY.search(_source(item)))


def _source(item: pytest.Function) -> str:
    """What the test says, and what the helpers of its module that it calls say."""
    text = inspect.getsource(item.function)
    own = {name: each for name, each in vars(item.module).items() if inspect.isfunction(each)}
    helpers = [each for name, each in own.items() if name + "(" in text and each is not item.function]
    return text + "".join(inspect.getsource(each) for each in helpers if each.__module__ == item.module.__name__)


def _note(kind: type) -> None:
    """Have each that is made be noted."""
    begin = kind.__init__

    def noted(self: object, *given: object, **options: object) -> None:
        made.note()
        begin(self, *given, **options)

    kind.__init__ = noted  # type: ignore[misc]


def _replace(modules: set[ModuleType]) -> None:
    """Give their fixtures and modules ours."""
    import tests.conftest as theirs

    theirs._checkpointer_memory = stand_ins.saver
    theirs._store_memory = stand_ins.store
    for module in modules:
        for name in ("InMemorySaver", "MemorySaver"):
            if name in vars(module):
                setattr(module, name, stand_ins.Saver)
