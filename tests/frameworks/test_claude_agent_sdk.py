"""Sessions of the Claude Agent SDK on a store: its contract, its runs, several replicas, each entry once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from claude_agent_sdk import (
    AssistantMessage,
    InMemorySessionStore,
    MirrorErrorMessage,
    ResultMessage,
    StreamEvent,
    TextBlock,
    ToolUseBlock,
    UserMessage,
    fold_session_summary,
    get_subagent_messages_from_store,
    import_session_to_store,
    list_sessions_from_store,
    list_subagents_from_store,
    project_key_for_directory,
    rename_session_via_store,
)
from claude_agent_sdk.testing import run_session_store_conformance
from following import plain, shown
from frameworks import theirs
from frameworks.claude_agent_sdk_crew import ID, ask, ask_again, said
from frameworks.examples import run_examples
from reaping import Sweeps, quiet
from sync_api import Blocking, core

from distributed_state import AsyncSession, AsyncStateStore, Deleted, InvalidValue, Locked
from distributed_state.adapters import claude_agent_sdk
from distributed_state.adapters.claude_agent_sdk import DistributedSessionStore, stream
from distributed_state.formats import to_openai

pytestmark = pytest.mark.servers

KEY: Any = {"project_key": "p", "session_id": ID}
SUB: Any = {**KEY, "subpath": "subagents/agent-1"}
RECORD = f"claude/p/{ID}"
USE = {"type": "tool_use", "id": "t", "name": "book", "input": {"city": "Oslo"}}
ENTRIES: list[Any] = [
    {"type": "queue-operation", "operation": "enqueue", "timestamp": "2026-11-29T10:16:35.382Z"},
    {"type": "user", "uuid": "1", "parentUuid": None, "message": {"role": "user", "content": "Oslo \x00\ud800?"}},
    {"type": "assistant", "uuid": "2", "parentUuid": "1", "timestamp": "2026-11-29T10:16:36.000Z",
     "message": {"id": "m", "role": "assistant", "content": [USE], "usage": {"input_tokens": 3, "cost": 1.0}}},
    {"type": "user", "uuid": "3", "parentUuid": "2", "timestamp": "2026-11-29T10:16:37.000Z", "message": {
        "role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "booked"}]}},
    {"type": "assistant", "uuid": "4", "parentUuid": "3", "timestamp": "2026-11-29T10:16:38.000Z",
     "message": {"role": "assistant", "content": "Booked."}},
    {"type": "attachment", "uuid": "5", "parentUuid": "4", "message": {"role": "user"}, "number": 9, "metadata": [1]},
    {"type": "user", "message": "no chat message", "role": "user", "claude": {"deep": [[], {}, None, 2**60]}},
    {"type": "system", "message": {"role": "system", "content": "s"}},
    {"type": 7, "message": {"role": "user", "content": {"not": "text"}}},
    {"type": "custom-title", "customTitle": "Oslo"},
]  # fmt: skip


def sessions_of(store: Any, **options: Any) -> DistributedSessionStore:
    """One on either API of a store."""
    return DistributedSessionStore(store.it if isinstance(store, Blocking) else store, **options)


def timed(*seconds: int, parent: str | None = None) -> list[Any]:
    """Entries of these seconds, each with the one before it as its parent."""
    made = []
    for second in seconds:
        id, message = f"u{second}", {"role": "user", "content": str(second)}
        time = f"2026-11-29T10:{second // 60:02}:{second % 60:02}.000Z"
        made.append({"type": "user", "uuid": id, "parentUuid": parent, "timestamp": time, "message": message})
        parent = id
    return made


def ids(entries: list[Any] | None) -> list[str]:
    return [each["uuid"] for each in entries or ()]


@pytest.mark.parametrize("make", ["ours", "theirs"])
async def test_the_sdks_contract_for_stores_holds_as_for_its_own(store: Any, make: str) -> None:
    stores = {"ours": lambda: sessions_of(store, prefix=f"{uuid.uuid4()}/"), "theirs": InMemorySessionStore}
    await run_session_store_conformance(stores[make])


async def test_without_a_summary_the_contract_would_not_hold(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(claude_agent_sdk, "fold_session_summary", lambda before, key, entries: {"data": {"n": "x"}})
    monkeypatch.setattr(claude_agent_sdk, "_entry", lambda stored: {})
    with pytest.raises(AssertionError):
        await run_session_store_conformance(lambda: sessions_of(store, prefix=f"{uuid.uuid4()}/"))


async def test_entries_come_back_as_they_were_given_from_every_tier(store: Any) -> None:
    sessions = sessions_of(store)
    await sessions.append(KEY, ENTRIES)
    await sessions.append(SUB, ENTRIES)
    assert await store.session(RECORD).version() == 2, "each append is one commit"
    await store.admin.archive()
    for forget in False, True:
        if forget:
            with redis_of(store) as client:
                keys = keys_of(store, RECORD)
                client.delete(keys.record, keys.items)
                tiers(store).hot.forget(f"session:{RECORD}")
        assert await sessions.load(KEY) == ENTRIES
        assert await sessions.load(SUB) == ENTRIES
    assert await sessions.load({**KEY, "subpath": "subagents/agent"}) is None
    assert await sessions.load({**KEY, "session_id": "other"}) is None


async def test_they_are_the_messages_of_the_stores_session(store: Any) -> None:
    sessions = sessions_of(store, user="ada")
    await sessions.append(KEY, ENTRIES)
    await sessions.append(SUB, ENTRIES)
    found = await store.session(RECORD).messages()
    chat = [each for each in found if each.role]
    assert [each.content for each in chat] == [each["message"]["content"] for each in ENTRIES[1:5]]
    assert [each["role"] for each in to_openai(chat)] == ["user", "assistant", "tool", "assistant"]
    await store.session(RECORD).append({"role": "user", "content": "a note of somebody else's"})
    assert await sessions.load(KEY) == ENTRIES, "which is no entry"
    await store.forget("ada")
    assert await sessions.load(KEY) is None
    assert await sessions.list_subkeys(KEY) == []


# Each entry once


@pytest.mark.parametrize("key", [KEY, SUB], ids=["main", "subagent"])
async def test_a_batch_that_comes_again_is_stored_once(store: Any, key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the SDK sends it after an error whose outcome it does not know, or an import from the beginning."""
    sessions = sessions_of(store)
    batch = [*timed(1, 2, 3), {"type": "tag", "tag": "x"}, {"type": "x", "uuid": "without a time"}]
    await sessions.append(key, [*batch, *batch[:2]])
    assert await sessions.load(key) == batch
    version = await store.session(RECORD).version()
    for again in timed(1), timed(2, 3), timed(3), batch[4:]:
        await sessions.append(key, again)
    assert await store.session(RECORD).version() == version
    await sessions.append(key, [*timed(2, 3, 4, 5), batch[3]])
    assert ids([each for each in await sessions.load(key) or () if "uuid" in each]) == [
        "u1", "u2", "u3", "without a time", "u4", "u5",
    ]  # fmt: skip
    # What cannot be there yet is added without reading what is.
    monkeypatch.setattr(claude_agent_sdk._Main, "entries", None)
    monkeypatch.setattr(claude_agent_sdk._Subagent, "entries", None)
    await sessions.append(key, timed(6, 7))
    with pytest.raises(TypeError):
        await sessions.append(key, timed(5))


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
@pytest.mark.parametrize("key", [KEY, SUB], ids=["main", "subagent"])
async def test_of_writers_that_send_the_same_entries_one_stores_each(opener: Any, key: Any) -> None:
    stores = [sessions_of(await opener()) for _ in range(3)]
    batches = [timed(*range(first, first + 6)) for first in range(1, 40, 3)]
    await asyncio.gather(*(stores[at % 3].append(key, batch) for at, batch in enumerate([*batches, *batches[::-1]])))
    found = ids(await stores[0].load(key))
    assert sorted(found) == sorted({id for batch in batches for id in ids(batch)})
    if key is KEY:
        folded = fold_session_summary(None, key, await stores[1].load(key))  # type: ignore[arg-type]
        (summary,) = await stores[2].list_session_summaries("p")
        assert summary["data"] == folded["data"]


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_without_the_expectation_some_would_be_stored_twice(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: commits that expect nothing."""
    stores = [sessions_of(await opener()) for _ in range(2)]
    write = AsyncSession.write
    monkeypatch.setattr(AsyncSession, "write", lambda self, expect=None, **more: write(self, **more))
    for second in range(1, 20):
        await asyncio.gather(*(each.append(KEY, timed(second)) for each in stores * 4))
    found = ids(await stores[0].load(KEY))
    assert len(found) > len(set(found))


async def test_many_entries_are_added_in_several_commits(store: Any) -> None:
    sessions = sessions_of(store)
    many = timed(*range(1, 1202))
    await sessions.append(KEY, many)
    assert await store.session(RECORD).version() == 3
    assert await sessions.load(KEY) == many
    await sessions.append(SUB, many)
    assert await sessions.load(SUB) == many
    await sessions.append(KEY, [])
    assert await store.session(RECORD).version() == 6


# Listings


async def test_only_a_users_own_sessions_are_listed(store: Any) -> None:
    """`continue_conversation` takes the newest of a folder, which all users of a server share."""
    ada, bob = sessions_of(store, user="ada"), sessions_of(store, user="bob")
    await ada.append(KEY, timed(1))
    await bob.append({**KEY, "session_id": "b"}, timed(1))
    await bob.append({"project_key": "p/q", "session_id": "c"}, timed(1))
    await bob.append({"project_key": "p%2Fq", "session_id": "d"}, timed(1))
    assert [each["session_id"] for each in await ada.list_sessions("p")] == [ID]
    assert [each["session_id"] for each in await bob.list_session_summaries("p")] == ["b"]
    assert [each["session_id"] for each in await sessions_of(store).list_sessions("p/q")] == ["c"]
    assert len(await sessions_of(store).list_sessions("p")) == 2
    times = {each["session_id"]: each["mtime"] for each in await sessions_of(store).list_sessions("p")}
    found = {each["session_id"]: each["mtime"] for each in await sessions_of(store).list_session_summaries("p")}
    assert times == found


async def test_keys_that_are_no_names_are_refused(store: Any) -> None:
    for key in {**KEY, "session_id": ""}, {**KEY, "project_key": ""}, {**KEY, "session_id": 5}:
        with pytest.raises(InvalidValue, match="must be a non-empty str"):
            await sessions_of(store).append(key, timed(1))


# Deletion, expiry, forks


async def test_a_run_whose_session_is_deleted_brings_nothing_back(store: Any) -> None:
    sessions = sessions_of(store)
    await sessions.append(KEY, timed(1, 2))
    await sessions.append(SUB, timed(1))
    await sessions.delete(KEY)
    assert await sessions.load(KEY) is None
    assert await sessions.list_subkeys(KEY) == await sessions.list_sessions("p") == []
    title = {"type": "custom-title", "uuid": "t", "customTitle": "Oslo"}
    compacted = {"type": "system", "uuid": "c", "parentUuid": None, "logicalParentUuid": "u2"}
    for entries in timed(3, parent="u2"), [title], [compacted], [{"type": "mode"}]:
        with pytest.raises(Deleted):
            await sessions.append(KEY, entries)
    with pytest.raises(Deleted):
        await sessions.append(SUB, timed(2))
    assert await sessions.load(KEY) is None
    # An import begins with the first entry.
    await asyncio.gather(sessions.append(KEY, timed(1, 2)), sessions.append(KEY, timed(1, 2)))
    assert await sessions.load(KEY) == timed(1, 2)
    assert await sessions.load(SUB) is None, "which was not imported"
    assert [each.kind for each in await store.session(RECORD).history()] == ["write"]


@pytest.mark.parametrize("expired", ["refuse", "begin again"])
async def test_by_the_setting_a_run_goes_on_whose_session_expired(opener: Any, expired: str) -> None:
    store = await quiet(opener, session_idle=0.05, expired=expired)
    sessions = sessions_of(store)
    await sessions.append(KEY, timed(1))
    await sessions.append(SUB, timed(1))
    await until(Sweeps(store))
    assert await sessions.load(SUB) is None, "subagents expire with their session"
    if expired == "refuse":
        with pytest.raises(Deleted, match="expired at"):
            await sessions.append(KEY, timed(2, parent="u1"))
    else:
        await sessions.append(KEY, timed(2, parent="u1"))
        assert ids(await sessions.load(KEY)) == ["u2"]


async def test_a_subagents_transcript_is_deleted_by_itself(store: Any) -> None:
    sessions = sessions_of(store)
    other: Any = {**KEY, "subpath": "subagents/agent-1/of-1"}
    await sessions.append(KEY, timed(1))
    await sessions.append(SUB, timed(*range(1, 700)))
    await sessions.append(other, timed(1))
    await sessions.delete({**KEY, "subpath": "none"})
    await asyncio.gather(sessions.delete(SUB), sessions.append(SUB, timed(700, parent="u699")))
    assert ids(await sessions.load(SUB)) in ([], ["u700"])
    await sessions.delete(SUB)
    assert await sessions.load(SUB) is None
    assert await sessions.list_subkeys(KEY) == [other["subpath"]]
    assert await sessions.load(other) == await sessions.load(KEY) == timed(1)
    await sessions.append(SUB, timed(1))
    assert await sessions.load(SUB) == timed(1)


async def test_a_fork_and_a_rollback_have_the_subagents_too(store: Any) -> None:
    sessions = sessions_of(store)
    await sessions.append(KEY, timed(1))
    await sessions.append(SUB, timed(1))
    version = await store.session(RECORD).version()
    await sessions.append(KEY, timed(2, parent="u1"))
    await sessions.append(SUB, timed(2, parent="u1"))
    record = sessions.session_record(ID, "p")
    await record.fork("claude/p/fork", version=version)
    assert await sessions.load({**SUB, "session_id": "fork"}) == timed(1)
    await record.rollback(version=version)
    assert await sessions.load(SUB) == await sessions.load(KEY) == timed(1)
    await sessions.append(KEY, timed(2, parent="u1"))
    await sessions.append(SUB, timed(2, parent="u1"))
    assert ids(await sessions.load(SUB)) == ids(await sessions.load(KEY)) == ["u1", "u2"]


# Runs


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_a_run_goes_on_where_another_replica_ended(opener: Any, tmp_path: Path) -> None:
    """Each has files of its own; with subagents, and streamed."""
    one, other = sessions_of(await opener(), user="ada"), sessions_of(await opener(), user="ada")
    await ask(one, "A sauna, please", str(tmp_path / "one"), session_id=ID)
    found = await ask(other, "with a subagent", str(tmp_path / "other"), resume=ID)
    assert [each.result for each in found if isinstance(each, ResultMessage)] == ["You said: with a subagent"]
    await ask(one, "And back", str(tmp_path / "third"), continue_conversation=True)
    assert await said(one) == [
        text
        for prompt in ("A sauna, please", "with a subagent", "And back")
        for text in (prompt, f"You said: {prompt}")
    ]
    (agent,) = await list_subagents_from_store(other, ID)
    assert len(await get_subagent_messages_from_store(other, ID, agent)) == 2
    await rename_session_via_store(one, ID, "Saunas")
    (info,) = await list_sessions_from_store(other)
    assert (info.session_id, info.summary, info.first_prompt) == (ID, "Saunas", "A sauna, please")


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_runs_that_hold_the_session_take_turns(opener: Any, tmp_path: Path) -> None:
    """Without the lock both continue the same entry, and the next run is sent one of the two turns."""
    stores = [sessions_of(await opener()) for _ in range(2)]

    async def turn(number: int, *, held: bool) -> None:
        sessions = stores[number % 2]
        if held:
            async with sessions.session_record(ID).lock(wait=60):
                await ask_again(sessions, f"slowly {number}", str(tmp_path / str(number)))
        else:
            await ask_again(sessions, f"slowly {number}", str(tmp_path / str(number)))

    await turn(0, held=True)
    await asyncio.gather(turn(1, held=True), turn(2, held=True))
    assert len(await said(stores[0])) == 6
    await asyncio.gather(turn(3, held=False), turn(4, held=False))
    assert len(await said(stores[0])) == 8, "the control"
    assert len(await stores[0].load({**KEY, "project_key": project_key_for_directory()}) or ()) == 15, "none is lost"


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_what_the_sdk_could_not_store_is_reported(opener: Any, tmp_path: Path) -> None:
    """A run that begins a session leaves files, which can be imported; those of one that resumed it are removed."""
    sessions, other = sessions_of(await opener()), sessions_of(await opener())
    config = str(tmp_path / "config")
    for prompt, how in ("one", "session_id"), ("two", "resume"):
        async with other.session_record(ID).lock():
            with pytest.raises(Locked):
                await sessions.append({**KEY, "project_key": project_key_for_directory()}, timed(1))
            found = await ask(sessions, prompt, config, **{how: ID})
        assert [each for each in found if isinstance(each, MirrorErrorMessage)]
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("CLAUDE_CONFIG_DIR", config)
            await import_session_to_store(ID, sessions)
            await import_session_to_store(ID, sessions)
        assert await said(sessions) == ["one", "You said: one"]


async def test_the_texts_of_a_run_are_shown_once_and_other_messages_as_json() -> None:
    text, use, inner = TextBlock("Oslo."), ToolUseBlock("t", "book", {"city": "Oslo"}), "toolu_1"
    delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Oslo."}}
    result = ResultMessage("success", 1, 1, False, 1, ID)
    asked: list[Any] = [
        StreamEvent("e", ID, {"type": "message_start"}),
        StreamEvent("e", ID, delta),
        StreamEvent("e", ID, delta, parent_tool_use_id=inner),
        AssistantMessage([text], "m"),
        AssistantMessage([text, use], "m"),
        AssistantMessage([text], "m", parent_tool_use_id=inner),
        UserMessage("booked"),
        result,
    ]

    async def messages() -> Any:
        for each in asked:
            yield each

    async with AsyncStateStore.open(archive="memory") as store:
        async with store.session("s").turn(request_id="r") as turn:
            answer = stream(turn, messages())
            assert [each async for each in answer] == asked
            turn.outcome = answer.text
        parts = plain(await shown(store.session("s"), "r"))[:-1]
    kinds = [each if isinstance(each, str) else each["type"] for each in parts]
    assert kinds == ["Oslo.", "Oslo.", *["AssistantMessage"] * 2, "UserMessage", "ResultMessage"]
    assert parts[2]["content"][1]["input"] == {"city": "Oslo"}
    assert answer.text == "Oslo.Oslo."


async def test_the_examples_are_true(store: Any) -> None:
    names = {"store": core(store), "DistributedSessionStore": DistributedSessionStore, "key": KEY}
    assert await run_examples(DistributedSessionStore, **names, sessions=sessions_of(store)) == 2


# The SDK's own tests

APART = [
    # They count steps of the event loop until a call of the store has begun or ended; a server takes more of them.
    "session_helpers_store.py::TestListSessionsFromStore::test_load_concurrency_is_bounded",
    "session_summary.py::TestListSessionsFromStoreFastPath::test_gap_fill_bounded_concurrency",
    "transcript_mirror.py::TestReceiveLoopFramePeeling::test_eager_flush_mode_appends_per_frame_before_result",
    # It cancels a call after a tenth of a second, in which a server may not have been connected to.
    "session_resume.py::TestTimeoutsAndErrors::test_cancelled_after_mkdtemp_cleans_temp_dir",
    # They set times in a dict of the store in memory.
    "session_resume.py::TestHappyPath::test_continue_picks_most_recent",
    "session_resume.py::TestHappyPath::test_continue_skips_sidechain_sessions",
    "session_resume.py::TestHappyPath::test_continue_tie_break_is_deterministic",
]
FILES = (
    "session_store_conformance", "session_helpers_store", "session_import", "session_resume", "session_summary",
    "transcript_mirror",
)  # fmt: skip
PASSED = 137


@pytest.mark.timeout(600)
@pytest.mark.only(api="asyncio", warm="valkey")
def test_the_sdks_own_tests_pass(
    archive: Callable[[str], Path], redis_url: str, postgres_url: str, tmp_path: Path
) -> None:
    """On asyncio: a store does not run on trio, which their tests run on, too."""
    ended = theirs.run(
        archive("claude-agent-sdk"), [f"tests/test_{name}.py" for name in FILES], plugin="claude_agent_sdk_stand_ins",
        made=tmp_path / "made.json", apart=[f"tests/test_{each}" for each in APART], options=["-k", "not trio"],
        environment={"DISTRIBUTED_STATE_URL": redis_url, "DISTRIBUTED_STATE_ARCHIVE": postgres_url},
    )  # fmt: skip
    assert ended.named("failed") == set(), ended.printed
    assert (len(ended.outcomes), len(ended.named("passed"))) == (PASSED, PASSED), ended.printed
