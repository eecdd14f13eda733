"""What the tests of adapters share. Law: nothing leaves this machine but what pip fetches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from frameworks import theirs

# Before any framework is imported: by default they send traces to their makers.
os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"}


@pytest.fixture
def archive(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """What gives the source archive of a distribution, unpacked."""
    cache = pytestconfig.cache
    assert cache is not None
    return lambda name: theirs.archive(name, cache.mkdir("frameworks"))


@pytest.fixture(autouse=True, scope="session")
def claude(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A stand-in for Claude Code in the path, and a folder for its files."""
    folder = tmp_path_factory.mktemp("claude")
    folder.joinpath("claude").symlink_to(theirs.HERE / "claude_stand_in.py")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", str(folder), prepend=os.pathsep)
        patched.setenv("CLAUDE_CONFIG_DIR", str(folder / "config"))
        yield
