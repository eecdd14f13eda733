"""Public names are loaded on first use, so they stand twice: in `__init__.py` to run, in its stub for type checkers."""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import pickle
from importlib import import_module
from pathlib import Path

import pytest

import distributed_state

pytestmark = pytest.mark.unit

STUB = Path(distributed_state.__file__).with_suffix(".pyi")
NEEDS_AN_EXTRA = {"metrics"}


def imported_by(stub: str) -> dict[str, str]:
    """Each name that a stub offers, and the module that it says it is from."""
    return {
        name.asname or name.name: f"{node.module}.{name.name}"
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }


def listed_by(stub: str) -> list[str]:
    """`__all__` of a stub."""
    (found,) = (node.value for node in ast.parse(stub).body if isinstance(node, ast.Assign))
    return [str(name) for name in ast.literal_eval(found)]


def differences(stub: str) -> set[str]:
    """The names on which a stub and the running package do not agree."""
    wrong = set(listed_by(stub)) ^ set(distributed_state.__all__)
    for name, place in imported_by(stub).items():
        module, _, inner = place.rpartition(".")
        try:
            expected = getattr(import_module(module), inner, None) or import_module(place)
            if getattr(distributed_state, name) is not expected:
                wrong.add(name)
        except (AttributeError, ImportError):
            wrong.add(name)
    return wrong | (set(imported_by(stub)) - NEEDS_AN_EXTRA) ^ set(distributed_state.__all__)


def test_the_stub_is_the_package() -> None:
    stub = STUB.read_text()
    assert differences(stub) == set()
    assert set(imported_by(stub)) == {*distributed_state.__all__, *NEEDS_AN_EXTRA}


@pytest.mark.parametrize(
    ("written", "instead", "name"),
    [
        ('    "StateStore",\n', "", "StateStore"),
        ("import Host\n", "import Agent as Host\n", "Host"),
        (
            "distributed_state.store.admin import AsyncAdmin",
            "distributed_state.store.admins import Other",
            "AsyncAdmin",
        ),
        ("from distributed_state.settings import Settings\n", "", "Settings"),
    ],
)
def test_a_stub_that_is_out_of_date_is_noticed(written: str, instead: str, name: str) -> None:
    stub = STUB.read_text().replace("Agent, Host\n", "Agent\nfrom distributed_state.agents.blocking import Host\n")
    assert written in stub
    assert name in differences(stub.replace(written, instead))


def test_no_name_is_offered_twice() -> None:
    assert len(set(distributed_state.__all__)) == len(distributed_state.__all__)
    assert len(set(listed_by(STUB.read_text()))) == len(listed_by(STUB.read_text()))


def test_everything_offered_is_listed() -> None:
    assert {*distributed_state.__all__, "__all__", "__doc__"} <= set(dir(distributed_state))
    assert not NEEDS_AN_EXTRA & set(distributed_state.__all__), "`import *` has to work without extras"


def test_a_name_that_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'distributed_state' has no attribute 'StateShop'"):
        getattr(distributed_state, "StateShop")  # noqa: B009 - a type checker would refuse the other way
    with pytest.raises(ImportError, match="cannot import name 'StateShop'"):
        exec("from distributed_state import StateShop", {})


def test_a_star_brings_every_name() -> None:
    names: dict[str, object] = {}
    exec("from distributed_state import *", names)
    assert set(names) - set(dir(builtins)) - {"__builtins__"} == set(distributed_state.__all__)


def test_what_was_loaded_late_is_pickled_and_inspected_as_ever() -> None:
    message = distributed_state.Message(role="user", content="hi")
    assert pickle.loads(pickle.dumps(message)) == message
    assert pickle.loads(pickle.dumps(distributed_state.StateStore)) is distributed_state.StateStore
    assert copy.deepcopy(message) == message
    assert inspect.getdoc(distributed_state.StateStore)
    assert inspect.signature(distributed_state.StateStore.open)
    assert dict(inspect.getmembers(distributed_state, inspect.isclass))["StateStore"] is distributed_state.StateStore
