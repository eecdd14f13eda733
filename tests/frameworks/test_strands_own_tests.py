"""The tests of Strands about sessions, with its own repositories and with ours in place of each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frameworks import theirs

APART = [
    line
    for line in Path(__file__).with_name("strands_apart.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
SESSIONS = [f"tests/strands/session/test_{name}.py" for name in ("repository_session_manager", "file_session_manager")]
# Of files that are about other things those that use a session.
SINGLE = [
    f"tests/strands/{file}.py::test_{name}"
    for file, names in {
        "agent/test_agent": (
            "agent_metadata_reaches_model_stream_with_session_manager",
            "agent_restored_from_session_management",
            "agent_restored_from_session_management_with_correct_index",
            "agent_restored_from_session_management_with_message",
            "agent_restored_from_session_management_with_redacted_input",
            "agent_session_management",
            "agent_with_session_and_conversation_manager",
            "metadata_carries_session_id_with_manager",
            "metadata_shared_across_agents_on_same_session",
            "session_id_delegates_to_session_manager",
            "shared_model_carries_each_agents_own_session",
        ),
        "agent/test_agent_as_tool": (
            "nested_interrupt_resumes_after_rehydration",
            "nested_interrupt_resumes_after_rehydration_with_a_sub_agent_session_manager",
        ),
        "agent/test_agent_delegation": (
            "delegation_emits_correct_history_and_single_assistant_event[True]",
            "persisted_matches_in_memory_after_delegation",
        ),
        "middleware/test_agent_stream_middleware": (
            "answered_interrupt_is_not_persisted_as_a_standing_approval",
            "answered_interrupt_is_not_persisted_when_a_stream_is_abandoned",
            "restored_agent_reports_an_answerable_interrupt",
        ),
        "models/routing/test_router": ("routing_forwards_agent_metadata_to_the_selected_alternate",),
        "multiagent/test_swarm": (
            "swarm_crash_restart_handoff_via_file_session_on_disk",
            "swarm_crash_restart_uncommitted_interrupt_resume_reruns_source_on_disk",
        ),
        "test_tracking_id_history_invariant": ("no_idless_messages_after_session_restore_repair",),
    }.items()
    for name in names
]
# Of those that make a session; `strands_apart.txt` names the others, with reasons.
PASSED = {"theirs": 114, "ours": 93}


@pytest.mark.only(api="asyncio", warm="valkey", cold="postgres")
@pytest.mark.parametrize("adapter", PASSED)
@pytest.mark.timeout(600)
def test_strands_own_tests_pass(adapter: str, archive: Callable[[str], Path], opener: Any, tmp_path: Path) -> None:
    environment = {"DISTRIBUTED_STATE_URL": opener.url, "DISTRIBUTED_STATE_ARCHIVE": opener.archive}
    ended = theirs.run(
        archive("strands-agents"), [*SESSIONS, *SINGLE], plugin="strands_stand_ins", made=tmp_path / "made.json",
        apart=APART if adapter == "ours" else (),
        environment={**environment, "ADAPTER": adapter, "AWS_DEFAULT_REGION": "us-west-2"},
    )  # fmt: skip
    assert ended.named("failed") == set(), ended.printed
    assert len(ended.outcomes) == len(ended.named("passed")) == PASSED[adapter], ended.printed


def test_what_is_set_apart_is_there(archive: Callable[[str], Path]) -> None:
    """A name that a later archive has no more would set nothing apart, and hide that."""
    folder = archive("strands-agents")
    sources = {name: folder.joinpath(name).read_text() for name in {each.split("::")[0] for each in APART}}
    gone = [each for each in APART if f"def {each.split('::')[-1]}(" not in sources[each.split("::")[0]]]
    assert gone == []
