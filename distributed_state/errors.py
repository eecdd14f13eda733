"""Every error that this package raises on purpose, as one tree.

    StateError
    ├── Conflict                 somebody else was faster; read again and retry
    ├── Locked                   somebody else holds the record
    │   └── LockTimeout          ... and still did when the wait was over
    ├── Fenced                   the lease was lost; nothing was written
    │   └── Interrupted          ... to another request, which took the turn over
    ├── NotFound                 no such record, version or checkpoint
    ├── Deleted                  the record was deleted
    ├── InvalidTransition        the event is not allowed in the phase that the record is in
    ├── InvalidValue             the value cannot be stored as it is
    │   └── TooLarge             ... because of its size
    ├── CorruptState             stored bytes cannot be read; they are kept
    │   └── DecryptionFailed     ... because of their key, their place, or because they are not encrypted
    ├── SchemaMismatch           the record's schema version and this worker's do not fit
    ├── CommandFailed            a command of an agent failed, or was not begun
    ├── AccessDenied             the store's policy does not allow it; nothing was asked of a server
    ├── Unauthenticated          a request does not say who sends it, or not truly
    ├── Unavailable              a server did not answer; nothing is known to be lost
    │   ├── WarmUnavailable      Redis
    │   ├── ColdUnavailable      SQL
    │   │   └── UnknownStep      ... cannot be given what a newer release wrote
    │   ├── RecoveryInProgress   Redis lost something, and is being filled from what is known elsewhere
    │   └── Backpressure         Redis holds as much unarchived work as it may
    ├── DurabilityUnknown        applied, or perhaps: what was asked for was not confirmed, or not all of it
    └── ConfigurationError       a setting, a server or a right is wrong; retrying does not help
        └── NotPermitted         ... Redis refuses our user, its password, or what it asks for

Law: the message says what was asked and what was found.
"""

from __future__ import annotations

from typing import Any


class StateError(Exception):
    """The root: catch it to catch everything this package raises on purpose."""


class Conflict(StateError):
    """The record is not as the caller expected; it is at `version`. Nothing was written; read again and retry.

    `found` holds the stored bytes of the fields that the write expected, None for an absent one; `preconditions` the
    same of those that the caller named in `expect`, b"+" where only that was asked.

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
    """Somebody else holds the record exclusively. Nothing was written.

    Remedy: try again later, or wait for the record with `lock(wait=)`.
    """


class LockTimeout(Locked):
    """The record could not be locked within the time given.

    Remedy: wait longer, or look at who holds it so long: the metric `lock_wait_seconds`.
    """


class Fenced(StateError):
    """The write carried a lease that is no longer held. Nothing was written.

    `holder` names the lease that the server found in its place, '' if there is none or the server was not asked.

    Remedy: begin the work again under a new lease; if it comes often, give locks a longer `ttl`.
    """

    def __init__(self, message: str, *, holder: str = "") -> None:
        super().__init__(message)
        self.holder = holder


class Interrupted(Fenced):
    """Another request, or an operator, took the turn or the lock over.

    Nothing of this one was written, and it should not be repeated.

    Remedy: end; who took over answers the user.
    """


class NotFound(StateError):
    """There is no such record, version or checkpoint.

    Remedy: create it, or look at the id, the version or the label.
    """


class Deleted(StateError):
    """The record was deleted. `create()` starts it again, `rollback(version=)` brings an older state back.

    `version` is what the deletion made of it, 0 where that was not looked up.

    Remedy: begin it again with `create()`, or leave it.
    """

    def __init__(self, message: str, *, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


class InvalidTransition(StateError, ValueError):
    """The event leads nowhere from `phase`, the one found. Nothing was written; the message lists what is allowed.

    Remedy: ask for a transition that the message lists.
    """

    def __init__(self, message: str, *, phase: str = "", event: str = "") -> None:
        super().__init__(message)
        self.phase = phase
        self.event = event


class InvalidValue(StateError, ValueError):
    """The value, name or id cannot be stored as it is; the message names the place.

    Remedy: change the value, name or id; the same again is refused again.
    """


class TooLarge(InvalidValue):
    """The value is larger than the limit set for it. Nothing was sent.

    Remedy: store less in one place, as items or messages, or raise the limit that the message names.
    """


class CorruptState(StateError):
    """Stored bytes cannot be read. `field` names them, `data` holds them; nothing was changed.

    Remedy: `distributed-state doctor`, and the log; an older version may be readable with `at()`.
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

    `record`, `field` ('#message' for a message) and `key` (the id of the key) say which; the value is never in it.

    Remedy: give the store the key that the error names; never drop one that `reencrypt` has not replaced.
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
    """A command of an agent failed with the error that this is raised from, or was not begun as the agent ends.

    Remedy: look at the error that it was raised from.
    """


