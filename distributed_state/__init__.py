"""State for agents that run on many servers: read at memory speed, changed atomically, archived, never half written."""

from distributed_state.agent.machine import DEFAULT, REASONING_MACHINE, TASK_MACHINE, StateMachine
from distributed_state.agent.state import AgentState, Role, ToolCall, WorkingMemory
from distributed_state.agent.toolbox import TOOLBOX
from distributed_state.agent.tools import Tool, tool
from distributed_state.agent.turn import AsyncTurn
from distributed_state.agent.workflow import Workflow
from distributed_state.bodies import Lease, Turn
from distributed_state.doctor import Finding
from distributed_state.errors import (
    Backpressure,
    ColdUnavailable,
    ConfigurationError,
    Conflict,
    CorruptState,
    Deleted,
    DurabilityUnknown,
    Fenced,
    Interrupted,
    InvalidTransition,
    InvalidValue,
    Locked,
    LockTimeout,
    NotFound,
    StateError,
    TooLarge,
    Unavailable,
    WarmUnavailable,
)
from distributed_state.lease import AsyncLease
from distributed_state.model import Change, Checkpoint, Message, SessionInfo, Snapshot, Written
from distributed_state.session import AsyncRecord, AsyncSession
from distributed_state.settings import Settings
from distributed_state.store import AsyncStateStore
from distributed_state.sync import Record, Session, StateStore
from distributed_state.transaction import Transaction

__all__ = [
    "DEFAULT",
    "REASONING_MACHINE",
    "TASK_MACHINE",
    "AgentState",
    "AsyncLease",
    "AsyncRecord",
    "AsyncSession",
    "AsyncStateStore",
    "AsyncTurn",
    "Backpressure",
    "Change",
    "Checkpoint",
    "ColdUnavailable",
    "ConfigurationError",
    "Conflict",
    "CorruptState",
    "Deleted",
    "DurabilityUnknown",
    "Fenced",
    "Finding",
    "InvalidTransition",
    "Interrupted",
    "InvalidValue",
    "Lease",
    "LockTimeout",
    "Locked",
    "Message",
    "NotFound",
    "Record",
    "Role",
    "Session",
    "SessionInfo",
    "Settings",
    "Snapshot",
    "StateError",
    "StateMachine",
    "StateStore",
    "TOOLBOX",
    "TooLarge",
    "Tool",
    "ToolCall",
    "Transaction",
    "Turn",
    "Unavailable",
    "WarmUnavailable",
    "Workflow",
    "WorkingMemory",
    "Written",
    "tool",
]
