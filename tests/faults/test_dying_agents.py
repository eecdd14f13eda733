"""Agents whose workers are killed. Law: a death between any two lines loses at most the step in flight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from below import ROOT

DYING = Path(__file__).with_name("dying_agent.py")


@pytest.mark.wide
@pytest.mark.only(api="blocking", warm="real")
@pytest.mark.parametrize(
    "deaths", [8, pytest.param(40, marks=pytest.mark.full), pytest.param(400, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(1200)
async def test_whoever_dies_between_two_lines_loses_at_most_a_step(opener: Any, deaths: int) -> None:
    store = await opener()
    place = {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    command = [sys.executable, "-X", "faulthandler", str(DYING), str(deaths)]
    environment = os.environ | {"PLACE": json.dumps(place)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == deaths
    assert sum(killed for _, _, killed in rows) >= deaths * 0.8, "a worker that was not killed proves nothing"
    for id, line, _ in rows:
        state = await store.session(id).load_state()
        assert state.final_answer == "bought bread, milk", (id, line)
        assert [call.arguments["item"] for call in state.memory.tool_calls] == ["bread", "milk"], (id, line)
        assert [message.role for message in state.history] == ["user", "tool", "tool", "assistant"]
        assert await store.session(id).get("bought", fresh=True) == ["bread", "milk"], (id, line)
        assert await store.user(id).get("bought", fresh=True) == 2, (id, line)
        history = await store.session(id).history()
        assert [change.version for change in history] == list(range(1, 7)), (id, line)
