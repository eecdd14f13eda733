"""Settings of a store. Law: every number a user may want to change is here, with its unit, and nowhere else."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from distributed_state.errors import ConfigurationError

log = logging.getLogger(__name__)
PREFIX = "DISTRIBUTED_STATE_"
_LIKE = 0.8  # of a variable's letters, to be taken for a misspelt one
_SECRET = ("url", "archive")
UNREADABLE = (
    "cannot be read: the port is a number from 1 to 65535, and in a user name or a password @ is written %40, : %3A, "
    "/ %2F, ? %3F and # %23"
)
MOST_INPUTS = 1000  # that may wait in one session
LEVELS = r"memory|replicated(:[1-9]\d{0,2})?|fsynced|archived"


class Settings(BaseModel):
    """A store's settings, from keyword arguments or DISTRIBUTED_STATE_* variables. Times in seconds, sizes in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    url: str | None = Field(None, description="Redis or Valkey; None is the embedded server in this process")
    archive: str | None = Field(
        None, min_length=1, description="SQLAlchemy URL, or 'memory'; None is a SQLite file when embedded"
    )
    namespace: str = Field("default", description="prefix of every key and column of every row")
    partitions: int = Field(
        64, ge=1, le=1024, description="fixed at the first use of a namespace, and taken from there"
    )
    durability: str | None = Field(
        None,
        description="memory, replicated, replicated:n, fsynced or archived; 'archived' when embedded, else 'memory'",
    )
    session_idle: float | None = Field(None, ge=0.001, le=3.16e9, description="a new session ends when idle this long")
    session_lifetime: float | None = Field(None, ge=0.001, le=3.16e9, description="a new session ends at this age")
    expired: Literal["refuse", "begin again"] = Field(
        "refuse", description="a write to an expired session raises Deleted, or begins it again, empty"
    )
    sweep: float = Field(1.0, ge=0.01, description="an ended session expires at most this much later")
    warm_ttl: float = Field(3600.0, ge=0.05, description="an archived record leaves Redis when idle this long")
    max_staleness: float = Field(2.0, ge=0, description="hot reads are at most this old; 0 switches hot off")
    hot_entries: int = Field(10_000, ge=0, description="records kept in this process; 0 switches hot off")
    hot_bytes: int = Field(64 * 2**20, ge=0, description="and their size, estimated")
    recent_messages: int = Field(32, ge=1, description="messages kept in Redis per record once archived")
    max_field_bytes: int = Field(8 * 2**20, ge=1, description="of one field as JSON; larger ones raise TooLarge")
    max_record_bytes: int = Field(32 * 2**20, ge=1, description="of all fields of a record")
    max_message_bytes: int = Field(8 * 2**20, ge=1, description="of one message as JSON")
    remembered_requests: int = Field(32, ge=1, description="request ids of turns whose outcome a record remembers")
    stream_interval: float = Field(
        0.05, ge=0, le=10, description="chunks of a running turn are collected so long before they are sent; 0: at once"
    )
    output_bytes: int = Field(
        2**20, ge=65_536, le=64 * 2**20, description="of a session's streamed output kept in Redis, the newest"
    )
    output_ttl: float = Field(600.0, ge=1, description="and for how long after its last chunk")
    inbox_limit: int = Field(64, ge=1, le=MOST_INPUTS, description="inputs of a session that wait for a turn")
    inbox_bytes: int = Field(256 * 1024, ge=1024, description="and their size; more are refused")
    publish_bytes: int = Field(4096, ge=0, description="changes up to this size travel to other replicas' hot tier")
    journal_entries: int = Field(100_000, ge=1, description="per partition; more unarchived commits are refused")
    journal_bytes: int = Field(64 * 2**20, ge=1, description="per partition; more unarchived bytes are refused")
    unarchived_bytes: int = Field(64 * 2**20, ge=0, description="of acknowledged commits kept until archived; 0: none")
    timeout: float = Field(5.0, gt=0, description="for one answer of Redis")
    retry_for: float = Field(10.0, ge=0, description="how long one call waits in all for a Redis that does not answer")
    sql_timeout: float = Field(10.0, ge=0.1, description="for one answer of SQL; maintenance may take 60 times as long")
    close_timeout: float = Field(
        5.0, ge=0, le=3600,
        description="close() waits so long at most until what this process wrote is archived; 0: it does not wait",
    )  # fmt: skip
    op_window: float = Field(300.0, gt=0, description="a write may be applied so long after it was first sent")
    conflict_retries: int = Field(50, ge=1, description="attempts of apply(), update() and append_to()")
    kept_events: int = Field(10_000, ge=1, description="events per partition that a replica can catch up with")
    events_for: float = Field(86400.0, gt=0, description="and for how long they are kept for it")
    slow_handler: float = Field(0.1, gt=0, description="a handler of events that takes longer is logged")
    handler_timeout: float = Field(60.0, gt=0, description="a group's event handled for longer goes to another member")
    beat: float = Field(
        2.0, ge=0, le=3600,
        description="pause between two heartbeats, longer from 50 replicas on; lost after three; 0: none",
    )  # fmt: skip
    expected_workers: int = Field(
        0, ge=0, description="processes of `serve` that should run; doctor and an alert report fewer; 0: any number"
    )
    archiver: bool = Field(True, description="archive, and end sessions, in the background of this process")
    archive_every: float = Field(0.2, gt=0, description="pause between two passes that leave nothing behind")
    archive_batch: int = Field(4000, ge=1, description="journal entries of a partition in one SQL transaction")
    snapshot_every: int = Field(100, ge=1, description="versions between two snapshots of a record in SQL")
    migrate: bool = Field(True, description="bring the SQL schema up to date at open")
    traces: bool = Field(
        False, description="report what leaves the process to OpenTelemetry, as spans (extra telemetry)"
    )
    trace_ids: bool = Field(False, description="with the ids of records, which may be personal")

    @model_validator(mode="before")
    @classmethod
    def _with_the_environment(cls, given: dict[str, Any]) -> dict[str, Any]:
        variables = {name.upper(): value for name, value in os.environ.items() if name.upper().startswith(PREFIX)}
        named = {name: variables.get(f"{PREFIX}{name.upper()}") for name in cls.model_fields} if variables else {}
        return {name: value for name, value in named.items() if value is not None} | given

    @field_validator("durability")
    @classmethod
    def _durability_is_a_level(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch(LEVELS, value) is None:
            raise ValueError("use 'memory', 'replicated', 'replicated:n' (n replicas), 'fsynced' or 'archived'")
        return value

    @model_validator(mode="after")
    def _retries_stay_within_the_op_window(self) -> Settings:
        if self.op_window < 2 * (self.retry_for + self.timeout):
            raise ValueError("op_window must be at least twice retry_for + timeout, or a late retry could apply twice")
        return self

    @classmethod
    def of(cls, **given: Any) -> Settings:
        """Check the given settings. Raises ConfigurationError, which names the wrong one."""
        warn_of_misspelt()
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "settings"
            if first["type"] == "extra_forbidden":
                near = get_close_matches(place, cls.model_fields, 1)
                meant = f"; did you mean {near[0]}?" if near else ""
                raise ConfigurationError(f"{place}: there is no such setting{meant}") from error
            # Other values are not repeated: a URL holds a password, and a misspelt setting may be one.
            shown = place in cls.model_fields and place not in _SECRET
            said = f" (given {first.get('input')!r:.80})" if shown else ""
            raise ConfigurationError(f"{place}: {first['msg']}{said}") from error

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, without_password(value) if name in _SECRET and value else value


_warned: set[str] = set()


def warn_of_misspelt(more: Iterable[str] = ()) -> None:
    """Log each environment variable that is almost that of a setting, or one of `more`, once and without its value."""
    known = {*more, *(f"{PREFIX}{name.upper()}" for name in Settings.model_fields)}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known and name not in _warned:
            near = get_close_matches(name.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in known], 1, _LIKE)
            if near:
                _warned.add(name)
                log.warning("the environment variable %s has no effect; did you mean %s%s?", name, PREFIX, near[0])


