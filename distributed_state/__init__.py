"""State for agents that run on many servers: read at memory speed, changed atomically, archived, never half written."""

from distributed_state.access import Policy, Request
from distributed_state.agent.agents import AsyncAgent
from distributed_state.agent.blocking_agents import Agent, Host
from distributed_state.agent.commands import CommandArgument
from distributed_state.agent.context import Context
from distributed_state.agent.formats import (
    from_anthropic,
    from_langchain,
    from_openai,
    to_anthropic,
    to_langchain,
    to_openai,
)
from distributed_state.agent.health import Limits, Status
from distributed_state.agent.hosting import AsyncHost
from distributed_state.agent.kinds import TaskState, UserState
from distributed_state.agent.machine import DEFAULT, REASONING_MACHINE, TASK_MACHINE, StateMachine
from distributed_state.agent.state import AgentPhase, AgentState, Role, ToolCall, WorkingMemory
from distributed_state.agent.tokens import tiktoken_counter
from distributed_state.agent.toolbox import TOOLBOX
from distributed_state.agent.tools import Tool, tool
from distributed_state.agent.turn import AsyncTurn
from distributed_state.agent.visible import LogLevel
from distributed_state.agent.window import Summary, Window, truncate_history
from distributed_state.agent.workflow import Workflow
from distributed_state.bodies import Lease, Turn
from distributed_state.doctor import Finding
from distributed_state.errors import (
    AccessDenied,
    Backpressure,
    ColdUnavailable,
    CommandFailed,
    ConfigurationError,
    Conflict,
    CorruptState,
    DecryptionFailed,
    Deleted,
    DurabilityUnknown,
    Fenced,
    Interrupted,
    InvalidTransition,
    InvalidValue,
    Locked,
    LockTimeout,
    NotFound,
    SchemaMismatch,
    StateError,
    TooLarge,
    Unavailable,
    WarmUnavailable,
)
from distributed_state.lease import AsyncLease
from distributed_state.model import (
    Change,
    Checkpoint,
    Event,
    Lifetime,
    Message,
    Replica,
    SessionInfo,
    Snapshot,
    Written,
)
from distributed_state.records import AsyncRecord
from distributed_state.reencryption import Reencrypted
from distributed_state.schema import Schema
from distributed_state.sealing import Encryption, KeyRing
from distributed_state.session import AsyncSession
from distributed_state.settings import Settings
from distributed_state.store import AsyncStateStore
from distributed_state.sync import StateStore
from distributed_state.sync_records import Record, Session, TypedRecord, TypedSession
from distributed_state.transaction import Transaction
from distributed_state.typed import AsyncTypedRecord, AsyncTypedSession, Upcast

__all__ = [
    "DEFAULT",
    "REASONING_MACHINE",
    "TASK_MACHINE",
    "AccessDenied",
    "Agent",
    "AgentPhase",
    "AgentState",
    "AsyncAgent",
    "AsyncHost",
    "AsyncLease",
    "AsyncRecord",
    "AsyncSession",
    "AsyncStateStore",
    "AsyncTurn",
    "AsyncTypedRecord",
    "AsyncTypedSession",
    "Backpressure",
    "Change",
    "Checkpoint",
    "ColdUnavailable",
    "CommandArgument",
    "CommandFailed",
    "ConfigurationError",
    "Conflict",
    "Context",
    "CorruptState",
    "DecryptionFailed",
    "Deleted",
    "DurabilityUnknown",
    "Encryption",
    "Event",
    "Fenced",
    "Finding",
    "Host",
    "InvalidTransition",
    "Interrupted",
    "InvalidValue",
    "KeyRing",
    "Lease",
    "Limits",
    "LockTimeout",
    "LogLevel",
    "Locked",
    "Lifetime",
    "Message",
    "NotFound",
    "Policy",
    "Record",
    "Reencrypted",
    "Replica",
    "Request",
    "Role",
    "Schema",
    "SchemaMismatch",
    "Session",
    "SessionInfo",
    "Settings",
    "Snapshot",
    "StateError",
    "StateMachine",
    "StateStore",
    "Status",
    "TOOLBOX",
    "TaskState",
    "Summary",
    "TooLarge",
    "Tool",
    "ToolCall",
    "Transaction",
    "Turn",
    "TypedRecord",
    "TypedSession",
    "Unavailable",
    "UserState",
    "Upcast",
    "WarmUnavailable",
    "Workflow",
    "WorkingMemory",
    "Written",
    "tool",
    "Window",
    "from_anthropic",
    "from_langchain",
    "from_openai",
    "tiktoken_counter",
    "to_anthropic",
    "to_langchain",
    "to_openai",
    "truncate_history",
]
