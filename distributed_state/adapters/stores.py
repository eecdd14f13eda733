"""What an adapter is given, and what it needs. Law: who gave something else is told what to give, without a secret."""

from __future__ import annotations

from typing import Any

from distributed_state import AsyncStateStore, ConfigurationError, InvalidValue, StateStore


def open_store(given: Any) -> StateStore | AsyncStateStore:
    """The store, if it is one; else raise ConfigurationError."""
    if not isinstance(given, StateStore | AsyncStateStore):
        from distributed_state import AsyncRemoteStore, RemoteStore

        if isinstance(given, AsyncRemoteStore | RemoteStore):
            raise ConfigurationError(
                "adapters work on Redis and SQL themselves, not through a service: open the store at its redis:// URL"
            )
        # Not what it is: a URL may hold a password.
        raise ConfigurationError(f"give an open StateStore or AsyncStateStore, not a {type(given).__name__}")
    return given


def named(id: Any, what: str) -> str:
    """The id, if it is a text that is not empty; else raise InvalidValue. The store makes up one for None."""
    if not isinstance(id, str) or not id:
        raise InvalidValue(f"{what} must be a non-empty str, not {id!r:.80}")
    return id


def lacking(extra: str, error: ImportError) -> ImportError:
    """What to raise where a framework cannot be imported."""
    return ImportError(f"{error}: pip install 'distributed-state[{extra}]'", name=error.name, path=error.path)
