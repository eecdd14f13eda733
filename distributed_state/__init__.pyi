# What `__init__.py` offers, for type checkers and editors, which cannot follow names that are loaded on first use.

from distributed_state.agents.asyncio import AsyncAgent, AsyncHost
from distributed_state.agents.blocking import Agent, Host
from distributed_state.agents.display import Limits, LogLevel, Status
from distributed_state.agents.hooks import CommandArgument
from distributed_state.conversation.agent_state import (
    AgentPhase,
    AgentState,
    Role,
    TaskState,
    ToolCall,
    UserState,
    WorkingMemory,
)
from distributed_state.conversation.formats import (
    from_anthropic,
    from_langchain,
    from_openai,
    tiktoken_counter,
    to_anthropic,
    to_langchain,
    to_openai,
)
from distributed_state.conversation.phases import DEFAULT, REASONING_MACHINE, TASK_MACHINE, StateMachine
from distributed_state.conversation.session import AsyncSession, AsyncTypedSession
from distributed_state.conversation.tools import TOOLBOX, Tool, tool
from distributed_state.conversation.turn import AsyncTurn
from distributed_state.conversation.window import Context, Summary, Window, truncate_history
from distributed_state.conversation.workflow import Workflow
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
    NotPermitted,
    RecoveryInProgress,
    SchemaMismatch,
    StateError,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownStep,
    WarmUnavailable,
)
from distributed_state.records.access import Policy, Request
from distributed_state.records.items import AsyncItems
from distributed_state.records.record import AsyncRecord, RecordView
from distributed_state.records.schema import Schema
from distributed_state.records.transaction import Transaction
from distributed_state.records.typed import AsyncTypedRecord
from distributed_state.remote.blocking import RemoteItems, RemoteRecord, RemoteSession, RemoteStore
from distributed_state.remote.record import AsyncRemoteItems, AsyncRemoteRecord, RemoteTransaction
from distributed_state.remote.session import AsyncRemoteSession, RemoteTurn
from distributed_state.remote.store import AsyncRemoteStore
from distributed_state.settings import Settings
from distributed_state.store import metrics as metrics
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.blocking import StateStore
from distributed_state.store.blocking_contexts import Lease, Turn
from distributed_state.store.blocking_records import Items, Record, Session, TypedRecord, TypedSession
from distributed_state.store.doctor import Finding
from distributed_state.store.maintenance import LostMessages, Reencrypted, Repaired, Upcast
from distributed_state.values import merge
from distributed_state.values.encryption import Encryption, KeyRing
from distributed_state.values.items import DeleteItem, Item, ItemPage, PutItem
from distributed_state.values.model import ABSENT, PRESENT, Message
from distributed_state.values.results import (
    Branch,
    Change,
    Checkpoint,
    Event,
    HeldLease,
    Lifetime,
    Replica,
    SessionInfo,
    Snapshot,
    Waiter,
    Written,
)
from distributed_state.values.search import (
    Indexed,
    Search,
    SearchDocument,
    SearchHit,
    SearchIndex,
    SearchMatch,
    SearchQuery,
    SearchRemoval,
)
from distributed_state.values.turn_times import TimedRun, TurnTimes
from distributed_state.warm.lease import AsyncLease

__all__ = [
    "ABSENT",
    "DEFAULT",
    "PRESENT",
    "REASONING_MACHINE",
    "TASK_MACHINE",
    "AccessDenied",
    "Agent",
    "AgentPhase",
    "AgentState",
    "AsyncAgent",
    "AsyncHost",
    "AsyncLease",
    "AsyncItems",
    "AsyncRecord",
    "AsyncRemoteItems",
    "AsyncRemoteRecord",
    "AsyncRemoteSession",
    "AsyncRemoteStore",
    "AsyncSession",
    "AsyncStateStore",
    "AsyncTurn",
    "AsyncTypedRecord",
    "AsyncTypedSession",
    "Backpressure",
    "Branch",
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
    "HeldLease",
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
    "LostMessages",
    "DeleteItem",
    "Item",
    "ItemPage",
    "PutItem",
    "Message",
    "NotFound",
    "NotPermitted",
    "Policy",
    "Items",
    "Record",
    "RecordView",
    "RemoteItems",
    "RemoteRecord",
    "RemoteSession",
    "RemoteStore",
    "RemoteTransaction",
    "RemoteTurn",
    "RecoveryInProgress",
    "Reencrypted",
    "Repaired",
    "Replica",
    "Request",
    "Role",
    "Schema",
    "SchemaMismatch",
    "Indexed",
    "Search",
    "SearchDocument",
    "SearchHit",
    "SearchIndex",
    "SearchMatch",
    "SearchQuery",
    "SearchRemoval",
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
    "Unauthenticated",
    "Unavailable",
    "UnknownStep",
    "UserState",
    "Upcast",
    "Waiter",
    "WarmUnavailable",
    "Workflow",
    "WorkingMemory",
    "Written",
    "tool",
    "Window",
    "from_anthropic",
    "from_langchain",
    "merge",
    "from_openai",
    "tiktoken_counter",
    "to_anthropic",
    "to_langchain",
    "to_openai",
    "truncate_history",
    "TimedRun",
    "TurnTimes",
]
