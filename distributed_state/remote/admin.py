"""An operator's work on a store behind its service. Law: a method is one request.

Design: section 26.
"""

from __future__ import annotations

from typing import Any, Never

from distributed_state.errors import InvalidValue
from distributed_state.remote import values
from distributed_state.remote.requests import Requests, path_of
from distributed_state.results import Branch, HeldLease, Replica
from distributed_state.values.model import Ref


class AsyncRemoteAdmin:
    """The operator's methods of a store behind its service: `store.admin`."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def __getattr__(self, name: str) -> Any:
        raise values.refuse(self, name, _direct)

    async def replicas(self) -> list[Replica]:
        """List the processes that have the store open."""
        return [values.made(Replica, each) for each in (await self._requests.read("/v1/replicas"))["replicas"]]

    async def leases(
        self, *, scope: str | None = None, prefix: str = "", limit: int = 100, after: str | None = None
    ) -> list[HeldLease]:
        """List the current leases with their holders and waiters, those held longest first."""
        query = {"scope": scope, "prefix": prefix or None, "limit": limit, "after": after}
        return [values.held_lease(each) for each in (await self._requests.read("/v1/leases", query))["leases"]]

    async def end_lease(self, id: str, token: int, *, scope: str = "session") -> bool:
        """End the lease with this fencing token, even another holder's; return False if it is no longer held."""
        if type(token) is not int or token < 0:
            raise InvalidValue(f"a lease is named by its fencing token, not {token!r:.80}")
        path = f"{path_of(Ref(scope, id))}/lease/{token}"
        return bool((await self._requests.order("DELETE", path))["released"])

    async def branches(
        self, id: str | None = None, *, scope: str = "session", limit: int = 100, after: str | None = None
    ) -> list[Branch]:
        """List the branches of a record, or of all records: acknowledged commits outside their record's history."""
        if id is None:
            found = await self._requests.read("/v1/branches", {"limit": limit, "after": after})
        else:
            found = await self._requests.read(path_of(Ref(scope, id), "/branches"))
        return [values.branch(each) for each in found["branches"]]

    async def drop_branch(self, id: str, branch: str, *, scope: str = "session") -> int:
        """Remove a branch permanently, by its id, and return how many commits it had.

        Raises NotFound if it does not exist.
        """
        path = path_of(Ref(scope, id), "/branches/{}", branch)
        return int((await self._requests.order("DELETE", path))["commits"])

    async def compact(self, *, older_than: float = 86_400.0, **others: Never) -> dict[str, int]:
        """Pack history older than this many seconds in SQL; return counts of records, changes and messages.

        The service limits a request to 30 s: then Unavailable is raised, and another call continues.
        """
        values.refuse_options("compact", others)
        return await self._upkeep("compact", {"older_than": older_than})

    async def purge(
        self,
        *,
        older_than: float | None = None,
        keep_changes: int | None = None,
        messages_older_than: float | None = None,
        keep_messages: int | None = None,
        events_older_than: float | None = None,
        branches_older_than: float | None = None,
    ) -> dict[str, int]:
        """Remove old data from SQL; the present state of live records stays readable. Returns counts.

        The service limits a request to 30 s: then Unavailable is raised, and another call continues.
        """
        given = {
            "older_than": older_than, "keep_changes": keep_changes, "messages_older_than": messages_older_than,
            "keep_messages": keep_messages, "events_older_than": events_older_than,
            "branches_older_than": branches_older_than,
        }  # fmt: skip
        return await self._upkeep("purge", {name: each for name, each in given.items() if each is not None})

    async def _upkeep(self, what: str, body: dict[str, Any]) -> dict[str, int]:
        found: dict[str, int] = (await self._requests.order("POST", f"/v1/maintenance/{what}", body))["counts"]
        return found


def _direct() -> type:
    from distributed_state.store.admin import AsyncAdmin  # it loads all drivers

    return AsyncAdmin
