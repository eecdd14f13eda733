"""The tests of the OpenAI Agents SDK about sessions, with ours in place of each of theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from frameworks import theirs

APART = [
    line
    for line in Path(__file__).with_name("openai_agents_apart.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
SESSIONS = [
    f"tests/{name}.py"
    for name in (
        "memory/test_session", "memory/test_session_limit", "memory/test_compaction_model_visibility",
        "memory/test_compaction_suffix", "memory/test_openai_responses_compaction_session",
        "memory/test_sqlalchemy_compaction", "extensions/memory/test_async_sqlite_session",
        "extensions/memory/test_encrypt_session", "extensions/memory/test_redis_session",
        "extensions/memory/test_sqlalchemy_session", "test_native_tool_failure_history", "test_soft_cancel",
        "test_tool_batch_failure_history", "test_tool_failure_boundaries",
    )
]  # fmt: skip
# Of files that are about other things those that use a session.
SINGLE = [
    f"tests/{file}.py::test_{name}"
    for file, name in (
        ("sandbox/test_memory", "sandbox_memory_fallback_does_not_mutate_run_config"),
        ("sandbox/test_memory", "sandbox_memory_groups_segments_by_sdk_session_until_close"),
        ("test_max_turns", "non_streamed_max_turns_handler_persists_output_to_session"),
        ("test_max_turns", "streamed_max_turns_handler_persists_output_to_session"),
        ("test_programmatic_tool_calling", "nested_handoff_summarizes_complete_programmatic_transcript"),
        ("test_programmatic_tool_calling", "sqlite_session_round_trip_preserves_program_history_and_caller"),
        ("test_run_impl_resume_paths", "compaction_reload_preserves_session_retrieval_window"),
        ("test_run_impl_resume_paths", "failed_approval_callback_defers_stream_output_until_retry_guardrail"),
        ("test_run_impl_resume_paths", "resumed_committed_append_refreshes_compaction_input"),
        ("test_agent_runner", "non_streamed_model_retry_does_not_rewind_committed_session_input"),
        ("test_agent_runner", "omit_policy_strips_reasoning_ids_already_stored_in_the_session"),
        ("test_agent_runner_streamed", "streamed_omit_policy_strips_reasoning_ids_already_stored_in_the_session"),
    )
]
PASSED = 444  # of those that make one of our sessions; `openai_agents_apart.txt` names the others, with reasons


@pytest.mark.timeout(600)
def test_the_sdks_own_tests_pass(
    archive: Callable[[str], Path], redis_url: str, postgres_url: str, tmp_path: Path
) -> None:
    folder = archive("openai-agents")
    ended = theirs.run(
        folder, [*SESSIONS, *SINGLE], plugin="openai_agents_stand_ins", made=tmp_path / "made.json", apart=APART,
        environment={"DISTRIBUTED_STATE_URL": redis_url, "DISTRIBUTED_STATE_ARCHIVE": postgres_url},
    )  # fmt: skip
    assert ended.named("failed") == set(), ended.printed
    assert (len(ended.outcomes), len(ended.named("passed"))) == (PASSED, PASSED), ended.printed


def test_what_is_set_apart_is_there(archive: Callable[[str], Path]) -> None:
    """A name that a later archive has no more would set nothing apart, and hide that."""
    folder = archive("openai-agents")
    sources = {name: folder.joinpath(name).read_text() for name in {each.split("::")[0] for each in APART}}
    gone = [each for each in APART if f"def {each.split('::')[-1].split('[')[0]}(" not in sources[each.split("::")[0]]]
    assert gone == []
