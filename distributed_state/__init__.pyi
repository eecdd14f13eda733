# What `__init__.py` offers, for type checkers and editors, which cannot follow names that are loaded on first use.

from distributed_state import formats as formats
from distributed_state import merge as merge
from distributed_state import results as results
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
    Stopped,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownOperation,
    UsageExceeded,
    WarmUnavailable,
)
from distributed_state.records.access import Policy, Request
from distributed_state.records.items import AsyncItems
from distributed_state.records.record import AsyncRecord
from distributed_state.records.schema import Schema
from distributed_state.records.transaction import Transaction
from distributed_state.records.typed import AsyncTypedRecord
from distributed_state.remote.blocking import RemoteStore
from distributed_state.remote.store import AsyncRemoteStore
from distributed_state.results import Event, fold
from distributed_state.settings import Settings
from distributed_state.store import metrics as metrics
from distributed_state.store.admin import AsyncAdmin
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.blocking import Admin, StateStore
from distributed_state.store.blocking_contexts import Lease, Turn
from distributed_state.store.blocking_records import Items, Record, Session, TypedRecord, TypedSession
from distributed_state.values.encryption import Encryption, KeyRing
from distributed_state.values.items import DeleteItem, Item, ItemPage, PutItem
from distributed_state.values.model import ABSENT, PRESENT, Message
from distributed_state.values.search import (
    Search,
    SearchDocument,
    SearchHit,
    SearchIndex,
    SearchMatch,
    SearchQuery,
    SearchRemoval,
)
from distributed_state.warm.lease import AsyncLease

__all__ = [
    "ABSENT",
    "AccessDenied",
    "Admin",
    "Agent",
    "AgentPhase",
    "AgentState",
    "AsyncAdmin",
    "AsyncAgent",
    "AsyncHost",
    "AsyncItems",
    "AsyncLease",
    "AsyncRecord",
    "AsyncRemoteStore",
    "AsyncSession",
    "AsyncStateStore",
    "AsyncTurn",
    "AsyncTypedRecord",
    "AsyncTypedSession",
    "Backpressure",
    "ColdUnavailable",
    "CommandArgument",
    "CommandFailed",
    "ConfigurationError",
    "Conflict",
    "Context",
    "CorruptState",
    "DEFAULT",
    "DecryptionFailed",
    "DeleteItem",
    "Deleted",
    "DurabilityUnknown",
    "Encryption",
    "Event",
    "Fenced",
    "Host",
    "Interrupted",
    "InvalidTransition",
    "InvalidValue",
    "Item",
    "ItemPage",
    "Items",
    "KeyRing",
    "Lease",
    "Limits",
    "LockTimeout",
    "Locked",
    "LogLevel",
    "Message",
    "NotFound",
    "NotPermitted",
    "PRESENT",
    "Policy",
    "PutItem",
    "REASONING_MACHINE",
    "Record",
    "RecoveryInProgress",
    "RemoteStore",
    "Request",
    "Role",
    "Schema",
    "SchemaMismatch",
    "Search",
    "SearchDocument",
    "SearchHit",
    "SearchIndex",
    "SearchMatch",
    "SearchQuery",
    "SearchRemoval",
    "Session",
    "Settings",
    "StateError",
    "Stopped",
    "StateMachine",
    "StateStore",
    "Status",
    "Summary",
    "TASK_MACHINE",
    "TOOLBOX",
    "TaskState",
    "TooLarge",
    "Tool",
    "ToolCall",
    "Transaction",
    "Turn",
    "TypedRecord",
    "TypedSession",
    "Unauthenticated",
    "Unavailable",
    "UnknownOperation",
    "UsageExceeded",
    "UserState",
    "WarmUnavailable",
    "Window",
    "Workflow",
    "WorkingMemory",
    "fold",
    "tool",
    "truncate_history",
    "formats",
    "merge",
    "results",
]
