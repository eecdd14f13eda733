"""A record of a service: where it is, how it is read as a whole, how it is written. Law: one request each.

What is not there reads as empty, as on the direct store; what may not be read, or cannot be reached, never does.

Design: section 26.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distributed_state.errors import ConfigurationError, Conflict, Deleted, NotFound
from distributed_state.remote import leases, values
from distributed_state.remote.requests import Requests
from distributed_state.values import chance, path_names
from distributed_state.values.model import Ref

T = TypeVar("T")
_KINDS = {"session": "conversations", "user": "users", "task": "tasks"}
_ATTEMPTS = 50


@dataclass(frozen=True, slots=True)
class State:
    """A record as it was read: version 0 if it is not there. `deleted` ones have no fields."""

    version: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    phase: str | None = None
    deleted: bool = False


class RecordPlace:
    """A record behind a service, and whose it is if it begins."""

    def __init__(self, requests: Requests, ref: Ref, user: str | None = None) -> None:
        self.requests = requests
        self.ref = ref
        self.user = None if user is None else Ref("user", user).id
        self.path = path_of(ref)

    async def state(self, *, fresh: bool = False) -> State:
        """Read it as a whole."""
        query: dict[str, Any] = {"fresh": fresh or None}
        if self.ref.scope == "session":
            query["last"] = 0
        try:
            said = await self.requests.read(self.path, query)
        except NotFound:
            return State()
        except Deleted as error:
            return State(error.version, deleted=True)
        return State(said["version"], values.shown(said), said.get("phase"))

    async def write(
        self,
        given: Mapping[str, Any],
        durability: str | None = None,
        *,
        expect_version: int | None = None,
        expect_exists: bool | None = None,
        to: str = "/writes",
        method: str = "POST",
        owned: bool = True,
    ) -> Any:
        """Make one commit, and return what the service says of it."""
        headers = values.conditions(expect_version, expect_exists) | self.carried()
        more = {"user": self.user if owned else None, "durability": durability}
        sent = {**given, **{name: each for name, each in more.items() if each is not None}}
        free = not headers.keys() & {"If-Match", "If-None-Match"} and not any(
            each.startswith("expect") for each in sent
        )

        async def once() -> Any:
            body = None if method == "DELETE" else sent
            return await self.requests.write(method, self.path + to, body, headers=headers)

        # A write without a condition has none that could fail: others were faster, at each attempt of the service's.
        return await (self.until_no_conflict(once) if free else once())

    async def until_no_conflict(self, once: Callable[[], Awaitable[T]]) -> T:
        """Try again while others are faster, and let them go first, longer each time. Raises Conflict in the end."""
        for attempt in range(_ATTEMPTS - 1):
            with suppress(Conflict):
                return await once()
            await self.requests.http.sleep(chance.source.random() * min(0.1, 0.002 * 2**attempt))
        return await once()

    async def order(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """Have something done that takes no key, under the lease that is held here."""
        return await self.requests.order(method, self.path + path, body, headers=self.carried(), **options)

    def carried(self) -> dict[str, str]:
        """The header for a write: the lease that is held here."""
        return leases.carried(self.requests, self.path)


def path_of(ref: Ref, form: str = "", *names: str) -> str:
    """Where a record is, or what is below it: `form` as "/fields/{}", with a {} for each name."""
    return path_names.path("/v1", f"/{kind_of(ref.scope)}/{{}}{form}", ref.id, *names)


def kind_of(scope: str) -> str:
    """What the service calls records of a scope. Raises ConfigurationError for what it has not."""
    if scope not in _KINDS:
        raise ConfigurationError(f"{scope}: a remote store has sessions, users and tasks; use a direct store")
    return _KINDS[scope]
