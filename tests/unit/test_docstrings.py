"""What editors and documentation tools show of the public names, on both faces, and that the examples in it are true.

The embedded store is opened in this process: nothing else is started.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from pydantic import BaseModel

import distributed_state
from distributed_state import AsyncStateStore, StateStore

PUBLIC = {name: getattr(distributed_state, name) for name in distributed_state.__all__}
CLASSES = {name: each for name, each in PUBLIC.items() if isinstance(each, type)}
# These have no class of their own to carry a docstring; what they are, the line above or below them in the source says.
VALUES = {"DEFAULT", "REASONING_MACHINE", "TASK_MACHINE", "TOOLBOX", "Policy"}
OPEN_WITH_AN_EXAMPLE = ("StateStore", "Session", "Turn", "Agent")
faces = pytest.mark.parametrize("name", [*OPEN_WITH_AN_EXAMPLE, *(f"Async{name}" for name in OPEN_WITH_AN_EXAMPLE)])


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The methods and properties of a class that the package defines, inherited ones too."""
    for name in dir(kind):
        owner = next((each for each in kind.__mro__ if name in vars(each)), object)
        each = vars(owner).get(name)
        each = getattr(each, "__func__", each)
        ours = owner.__module__.startswith("distributed_state") and not name.startswith(("_", "model_"))
        if ours and (callable(each) or isinstance(each, property)):
            yield name, each


def examples() -> Iterator[Any]:
    """Each indented block after a line that ends in `::`, of all public names, once."""
    seen = set()
    for name, kind in PUBLIC.items():
        described = [(name, kind), *(members(kind) if isinstance(kind, type) else ())]
        for member, each in described:
            text = inspect.cleandoc(each.__doc__ or "") if name not in VALUES else ""
            for number, block in enumerate(re.findall(r"::\n\n((?:    .*\n|\n)+)", text + "\n")):
                example = textwrap.dedent(block).strip()
                of_asyncio = name.startswith("Async")
                if (example, member, of_asyncio) not in seen:
                    seen.add((example, member, of_asyncio))
                    where = name if each is kind else f"{name}.{member}"
                    yield pytest.param(example, of_asyncio, id=f"{where}-{number}")


def compiled(example: str) -> CodeType:
    return compile(example, "<example>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def names(store: Any) -> dict[str, Any]:
    """What an example may use without saying where it comes from."""
    session = store.session("c1", user="u1")
    return {**PUBLIC, "BaseModel": BaseModel, "store": store, "session": session, "record": store.task("t0")}


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - VALUES))
def test_every_public_name_is_described(name: str) -> None:
    each = PUBLIC[name]
    # A class must not show the docstring that it inherits.
    assert vars(each).get("__doc__") if isinstance(each, type) else each.__doc__, name


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_member_is_described(name: str) -> None:
    missing = [member for member, each in members(CLASSES[name]) if not (each.__doc__ or "").strip()]
    assert not missing


@pytest.mark.parametrize("name", sorted(VALUES))
def test_public_values_are_described_in_the_source(name: str) -> None:
    """Editors show the docstring that follows an assignment."""
    value = PUBLIC[name]
    package = Path(distributed_state.__file__).parent
    for module in package.rglob("*.py"):
        body = ast.parse(module.read_text()).body if f"\n{name} = " in module.read_text() else []
        for node, following in pairwise(body):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                assert isinstance(following, ast.Expr), f"{module.name}: {name}, {type(value).__name__}"
                assert isinstance(following.value, ast.Constant)
                return
    pytest.fail(f"{name} is assigned nowhere")


@faces
def test_the_classes_that_one_meets_first_open_with_an_example(name: str) -> None:
    first, _, rest = inspect.cleandoc(PUBLIC[name].__doc__).partition("\n\n")
    assert first.endswith(".")
    assert rest.startswith("Example::\n\n    "), name


def test_there_are_examples_of_both_faces() -> None:
    found = [param.values[1] for param in examples()]
    assert found.count(True) == found.count(False) >= 30, "each is generated for the other face"


@pytest.mark.parametrize(("example", "of_asyncio"), list(examples()))
def test_examples_are_true(
    example: str, of_asyncio: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each runs as it stands, on its face, against an embedded store, and what it asserts holds."""
    monkeypatch.chdir(tmp_path)
    code = compiled(example)

    async def on_asyncio() -> None:
        async with AsyncStateStore.open(archive="memory") as store:
            waiting = eval(code, names(store))
            if waiting is not None:
                await waiting

    if of_asyncio:
        asyncio.run(on_asyncio())
    else:
        assert not code.co_flags & inspect.CO_COROUTINE, "an example of the blocking face awaits nothing"
        with StateStore.open(archive="memory") as store:
            eval(code, names(store))
