"""Files of Strands are copied: whole, once, again after a kill, and never over what others wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from frameworks.strands_crew import agent
from strands.session import FileSessionManager

import distributed_state.adapters.strands_adopting as strands
from distributed_state import InvalidValue, NotFound
from distributed_state.adapters.adopting import Adopted, adopt
from distributed_state.adapters.strands import DistributedSessionManager

pytestmark = pytest.mark.only(api="asyncio")


async def run(store: Any, source: Any, *, more: Any = None, **options: Any) -> Adopted:
    async with AsyncExitStack() as stack:
        return await adopt(await strands.threads(stack, store, source, **(more or {})), store, **options)


def counts(done: Adopted) -> tuple[int, int, dict[str, str], dict[str, str]]:
    return done.copied, done.there, done.differ, done.failed


async def talk(folder: Path, id: str, *texts: str, **options: Any) -> None:
    call = {"name": "look_up", "input": {"turn": "1"}}
    for text in texts:
        await agent(FileSessionManager(id, f"{folder}"), call, "done", **options).invoke_async(text)


def whole(manager: Any, id: str, *agents: str) -> Any:
    return manager.session, [(manager.read_agent(id, each), manager.list_messages(id, each)) for each in agents]


async def test_sessions_are_copied_and_go_on(store: Any, tmp_path: Path) -> None:
    await talk(tmp_path, "a", "one", "two", state={"city": "Oslo"})
    await talk(tmp_path, "a", "three", agent_id="other")
    await talk(tmp_path, "b", "one")
    graph = SimpleNamespace(id="g", serialize_state=lambda: {"state": [1]})
    FileSessionManager("b", f"{tmp_path}").create_multi_agent("b", graph)  # type: ignore[arg-type]
    before = {each: each.stat().st_mtime_ns for each in tmp_path.rglob("*")}
    assert counts(await run(store, tmp_path, dry_run=True)) == (2, 0, {}, {})
    assert await store.sessions(fresh=True) == []
    assert counts(await run(store, f"{tmp_path}")) == (2, 0, {}, {})
    assert counts(await run(store, tmp_path)) == (0, 2, {}, {})
    assert {each: each.stat().st_mtime_ns for each in tmp_path.rglob("*")} == before, "a source is only read"
    theirs, ours = FileSessionManager("a", f"{tmp_path}"), DistributedSessionManager("a", store)
    assert whole(ours, "a", "default", "other") == whole(theirs, "a", "default", "other")
    assert DistributedSessionManager("b", store).read_multi_agent("b", "g") == {"state": [1]}
    messages = await store.session("a").messages()
    assert [each.strands["agent_id"] for each in messages] == ["default"] * 8 + ["other"] * 4
    assert messages[0].timestamp < messages[-1].timestamp < (await store.session("a").history())[-1].time
    # Both go on.
    await talk(tmp_path, "a", "four")
    resumed = agent(DistributedSessionManager("b", store), "here")
    await resumed.invoke_async("on")
    assert len(resumed.messages) == 6
    done = await run(store, tmp_path)
    assert counts(done) == (1, 0, {"b": "it went on here: 2 messages of agent default are not in the source"}, {})
    assert whole(DistributedSessionManager("a", store), "a", "default") == whole(theirs, "a", "default")


async def test_what_was_changed_or_deleted_here_stays(store: Any, tmp_path: Path) -> None:
    for id in "abc":
        await talk(tmp_path, id, "one", state={"n": 1})
    await run(store, tmp_path)
    await store.session("a").set("state/default/n", 2)
    message = DistributedSessionManager("b", store).list_messages("b", "default")[0]
    message.redact_message = {"role": "user", "content": [{"text": "gone"}]}
    DistributedSessionManager("b", store).update_message("b", "default", message)
    await store.erase("c")
    done = await run(store, tmp_path)
    assert counts(done)[:2] == (0, 0)
    assert done.differ == {
        "a": "it was changed here",
        "b": "message 0 of agent default is not the same here",
        "c": "it was deleted here",
    }


async def test_a_copy_that_was_killed_is_completed_and_is_no_session_before(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await talk(tmp_path, "a", "one", "two", "three")
    monkeypatch.setattr(strands, "_AT_ONCE", 5)
    kind = type(store.aio.session("a"))
    write, calls = kind.write, []

    async def killed(self: Any, **change: Any) -> Any:
        calls.append(len(change["append"]))
        if len(calls) == 3:
            raise OSError("killed")
        return await write(self, **change)

    monkeypatch.setattr(kind, "write", killed)
    with pytest.raises(OSError, match="killed"):
        await run(store, tmp_path)
    assert calls == [5, 5, 2]
    assert await store.session("a").get("strands") is None
    assert counts(await run(store, tmp_path)) == (1, 0, {}, {})
    assert len(DistributedSessionManager("a", store).list_messages("a", "default")) == 12


async def test_a_session_that_lacks_a_message_is_named_and_the_others_are_copied(store: Any, tmp_path: Path) -> None:
    for id in "ab":
        await talk(tmp_path, id, "one")
    tmp_path.joinpath("session_a/agents/agent_default/messages/message_1.json").unlink()
    done = await run(store, tmp_path)
    assert counts(done) == (1, 0, {}, {"a": "InvalidValue: agent default has no message 1 in the source"})


async def test_owners_are_those_of_the_function(store: Any, tmp_path: Path) -> None:
    await talk(tmp_path, "a", "one")
    into = {"into": lambda id, store: store.session(f"strands/{id}", user="ada")}
    assert counts(await run(store, tmp_path, more=into)) == (1, 0, {}, {})
    assert counts(await run(store, tmp_path, more=into)) == (0, 1, {}, {})
    assert [info.id for info in await store.sessions(user="ada", fresh=True)] == ["strands/a"]


async def test_what_is_no_folder_of_sessions_is_refused(store: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no sessions of Strands"):
        await run(store, tmp_path)
    with pytest.raises(InvalidValue, match="the folder of a FileSessionManager"):
        await run(store, FileSessionManager)
    assert [*tmp_path.iterdir()] == []


async def test_the_command_copies(tmp_path: Path) -> None:
    await talk(tmp_path / "files", "a", "one")
    command = [sys.executable, "-m", "distributed_state", "--archive", f"sqlite:///{tmp_path}/s.db"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DISTRIBUTED_STATE_")}
    command += ["adopt", "strands", f"{tmp_path}/files"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "1 found in the source: 1 copied, 0 already equal, 0 differ, 0 failed" in done.stdout + done.stderr
    assert done.returncode == 0
