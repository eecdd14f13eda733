"""State for agents that run on many servers: read at memory speed, changed atomically, archived, never half written."""

from importlib import import_module

# Where each public name is defined. Its module is imported when the name is first used, so that a program pays only for
# what it uses. `__init__.pyi` says the same to type checkers, and a test that the two agree.
_MODULES: dict[str, tuple[str, ...]] = {
    "agents.asyncio": ("AsyncAgent", "AsyncHost"),
    "agents.blocking": ("Agent", "Host"),
    "agents.display": ("Limits", "LogLevel", "Status"),
    "agents.hooks": ("CommandArgument",),
    "conversation.agent_state": (
        "AgentPhase",
        "AgentState",
        "Role",
        "TaskState",
        "ToolCall",
        "UserState",
        "WorkingMemory",
    ),
    "conversation.formats": (
        "from_anthropic",
        "from_langchain",
        "from_openai",
        "tiktoken_counter",
        "to_anthropic",
        "to_langchain",
        "to_openai",
    ),
    "conversation.phases": ("DEFAULT", "REASONING_MACHINE", "StateMachine", "TASK_MACHINE"),
    "conversation.session": ("AsyncSession", "AsyncTypedSession"),
    "conversation.tools": ("TOOLBOX", "Tool", "tool"),
    "conversation.turn": ("AsyncTurn",),
    "conversation.window": ("Context", "Summary", "Window", "truncate_history"),
    "conversation.workflow": ("Workflow",),
    "errors": (
        "AccessDenied",
        "Backpressure",
        "ColdUnavailable",
        "CommandFailed",
        "ConfigurationError",
        "Conflict",
        "CorruptState",
        "DecryptionFailed",
        "Deleted",
        "DurabilityUnknown",
        "Fenced",
        "Interrupted",
        "InvalidTransition",
        "InvalidValue",
        "LockTimeout",
        "Locked",
        "NotFound",
        "NotPermitted",
        "RecoveryInProgress",
        "SchemaMismatch",
        "StateError",
        "TooLarge",
        "Unauthenticated",
        "Unavailable",
        "UnknownStep",
        "WarmUnavailable",
    ),
    "records.access": ("Policy", "Request"),
    "records.items": ("AsyncItems",),
    "records.record": ("AsyncRecord", "RecordView"),
    "records.schema": ("Schema",),
    "records.transaction": ("Transaction",),
    "records.typed": ("AsyncTypedRecord",),
    "remote.blocking": ("RemoteItems", "RemoteRecord", "RemoteSession", "RemoteStore"),
    "remote.record": ("AsyncRemoteItems", "AsyncRemoteRecord", "RemoteTransaction"),
    "remote.session": ("AsyncRemoteSession", "RemoteTurn"),
    "remote.store": ("AsyncRemoteStore",),
    "settings": ("Settings",),
    "store.asyncio": ("AsyncStateStore",),
    "store.blocking": ("StateStore",),
    "store.blocking_contexts": ("Lease", "Turn"),
    "store.blocking_records": ("Items", "Record", "Session", "TypedRecord", "TypedSession"),
    "store.doctor": ("Finding",),
    "store.maintenance": ("LostMessages", "Reencrypted", "Repaired", "Upcast"),
    "values.encryption": ("Encryption", "KeyRing"),
    "values.items": ("DeleteItem", "Item", "ItemPage", "PutItem"),
    "values.model": ("ABSENT", "Message", "PRESENT"),
    "values.results": (
        "Branch",
        "Change",
        "Checkpoint",
        "Event",
        "HeldLease",
        "Lifetime",
        "Replica",
        "SessionInfo",
        "Snapshot",
        "Waiter",
        "Written",
    ),
    "values.search": (
        "Indexed",
        "Search",
        "SearchDocument",
        "SearchHit",
        "SearchIndex",
        "SearchMatch",
        "SearchQuery",
        "SearchRemoval",
    ),
    "values.turn_times": ("TimedRun", "TurnTimes"),
    "warm.lease": ("AsyncLease",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
# Modules that are offered as such. `metrics` needs the extra `telemetry`, so `import *` and `dir` leave it out.
_SUBMODULES = {"merge": "values.merge", "metrics": "store.metrics"}

__all__ = [*_HOMES, "merge"]


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        found: object = import_module(f"{__name__}.{_SUBMODULES[name]}")
    elif name in _HOMES:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found  # the next use finds it without us
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
