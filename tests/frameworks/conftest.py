"""What the tests of adapters share. Law: nothing leaves this machine but what pip fetches."""

from __future__ import annotations

import os
from collections.abc import Callable
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