def refuse_unescaped(url: str, name: str) -> None:
    """Raise ConfigurationError if a part of a password would be read as the host, a port, a path or an option.

    The refused URL is never repeated, nor a driver's error about it: it may contain that part.
    """
    place, _, options = url.partition("?")
    if place.count("@") > 1 or "@" in options:
        raise ConfigurationError(f"{name}: {UNREADABLE}")


def require_host(host: str, name: str) -> None:
    """Raise ConfigurationError for a host name that cannot be resolved; the message omits it, as it may be a secret."""
    try:
        host.encode("idna")
    except UnicodeError:
        said = "a part of a host's name is empty or too long, or holds a character that no name has"
        raise ConfigurationError(f"{name}: {said}") from None


def require_files(place: str, options: Mapping[str, str]) -> None:
    """Raise ConfigurationError if a file that an option names cannot be read."""
    for name, path in options.items():
        try:
            open(path, "rb").close()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{place}: {name}: {error}") from error


def absolute(path: str) -> str:
    """Resolve a path against the current folder now: a program may change its folder while it has a store open.

    Raises ConfigurationError if the path is relative and the current folder no longer exists.
    """
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{path}: is relative, and the current folder was deleted; give a whole path"
        ) from None


def without_password(url: str) -> str:
    """A URL that can be shown, without the parts that may hold a password."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url if url == "memory" else "..."
    place, question, options = rest.partition("?")
    if "@" in options:  # a password may hold a ? that was not escaped
        return f"{scheme}://..."
    # The last @: a password may hold one that was not escaped.
    return f"{scheme}://{'...@' if '@' in place else ''}{place.rpartition('@')[2]}{'?...' if question else ''}"


# Files with users' data. A file created here is readable only by its owner; an existing file is left as it is. The mode
# is set at creation, never changed afterwards, so there is no moment in which others could open the file.
_OWNERS_ALONE = 0o600


def private_opener(path: str, flags: int) -> int:
    """Open a file for `open(path, "w", opener=private_opener)`: a new one is readable only by its owner."""
    return os.open(path, flags, _OWNERS_ALONE)


def create_private(path: str) -> None:
    """Create an empty file unless one exists. An error is left to the code that opens the file."""
    # An existing file is never opened: closing it would release every lock that this process has on it, SQLite's too.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    with suppress(OSError):
        # A symbolic link is resolved: O_EXCL refuses a link, and SQLite would create the file that the link names.
        os.close(os.open(os.path.realpath(path), flags, _OWNERS_ALONE))
