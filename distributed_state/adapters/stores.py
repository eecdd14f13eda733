"""What the adapters of all frameworks share: the store that they are given, and when a conversation may begin again.

A user who gives something else than a store is told what to give, without a secret.
"""

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


class Known:
    """An object's knowledge of its conversation: none, that it exists, or at which version it did not.

    A run reads its conversation, works, and then adds what was said. Had the conversation been deleted meanwhile, what
    was erased would come back with that. So an object that knew it before the deletion may not begin it again.
    """

    def __init__(self) -> None:
        self._looked = False
        self._empty_at: int | None = None

    def look(self, empty_at: int | None) -> None:
        """Note what a read found: something, or nothing at this version of the record, which may be a deletion."""
        self._looked, self._empty_at = True, empty_at

    def wrote(self) -> None:
        """Note that something was written: an object that has not looked knows the conversation from then on."""
        self._looked = True

    def deletion(self) -> int | None:
        """The only deletion after which it may begin again; None: after any. Asked for before what is written."""
        return (-1 if self._empty_at is None else self._empty_at) if self._looked else None
