"""The tokens of one namespace in SQL. Law: the database's clock says what has expired, not a worker's.

Blocking, and safe to call from many threads; every method is one transaction.

Design: section 17.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from sqlalchemy import Row, func, insert, select, tuple_, update

from distributed_state.cold.engine import Database, Part, Sql
from distributed_state.cold.epochs import clock_us
from distributed_state.cold.tables import access_tokens
from distributed_state.errors import InvalidValue, NotFound, Unauthenticated
from distributed_state.values.access_tokens import AccessToken, FoundToken

_c = access_tokens.c
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class AccessTokenStore(Part):
    """The tokens by which callers of this namespace's service are known."""

    def __init__(self, database: Database, namespace: str) -> None:
        super().__init__(database, namespace)
        self._here = _c.namespace == namespace

    def add(
        self, id: str, digest: bytes, *, prefix: str, rights: Collection[str], actor: str, seconds: float | None,
        made_by: str | None = None,
    ) -> AccessToken:  # fmt: skip
        """Keep a new token, valid for so many seconds from now; None is without end.

        `made_by` is the token that it was asked for with. Raises InvalidValue, and Unauthenticated if that is revoked.
        """
        if _UNSTORABLE.search(actor):
            raise InvalidValue(f"an actor that a token names has no NUL and no lone surrogate, unlike {actor!r:.80}")
        with self.database.write(self.namespace) as sql:
            if made_by is not None:
                self._hold(sql, made_by)
            now_ms = clock_us(sql) // 1000
            row = {
                "namespace": self.namespace, "id": id, "digest": digest, "prefix": prefix, "actor": actor,
                "rights": ",".join(sorted(rights)), "created_ms": now_ms, "revoked_ms": None,
                "expires_ms": None if seconds is None else now_ms + round(seconds * 1000), "made_by": made_by,
            }  # fmt: skip
            sql.execute(insert(access_tokens), row)
            return _token(sql.execute(select(access_tokens).where(self._here, _c.id == id)).one())

    def all(self) -> list[AccessToken]:
        """Every token, those that are not valid any more too, the oldest first."""
        with self.database.read(self.namespace) as sql:
            query = select(access_tokens).where(self._here).order_by(_c.created_ms, _c.id)
            return [_token(row) for row in sql.execute(query)]

    def page(self, prefix: str, after: str | None, limit: int) -> list[AccessToken]:
        """So many of the tenants whose prefix begins so, behind the token of this id. Raises InvalidValue for none."""
        # Compared letter by letter: LIKE of SQLite takes "acme:" for "ACME:", which is another tenant.
        within = (self._here, func.substr(_c.prefix, 1, len(prefix)) == prefix)
        query = select(access_tokens).where(*within).order_by(_c.created_ms, _c.id).limit(limit)
        with self.database.read(self.namespace) as sql:
            if after is not None:
                last = sql.execute(select(_c.created_ms).where(*within, _c.id == after)).scalar()
                if last is None:
                    raise InvalidValue(f"there is no token {after!r:.80} to go on behind")
                query = query.where(tuple_(_c.created_ms, _c.id) > tuple_(last, after))
            return [_token(row) for row in sql.execute(query)]

    def _hold(self, sql: Sql, maker: str) -> None:
        """Let nobody revoke this token until the present transaction ends. Raises Unauthenticated if it is revoked.

        Another worker may accept it for some seconds more: what it made then would be missed by who refuses all of it.
        """
        asked = select(_c.revoked_ms).where(self._here, _c.id == maker).with_for_update(read=True)
        row = sql.execute(asked).one_or_none()
        if row is None or row.revoked_ms is not None:
            raise Unauthenticated

    def revoke(self, id: str) -> AccessToken:
        """Refuse a token from now on, and all that were made with it. Raises NotFound if there is none of this id."""
        with self.database.write(self.namespace) as sql:
            made: set[str] = set()
            # One statement after the other: what somebody was just making is there once its maker is ours.
            while more := self._made_with(sql, id) - made:
                self._revoke(sql, more)
                made |= more
            return self._one(sql, id)

    def _made_with(self, sql: Sql, id: str) -> set[str]:
        """This token and those that were made with it, at however many removes.

        All that were made with any are read: level by level, a chain of ten thousand took SQLite from others for 40 s.
        """
        query = select(_c.id, _c.made_by).where(self._here, _c.made_by.is_not(None))
        by_maker = defaultdict(list)
        for made, maker in sql.execute(query):
            by_maker[maker].append(made)
        found, level = {id}, [id]
        while level:
            level = [made for maker in level for made in by_maker[maker] if made not in found]
            found.update(level)
        return found

    def revoke_alone(self, id: str) -> AccessToken:
        """Refuse a token from now on, and none that was made with it. Raises NotFound."""
        with self.database.write(self.namespace) as sql:
            self._revoke(sql, [id])
            return self._one(sql, id)

    def _revoke(self, sql: Sql, ids: Collection[str]) -> None:
        now_ms = clock_us(sql) // 1000
        these = self._here, sql.among(_c.id, ids)
        sql.execute(update(access_tokens).where(*these, _c.revoked_ms.is_(None)).values(revoked_ms=now_ms))

    def _one(self, sql: Sql, id: str) -> AccessToken:
        row = sql.execute(select(access_tokens).where(self._here, _c.id == id)).one_or_none()
        if row is None:
            raise NotFound(f"there is no token {id!r:.80}")
        return _token(row)

    def find(self, ids: Collection[str]) -> dict[str, FoundToken]:
        """Those of these ids that there are; at most some hundreds at once."""
        with self.database.read(self.namespace) as sql:
            rows = sql.execute(select(access_tokens).where(self._here, _c.id.in_(ids))).all()
            now = clock_us(sql) / 1_000_000 if rows else 0.0
        return {row.id: FoundToken(token := _token(row), row.digest, _left(token, now)) for row in rows}


def _token(row: Row[Any]) -> AccessToken:
    return AccessToken(
        id=row.id, prefix=row.prefix, rights=tuple(row.rights.split(",")), actor=row.actor,
        created=row.created_ms / 1000, expires=_seconds(row.expires_ms), revoked=_seconds(row.revoked_ms),
        made_by=row.made_by,
    )  # fmt: skip


def _seconds(time_ms: int | None) -> float | None:
    return None if time_ms is None else time_ms / 1000


def _left(token: AccessToken, now: float) -> float | None:
    if token.revoked is not None:
        return 0.0
    return None if token.expires is None else max(0.0, token.expires - now)
