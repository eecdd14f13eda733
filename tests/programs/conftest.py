"""Typer makes the commands of these tests once. Law: not at each call, which takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import typer


@pytest.fixture(scope="session", autouse=True)
def commands_made_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield
