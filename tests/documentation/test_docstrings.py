"""Editors and documentation tools show a docstring and a signature for each public name, on both APIs."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from pathlib import Path

import pytest
from public_names import PUBLIC, VALUES, members

import distributed_state

pytestmark = pytest.mark.unit

CLASSES = {name: each for name, each in PUBLIC.items() if isinstance(each, type)}
OPEN_WITH_AN_EXAMPLE = ("StateStore", "Session", "Turn", "Agent")
apis = pytest.mark.parametrize("name", [*OPEN_WITH_AN_EXAMPLE, *(f"Async{name}" for name in OPEN_WITH_AN_EXAMPLE)])


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


@apis
def test_the_classes_that_one_meets_first_open_with_an_example(name: str) -> None:
    first, _, rest = inspect.cleandoc(PUBLIC[name].__doc__).partition("\n\n")
    assert first.endswith(".")
    assert rest.startswith("Example::\n\n    "), name
