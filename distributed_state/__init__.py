"""State for agents that run on many servers: read at memory speed, changed atomically, archived, never half written."""

from distributed_state.access import Policy, Request
from distributed_state.doctor import Finding
from distributed_state.errors import (
    AccessDenied,
    Backpressure,
    ColdUnavailable,
    ConfigurationError,
    Conflict,
    CorruptState,
    DecryptionFailed,
    Deleted,
    DurabilityUnknown,
    Fenced,
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
from distributed_state.model import Change, Checkpoint, Message, SessionInfo, Snapshot
from distributed_state.reencryption import Reencrypted
from distributed_state.sealing import Encryption, KeyRing
from distributed_state.session import AsyncRecord, AsyncSession, Written
from distributed_state.settings import Settings
from distributed_state.store import AsyncStateStore
from distributed_state.sync import Lease, Record, Session, StateStore
from distributed_state.transaction import Transaction

__all__ = [
    "AccessDenied",
    "AsyncLease",
    "AsyncRecord",
    "AsyncSession",
    "AsyncStateStore",
    "Backpressure",
    "Change",
    "Checkpoint",
    "ColdUnavailable",
    "ConfigurationError",
    "Conflict",
    "CorruptState",
    "DecryptionFailed",
    "Deleted",
    "DurabilityUnknown",
    "Encryption",
    "Fenced",
    "Finding",
    "InvalidValue",
    "KeyRing",
    "Lease",
    "LockTimeout",
    "Locked",
    "Message",
    "NotFound",
    "Policy",
    "Record",
    "Reencrypted",
    "Request",
    "Session",
    "SessionInfo",
    "Settings",
    "Snapshot",
    "StateError",
    "StateStore",
    "TooLarge",
    "Transaction",
    "Unavailable",
    "WarmUnavailable",
    "Written",
]
