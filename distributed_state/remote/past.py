"""The past of a record behind a service. Law: the past is read, or made present by a new version; never rewritten.

Design: section 26.
"""

from __future__ import annotations

from typing import Any, Literal

from distributed_state.errors import Deleted, InvalidValue, NotFound
from distributed_state.records.messages import Page
from distributed_state.remote import values
from distributed_state.remote.place import RecordPlace, path_of
from distributed_state.values.model import Ref
from distributed_state.values.results import Branch, Change, Checkpoint, Snapshot

_PAGE = 500


class Past:
    """The methods of a record that are about what it was."""

    _place: RecordPlace

    async def history(
        self, *, after: int = 0, before: int | None = None, limit: int | None = None, branch: str | None = None
    ) -> list[Change]:
        """Read the changes between two versions (exclusive), oldest first: who, when, what.

        One request for each 500, or fewer if they are large.
        """
        Page(limit=limit).checked()
        found: list[Change] = []
        largest = _PAGE
        while limit is None or len(found) < limit:
            size = largest if limit is None else min(largest, limit - len(found))
            query = {"after": after, "before": before, "limit": size, "branch": branch}
            try:
                page = (await self._read("/versions", query))["versions"]
            except InvalidValue:
                if size == 1:
                    raise
                largest = size // 2  # together they are more than a service puts into one answer
                continue
            found += [values.change(each, self._place.ref) for each in page]
            if len(page) < size:
                break
            after = page[-1]["version"]
        return found

    async def at(self, *, version: int | None = None, branch: str | None = None) -> Snapshot:
        """Read the record as it was at a version, with messages and phase. Raises NotFound if it is none or purged."""
        if type(version) is not int or version < 1:
            raise InvalidValue(
                f"a remote store reads a version, also of a branch: an int from 1 on, not {version!r:.80}"
            )
        return values.snapshot(await self._read(f"/versions/{version}", {"branch": branch}))

    async def branches(self) -> list[Branch]:
        """Read which commits were acknowledged and are not continued by the record, by branch."""
        return [values.branch(each) for each in (await self._read("/branches", {}))["branches"]]

    async def drop_branch(self, branch: str) -> int:
        """Remove a branch for good, by its id, and return how many commits it had. Raises NotFound if there is none."""
        # It changes nothing of the record itself, so no lease is asked for.
        path = path_of(self._place.ref, "/branches/{}", branch)
        return int((await self._place.requests.order("DELETE", path))["commits"])

    async def checkpoint(self, label: str) -> int:
        """Name the present state and return the version that carries the name; `rollback(label=...)` comes back to it.

        A name is text of 1 to 500 characters, else InvalidValue; the last checkpoint of a name counts.
        """
        return int((await self._place.write({"kind": "checkpoint", "label": label}))["version"])

    async def checkpoints(
        self,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        order: Literal["asc", "desc"] = "asc",
    ) -> list[Checkpoint]:
        """Read the named versions between two versions (exclusive), oldest first; `limit` of them in this order.

        One request for each 500.
        """
        Page(limit=limit, before=before, after=after, order=order).checked()
        found: list[Checkpoint] = []
        query: dict[str, Any] = {"after": after, "before": before, "order": order}
        while limit is None or len(found) < limit:
            size = _PAGE if limit is None else min(_PAGE, limit - len(found))
            page = (await self._read("/checkpoints", query | {"limit": size}))["checkpoints"]
            found += [values.made(Checkpoint, each) for each in page]
            if len(page) < size:
                break
            query["after" if order == "asc" else "before"] = page[-1]["version"]
        return found

    async def rollback(self, *, steps: int | None = None, label: str | None = None, version: int | None = None) -> int:
        """Make the record what it was `steps` states ago, at a checkpoint or at a version; return the new version."""
        given = {"steps": steps, "label": label, "version": version}
        body = {name: each for name, each in given.items() if each is not None}
        return int((await self._place.write(body, to="/rollback", owned=False))["version"])

    async def fork(self, new_id: str, *, version: int | None = None, branch: str | None = None) -> int:
        """Start another record, of the same scope and owner, from this one's state at `version` (default: now)."""
        given = {"id": Ref(self._place.ref.scope, new_id).id, "version": version, "branch": branch}
        body = {name: each for name, each in given.items() if each is not None}
        # Under the key of this call the record that an earlier attempt began is known as its own.
        return int((await self._place.requests.write("POST", self._place.path + "/forks", body))["version"])

    async def _read(self, path: str, query: dict[str, Any]) -> Any:
        try:
            return await self._place.requests.read(self._place.path + path, query)
        except (NotFound, Deleted):
            if path != "/versions" or query["branch"] is not None:
                raise
            return {"versions": [], "after": None}  # of a record that is not there
