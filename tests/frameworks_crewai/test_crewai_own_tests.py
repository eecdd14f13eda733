"""The tests of CrewAI about persistence, with its own and with ours in place of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frameworks import theirs

# Not test_sqlite_connection_lifecycle: it counts and breaks connections to SQLite.
FILES = [
    f"tests/test_{name}.py"
    for name in (
        "flow_persistence", "async_human_feedback", "flow_persistence_factory", "flow_resumability_regression",
    )
]  # fmt: skip
PASSED = 53  # of those that make a persistence; as many with theirs as with ours


@pytest.mark.only(api="asyncio", warm="valkey", cold="postgres")
@pytest.mark.parametrize("adapter", ["theirs", "ours"])
@pytest.mark.timeout(600)
def test_crewais_own_tests_pass(
    adapter: str, archive: Callable[[str], Path], opener: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}")  # the plugin is here
    environment = {"DISTRIBUTED_STATE_URL": opener.url, "DISTRIBUTED_STATE_ARCHIVE": opener.archive}
    folder = archive("crewai")
    ended = theirs.run(
        folder, FILES, plugin="crewai_stand_ins", made=tmp_path / "made.json",
        environment={**environment, "ADAPTER": adapter},
        options=[f"--config-file={os.devnull}", f"--rootdir={folder}"],  # the archive has none, and lies in ours
    )  # fmt: skip
    assert ended.named("failed") == set(), ended.printed
    assert len(ended.outcomes) == len(ended.named("passed")) == PASSED, ended.printed
