"""What a remote store has not. Law: a name that is not there says so, and what to do instead.

Design: section 26.
"""

from __future__ import annotations

from collections.abc import Iterable

from distributed_state.errors import ConfigurationError

_DIRECT = "open the store by its Redis URL for that"
_TOGETHER = "it reads and commits many times, which a service has no one request for: " + _DIRECT
_MEMORY = "there is no memory of this process's behind a service"
_WORKERS = "workers do that, beside the service: " + _DIRECT
_OPERATOR = "an operator does that, with the program distributed-state"
RECORD = {
    "ephemeral": _MEMORY,
    "invalidate": "nothing is cached, each read is a request",
    "unreadable": _DIRECT,
    "view": "read get_all(), or use a transaction",
    "confirm": "give durability= with the write",
    "initialize": "use write(set=..., expect={...: ABSENT})",
    "create": "use write(set=..., expect_exists=False)",
    "export_state": _OPERATOR,
    "restore_state": _OPERATOR,
    "cleanup": _DIRECT,
}
SESSION = RECORD | {
    "turn": "hold lock() around a transaction(): one commit at its end, under the lease",
    "window": _TOGETHER,
    "context": _TOGETHER,
    "load_state": _TOGETHER,
    "save_state": _TOGETHER,
    "call": _TOGETHER,
    "switch": _DIRECT,
}
STORE = {
    "app": "a service has sessions, users and tasks: " + _DIRECT,
    "batch": _TOGETHER,
    "get_many": _TOGETHER,
    "run": _WORKERS,
    "on": "use events()",
    "off": "use events()",
    "ready": _WORKERS,
    "reload_config": _WORKERS,
    "emit": _WORKERS,
    "activate_agent": _WORKERS,
    "change_directory": _WORKERS,
    "announce": _WORKERS,
    "acting_as": "history shows whose the token is",
    "durable": "give durability= with the write",
    "invalidate": "nothing is cached, each read is a request",
    "tiers": "agents, hosts and other parts work on Redis and SQL themselves: " + _DIRECT,
    "replica": _MEMORY,
    "settings": "they are the service's",
    "keys": _MEMORY,
    "ephemeral": _MEMORY,
    "aio": "open an AsyncStateStore at the same URL",
    "blocking": "open a StateStore at the same URL",
    "time": _DIRECT,
    "audit": _OPERATOR,
    "export": _OPERATOR,
    "import_": _OPERATOR,
    "reencrypt": _OPERATOR,
    "repair": _OPERATOR,
    "upcast": _OPERATOR,
    "archive": _OPERATOR,
    "doctor": _OPERATOR,
    "stats": _OPERATOR,
    "update_index": _OPERATOR,
    "remove_index": _OPERATOR,
}
ITEMS = {
    "get_many": "read a page with list(), or one by one with get()",
    "find_many": "read a page with list(), or one by one with find()",
    "put_missing": "put each with if_absent=True, or use write(items=[PutItem(..., keep=True)])",
}
OPTIONS = {
    "merge": "without it the function runs again on the newest state",
    "advisory": "without it others' writes are refused, too",
    "equals": "no value can be expected of an item there: use if_absent= or if_present=, or lock()",
    "schema": "read and write fields, and validate them by your model",
    "actor": "history shows whose the token is",
    "idle": "use set_lifetime()",
    "lifetime": "use set_lifetime()",
    "on_invalid": _DIRECT,
    "clean": "clean values before they are given, or where the service opens its store",
    "clean_messages": "clean messages before they are given, or where the service opens its store",
    "take_over": "PUT /v1/conversations/{id}/lease/{token}, or " + _DIRECT,
    "group": "keep the position, and give it as since=",
    "progress": _DIRECT,
}
"""Of methods that are there."""


def refuse_options(method: str, given: Iterable[str]) -> None:
    """Raise ConfigurationError for an option that the direct store alone has, TypeError for one that nobody has."""
    for name in given:
        if name not in OPTIONS:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        raise ConfigurationError(f"{name}= of {method}() is not there on a remote store: {OPTIONS[name]}")


def refuse(kind: str, name: str, absent: dict[str, str]) -> Exception:
    """The error for a name that a remote object has not."""
    why = absent.get(name)
    if why is None:
        return AttributeError(f"{kind!r} object has no attribute {name!r}")
    return ConfigurationError(f"{name} is not there on a remote store: {why}")
