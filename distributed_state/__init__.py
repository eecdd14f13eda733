"""State for agents that run on many servers: read at memory speed, changed atomically, archived, never half written."""

from importlib import import_module
from importlib.util import find_spec

# A dependency, but not of the versions of Python for which it has no wheel (pyproject.toml).
if find_spec("orjson") is None:
    raise ModuleNotFoundError(
        "distributed_state needs orjson, which has no wheel for some versions of Python: use Python 3.11 to 3.14, "
        "or run `pip install orjson`, which may need a Rust compiler",
        name="orjson",
    )

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
        "Stopped",
        "TooLarge",
        "Unauthenticated",
        "Unavailable",
        "UnknownOperation",
        "UsageExceeded",
        "WarmUnavailable",
    ),
    "records.access": ("Policy", "Request"),
    "records.items": ("AsyncItems",),
    "records.record": ("AsyncRecord",),
    "records.schema": ("Schema",),
    "records.transaction": ("Transaction",),
    "records.typed": ("AsyncTypedRecord",),
    "remote.blocking": ("RemoteStore",),
    "remote.store": ("AsyncRemoteStore",),
    "settings": ("Settings",),
    "store.admin": ("AsyncAdmin",),
    "store.asyncio": ("AsyncStateStore",),
    "store.blocking": ("Admin", "StateStore"),
    "store.blocking_contexts": ("Lease", "Turn"),
    "store.blocking_records": ("Items", "Record", "Session", "TypedRecord", "TypedSession"),
    "values.encryption": ("Encryption", "KeyRing"),
    "values.items": ("DeleteItem", "Item", "ItemPage", "PutItem"),
    "values.model": ("ABSENT", "Message", "PRESENT"),
    "results": ("Event", "fold"),
    "values.search": (
        "Search",
        "SearchDocument",
        "SearchHit",
        "SearchIndex",
        "SearchMatch",
        "SearchQuery",
        "SearchRemoval",
    ),
    "warm.lease": ("AsyncLease",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
# Public modules. `metrics` needs the extra `telemetry`, so `import *` and `dir` leave it out.
_SUBMODULES = {"formats": "formats", "merge": "merge", "metrics": "store.metrics", "results": "results"}

__all__ = [*_HOMES, "formats", "merge", "results"]


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        found: object = import_module(f"{__name__}.{_SUBMODULES[name]}")
    elif name in _HOMES:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found  # the next use does not call __getattr__
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
