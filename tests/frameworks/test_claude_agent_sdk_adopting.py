"""Transcripts of Claude are copied: whole, once, and never over what others wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from claude_agent_sdk import (
    InMemorySessionStore,
    get_session_messages,
    import_session_to_store,
    project_key_for_directory,
)
from frameworks.adopting_sources import counts, run
from frameworks.claude_agent_sdk_crew import ID, ask, said, text_of

import distributed_state.adapters.claude_agent_sdk_adopting as claude
from distributed_state import InvalidValue, NotFound
from distributed_state.adapters.claude_agent_sdk import DistributedSessionStore

pytestmark = pytest.mark.only(api="asyncio")


async def test_transcripts_of_claude_are_copied(store: Any, tmp_path: Path) -> None:
    await ask(InMemorySessionStore(), "one", str(tmp_path), session_id=ID)
    await ask(InMemorySessionStore(), "with a subagent", str(tmp_path), session_id=ID)
    project = project_key_for_directory()
    folder = tmp_path / "projects" / project
    (notes,) = folder.glob("*/subagents/*.jsonl")
    notes.with_suffix(".meta.json").write_text('{"agentType": "x"}')
    name, older = f"{project}/{ID}", ID.replace("5f", "6f")
    folder.joinpath(f"{older}.jsonl").write_text('{"type": "summary", "summary": "s"}\n')
    os.utime(folder / f"{older}.jsonl", (1, 1))
    more = {"into": lambda store: DistributedSessionStore(store, user="ada")}
    assert counts(await run(claude, store, str(tmp_path), more=more)) == (2, 0, {}, {})
    assert counts(await run(claude, store, str(tmp_path / "projects"), more=more)) == (0, 2, {}, {})
    target = DistributedSessionStore(store, user="ada")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CLAUDE_CONFIG_DIR", str(tmp_path))
        assert await said(target) == [str(text_of(each.message)) for each in get_session_messages(ID)]
        imported = InMemorySessionStore()
        await import_session_to_store(ID, imported)
    for subpath in [None, *await target.list_subkeys({"project_key": project, "session_id": ID})]:
        key: Any = {"project_key": project, "session_id": ID} | ({"subpath": subpath} if subpath else {})
        assert await target.load(key) == await imported.load(key), "as the SDK itself imports it"
    newest, oldest = sorted(await target.list_sessions(project), key=lambda each: -each["mtime"])
    assert (newest["session_id"], oldest["session_id"]) == (ID, older)
    # It goes on in the source, where a line is being written; then here.
    await ask(InMemorySessionStore(), "two", str(tmp_path), session_id=ID)
    with folder.joinpath(f"{ID}.jsonl").open("a") as file:
        file.write('{"type": "us')
    folder.joinpath("broken.jsonl").write_text("no JSON\n")
    done = await run(claude, store, str(tmp_path), more=more)
    assert counts(done)[:2] == (1, 1)
    assert "line 1 is not JSON" in done.failed[f"{project}/broken"]
    folder.joinpath("broken.jsonl").unlink()
    assert (await said(target))[-1] == "You said: two"
    record = target.session_record(ID)
    await ask(target, "only here", str(tmp_path / "other"), resume=ID)
    done = await run(claude, store, str(tmp_path), more=more)
    assert done.differ == {name: "its transcript: it went on here: 3 entries of 12 are not in the source"}
    await record.rollback(version=1)
    assert (await run(claude, store, str(tmp_path), more=more)).differ == {name: "entries were removed here"}
    await target.delete({"project_key": project, "session_id": ID})
    assert (await run(claude, store, str(tmp_path), more=more)).differ == {name: "it was deleted here"}
    with pytest.raises(NotFound, match="there is no folder"):
        await run(claude, store, str(tmp_path / "none"))
    with pytest.raises(InvalidValue, match="the source is a folder"):
        await run(claude, store, target)
