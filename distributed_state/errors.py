"""Every error that this package raises on purpose, as one tree.

    StateError
    ├── Conflict                 another writer committed first; read again and retry
    ├── Locked                   the record is locked by another holder
    │   └── LockTimeout          ... and the time to wait for it is over
    ├── Fenced                   the lease was lost; nothing was written
    │   └── Interrupted          ... to another request, which took over the turn
    ├── Stopped                  somebody asked the turn to stop; nothing was written
    ├── NotFound                 no such record, version or checkpoint
    ├── Deleted                  the record was deleted
    ├── InvalidTransition        the event is not allowed in the record's phase
    ├── UsageExceeded            the session has used as many tokens as the turn allows
    ├── InvalidValue             the value cannot be stored as it is
    │   └── TooLarge             ... because of its size
    ├── CorruptState             stored bytes cannot be read; they are kept
    │   └── DecryptionFailed     ... wrong key, moved from another place, or not encrypted
    ├── SchemaMismatch           the record's schema version and this worker's do not fit
    ├── CommandFailed            a command of an agent failed or was not started
    ├── AccessDenied             the store's policy does not allow it; no server was asked
    ├── Unauthenticated          a request has no valid credentials
    ├── Unavailable              a server did not answer; nothing is known to be lost
    │   ├── WarmUnavailable      Redis
    │   ├── ColdUnavailable      SQL
    │   │   └── UnknownOperation  ... cannot store an operation of a newer release
    │   ├── RecoveryInProgress   Redis lost data, and is being restored
    │   └── Backpressure         Redis holds the maximum of unarchived commits
    ├── DurabilityUnknown        applied or possibly applied, but not confirmed, or not completely
    └── ConfigurationError       a setting, a server or a right is wrong; retrying does not help
        └── NotPermitted         ... Redis refuses our user, its password, or the command

Law: a message says what was requested and what was found.
"""

from __future__ import annotations

from typing import Any


class StateError(Exception):
    """The root: catch it to catch everything this package raises on purpose."""


class Conflict(StateError):
    """The record differs from what the caller expected; it is at `version`. Nothing was written; read again and retry.

    `found` maps each field whose value the write expected to its stored bytes, or None if it is absent. `preconditions`
    does the same for the fields that the caller named in `expect`, with b"+" where only existence was checked.

    Remedy: read the record and decide again; `apply()` and `update()` do so by themselves.
    """

    def __init__(
        self,
        message: str,
        *,
        version: int = 0,
        found: tuple[bytes | None, ...] = (),
        preconditions: tuple[bytes | None, ...] = (),
    ) -> None:
        super().__init__(message)
        self.version = version
        self.found = found
        self.preconditions = preconditions


class Locked(StateError):
    """The record is locked exclusively by another holder. Nothing was written.

    Remedy: try again later, or wait for the record with `lock(wait=)`.
    """


class LockTimeout(Locked):
    """The record could not be locked within the time given.

    Remedy: wait longer, or find out why it is held so long: the metric `lock_wait_seconds`.
    """


class Fenced(StateError):
    """The write carried a lease that is no longer held. Nothing was written.

    `holder` names the lease that the server found instead, '' if there is none or the server was not asked.

    Remedy: start the work again under a new lease; if it happens often, give locks a longer `ttl`.
    """

    def __init__(self, message: str, *, holder: str = "") -> None:
        super().__init__(message)
        self.holder = holder


class Interrupted(Fenced):
    """Another request, or an operator, took over the turn or the lock.

    Nothing of this turn was written, and it should not be repeated.

    Remedy: stop; the request that took over answers the user.
    """


class Stopped(StateError):
    """Somebody asked the running turn to stop, by `session.stop()`. `reason` says why, None if no reason was given.

    Raised at the end of `turn.stoppable()`, so that the turn may keep what it has, or else at the end of the turn: then
    nothing was written. In blocking code the next call of the store raises it.

    Remedy: none is needed. Catch it around `turn.stoppable()` to commit a part of the answer.
    """

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class NotFound(StateError):
    """There is no such record, version or checkpoint.

    Remedy: create it, or check the id, the version or the label.
    """


class Deleted(StateError):
    """The record was deleted, or its session expired. `rollback(version=)` restores an older state.

    `version` is the version of the deletion, 0 if it was not looked up. `expired` is when the session expired, in
    seconds since 1970; None if it was deleted on request. `begins_again` says that writes begin it again, by the
    setting `expired`.

    Remedy: start it again with `create()` or `revive=True`, or leave it deleted. With the setting
    `expired="begin again"`, sessions that expired begin again by themselves.
    """

    def __init__(
        self, message: str, *, version: int = 0, expired: float | None = None, begins_again: bool = False
    ) -> None:
        super().__init__(message)
        self.version = version
        self.expired = expired
        self.begins_again = begins_again


class InvalidTransition(StateError, ValueError):
    """The event is not allowed in `phase`, the current one. Nothing was written; the message lists what is allowed.

    Remedy: ask for a transition that the message lists.
    """

    def __init__(self, message: str, *, phase: str = "", event: str = "") -> None:
        super().__init__(message)
        self.phase = phase
        self.event = event


