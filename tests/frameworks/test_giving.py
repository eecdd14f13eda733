"""What adapters are given: a store that is open, ids that are some, and their framework. Else it is said what lacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from distributed_state import ConfigurationError, InvalidValue, StateStore
from distributed_state.adapters.adk import DistributedSessionService
from distributed_state.adapters.agno import AsyncDistributedDb, DistributedDb
from distributed_state.adapters.claude_agent_sdk import DistributedSessionStore
from distributed_state.adapters.langchain import DistributedChatMessageHistory
from distributed_state.adapters.langgraph import DistributedStateSaver, DistributedStateStore
from distributed_state.adapters.openai_agents import DistributedSession
from distributed_state.adapters.pydantic_ai import DistributedConversationStore
from distributed_state.adapters.strands import DistributedSessionManager

BY_STORE = (
    DistributedSessionService, AsyncDistributedDb, DistributedDb, DistributedStateSaver, DistributedStateStore,
    DistributedSessionStore, DistributedConversationStore,
    lambda store: DistributedSession("a", store), lambda store: DistributedChatMessageHistory("a", store),
    lambda store: DistributedSessionManager("a", store),
)  # fmt: skip
FRAMEWORKS = {
    "openai-agents": ("openai_agents", "agents"),
    "langchain": ("langchain", "langchain_core"),
    "langgraph": ("langgraph", "langgraph"),
    "adk": ("adk", "google.adk"),
    "agno": ("agno", "agno"),
    "claude-agent-sdk": ("claude_agent_sdk", "claude_agent_sdk"),
    "pydantic-ai": ("pydantic_ai", "pydantic_ai"),
    "strands": ("strands", "strands"),
}


@pytest.mark.parametrize("make", BY_STORE)
def test_what_is_no_store_is_refused_and_a_password_is_not_shown(make: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"^give an open StateStore or AsyncStateStore, not a NoneType$"):
        make(None)
    with pytest.raises(ConfigurationError, match=r"^give an open StateStore or AsyncStateStore, not a str$"):
        make("redis://me:secret@host")


@pytest.mark.parametrize("make", [DistributedSession, DistributedChatMessageHistory, DistributedSessionManager])
@pytest.mark.parametrize("id", ["", None, 5])
def test_a_session_without_an_id_is_refused(make: Any, id: Any) -> None:
    with StateStore.open(archive="memory") as store, pytest.raises(InvalidValue, match="must be a non-empty str"):
        make(id, store)


@pytest.mark.parametrize("extra", FRAMEWORKS)
def test_who_lacks_a_framework_is_told_what_to_install(extra: str) -> None:
    module, framework = FRAMEWORKS[extra]
    program = f"import sys; sys.modules[{framework!r}] = None; import distributed_state.adapters.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: "), done.stderr
    assert last.endswith(f": pip install 'distributed-state[{extra}]'")