class AccessDenied(StateError):
    """The access policy of the store does not allow this. Nothing was read or written.

    Remedy: ask as somebody who may, or change the policy.
    """


class Unauthenticated(StateError):
    """The service does not know who sent a request. The message says nothing of why: a stranger may read it.

    Remedy: send a token that is valid.
    """

    def __init__(self, message: str = "say who you are by a token that is valid") -> None:
        super().__init__(message)


class SchemaMismatch(StateError):
    """The record is of schema version `stored`, and this worker cannot bring it to `known`. Nothing was changed.

    Remedy: deploy a version that knows the schema, or give it upcasters or downcasters.
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
    """A server did not answer in time. Never means that a record does not exist.

    Remedy: try again when the server answers; `distributed-state doctor` says what is wrong.
    """


class WarmUnavailable(Unavailable):
    """Redis did not answer. A write may or may not have been applied; repeating it with `set` is safe.

    `demoted` if it did, and said that it is a replica.

    Remedy: start Redis, or wait until another primary is elected; then repeat.
    """

    demoted = False


class ColdUnavailable(Unavailable):
    """The SQL database did not answer, and only it knows what was asked for.

    Remedy: start the database; what is in Redis is served meanwhile.
    """


class UnknownStep(ColdUnavailable):
    """A newer release wrote what this one cannot archive: step `kind` of the journal's entry at `offset`.

    Nothing from there on was archived, and nothing is lost: a worker of that release goes on with it.

    Remedy: bring this worker to the newer release.
    """

    def __init__(self, message: str, *, partition: int = 0, offset: int = 0, kind: bytes = b"") -> None:
        super().__init__(message)
        self.partition = partition
        self.offset = offset
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _unknown, (str(self), self.partition, self.offset, self.kind)


def _unknown(message: str, partition: int, offset: int, kind: bytes) -> UnknownStep:
    return UnknownStep(message, partition=partition, offset=offset, kind=kind)


class RecoveryInProgress(Unavailable):
    """Redis lost something, and what is known of it elsewhere is not put together yet. Nothing was written; retry.

    Remedy: repeat it after a moment.
    """


class Backpressure(Unavailable):
    """The journal is full because archiving is behind. Nothing was written; retry when SQL is back.

    Remedy: bring SQL back or add archivers: `distributed-state doctor`; then repeat.
    """


class DurabilityUnknown(StateError):
    """Applied as `version` (0: an event), but the durability asked for was not confirmed.

    Made again it would be made twice, unless it only sets: `record.confirm` waits for what was applied, and a turn may
    be begun again under its `request_id`.

    With version 0 of a write: its answer was lost, and whether it was applied could not be learned in time. Of a turn
    also: its session's part is applied, its change of the user's record is not. With a `request_id`, a turn that is
    begun again under that gives the outcome and completes the rest.

    Remedy: do not repeat what adds; `confirm()` waits, a turn is begun again under its `request_id`.
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
    """Redis refused our user, its password, or the right to do what was asked; nothing was read or written.

    Remedy: give the user its rights in Redis, or the store the right password.
    """