class UsageExceeded(StateError):
    """The session's models have used `tokens`, and the turn was to begin only below `limit`. Nothing was written.

    Remedy: answer without a model, or begin the turn with a higher `usage_below`.
    """

    def __init__(self, message: str, *, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.tokens = tokens
        self.limit = limit


class InvalidValue(StateError, ValueError):
    """The value, name or id cannot be stored as it is; the message names the place.

    Remedy: change the value, name or id; the same one is refused again.
    """


class TooLarge(InvalidValue):
    """The value is larger than the limit set for it. Nothing was sent.

    Remedy: store less in one place, as items or messages, or raise the limit that the message names.
    """


class CorruptState(StateError):
    """Stored bytes cannot be read. `field` names them, `data` holds them; nothing was changed.

    Remedy: run `distributed-state doctor` and read the log; an older version may be readable with `at()`.
    """

    def __init__(self, message: str, *, field: str = "", data: bytes = b"") -> None:
        super().__init__(message)
        self.field = field
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return _corrupt, (str(self), self.field, self.data)


def _corrupt(message: str, field: str, data: bytes) -> CorruptState:
    return CorruptState(message, field=field, data=data)


class DecryptionFailed(CorruptState):
    """A stored value cannot be decrypted, or is plain text where it must not be. The stored bytes are kept.

    `record`, `field` ('#message' for a message) and `key` (the id of the key) identify it; the value is never included.

    Remedy: give the store the key that the error names; keep every key that `reencrypt` has not replaced.
    """

    def __init__(self, message: str, *, record: str = "", field: str = "", key: str = "") -> None:
        super().__init__(message, field=field)
        self.record = record
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return _undecrypted, (str(self), self.record, self.field, self.key)


def _undecrypted(message: str, record: str, field: str, key: str) -> DecryptionFailed:
    return DecryptionFailed(message, record=record, field=field, key=key)


class CommandFailed(StateError):
    """A command of an agent failed (`__cause__` is its error), or was not started because the agent ends.

    Remedy: look at `__cause__`.
    """


class AccessDenied(StateError):
    """The access policy of the store does not allow this. Nothing was read or written.

    Remedy: use an account with this right, or change the policy.
    """


class Unauthenticated(StateError):
    """The service could not authenticate a request. The message gives no reason, because a stranger may read it.

    Remedy: send a valid token.
    """

    def __init__(self, message: str = "say who you are by a token that is valid") -> None:
        super().__init__(message)


class SchemaMismatch(StateError):
    """The record has schema version `stored`, and this worker cannot convert it to `known`. Nothing was changed.

    Remedy: deploy a version that knows the schema, or provide upcasters or downcasters.
    """

    def __init__(self, message: str, *, stored: int = 0, known: int = 0) -> None:
        super().__init__(message)
        self.stored = stored
        self.known = known

    def __reduce__(self) -> tuple[Any, ...]:
        return _mismatch, (str(self), self.stored, self.known)


def _mismatch(message: str, stored: int, known: int) -> SchemaMismatch:
    return SchemaMismatch(message, stored=stored, known=known)


class Unavailable(StateError):
    """A server did not answer in time. It never means that a record does not exist.

    Remedy: try again when the server answers; `distributed-state doctor` reports what is wrong.
    """


class WarmUnavailable(Unavailable):
    """Redis did not answer. A write may or may not have been applied; repeating it with `set` is safe.

    `demoted` is true if the server answered, but is a replica now.

    Remedy: start Redis, or wait until another primary is elected; then repeat.
    """

    demoted = False


class ColdUnavailable(Unavailable):
    """The SQL database did not answer, and the request needs it.

    Remedy: start the database; data in Redis is served meanwhile.
    """


class UnknownOperation(ColdUnavailable):
    """A newer release wrote an operation that this one cannot archive: `kind`, in the journal's entry at `offset`.

    That entry and later ones are not archived yet. Nothing is lost: a worker of that release continues.

    Remedy: upgrade this worker to the newer release.
    """

    def __init__(self, message: str, *, partition: int = 0, offset: int = 0, kind: bytes = b"") -> None:
        super().__init__(message)
        self.partition = partition
        self.offset = offset
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _unknown, (str(self), self.partition, self.offset, self.kind)


def _unknown(message: str, partition: int, offset: int, kind: bytes) -> UnknownOperation:
    return UnknownOperation(message, partition=partition, offset=offset, kind=kind)


class RecoveryInProgress(Unavailable):
    """Redis lost data, and restoring it from SQL and workers is not complete. Nothing was written; retry.

    Remedy: repeat the call after a moment.
    """


class Backpressure(Unavailable):
    """The journal is full because archiving is behind. Nothing was written; retry when SQL is back.

    Remedy: start SQL or add archivers (`distributed-state doctor` shows which is needed); then repeat.
    """


class DurabilityUnknown(StateError):
    """The write was applied as `version` (0 for an event), but its durability was not confirmed.

    Repeating the write applies it again, which is harmless only if it sets values. Instead,
    `record.version(durability=...)` waits for the applied write. A turn may be started again under its `request_id`.

    Version 0 can also mean that the reply of a write was lost, and it could not be determined in time whether the write
    was applied. For a turn it can mean that the change of the session is applied and the change of the user's record is
    not. With a `request_id`, starting the turn again under it returns the outcome and completes the rest.

    Remedy: do not repeat increments or appends. Wait with `version(durability=...)`; start a turn again under its
    `request_id`.
    """

    def __init__(self, message: str, *, version: int = 0, request_id: str | None = None) -> None:
        super().__init__(message)
        self.version = version
        self.request_id = request_id

    def __reduce__(self) -> tuple[Any, ...]:
        return _unconfirmed, (str(self), self.version, self.request_id)


def _unconfirmed(message: str, version: int, request_id: str | None) -> DurabilityUnknown:
    return DurabilityUnknown(message, version=version, request_id=request_id)


class ConfigurationError(StateError):
    """A setting, a server or a right is wrong. Retrying does not help; the message says what to change.

    Remedy: change what the message names.
    """


class NotPermitted(ConfigurationError):
    """Redis refused our user, its password, or the right to run a command; nothing was read or written.

    Remedy: give the user its rights in Redis, or the store the right password.
    """
