"""The tokens of one namespace in SQL. Law: the database's clock says what has expired, not a worker's.

Blocking, and safe to call from many threads; every method is one transaction.

Design: section 17.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from sqlalchemy import Row, func, insert, select, tuple_, update

from distributed_state.cold.engine import Database
from distributed_state.cold.epochs import clock_us
from distributed_state.cold.tables import access_tokens
from distributed_state.errors import InvalidValue, NotFound
from distributed_state.values.access_tokens import AccessToken, FoundToken

_c = access_tokens.c
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class AccessTokenStore:
    """The tokens by which callers of this namespace's service are known."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._database = database
        self._here = _c.namespace == namespace
        self._namespace = namespace

    def add(
        self, id: str, digest: bytes, *, prefix: str, rights: Collection[str], actor: str, seconds: float | None
    ) -> AccessToken:
        """Keep a new token, valid for so many seconds from now; None is without end. Raises InvalidValue."""
        if _UNSTORABLE.search(actor):
            raise InvalidValue(f"an actor that a token names has no NUL and no lone surrogate, unlike {actor!r:.80}")
        with self._database.write() as connection:
            now_ms = clock_us(connection) // 1000
            row = {
                "namespace": self._namespace, "id": id, "digest": digest, "prefix": prefix, "actor": actor,
                "rights": ",".join(sorted(rights)), "created_ms": now_ms, "revoked_ms": None,
                "expires_ms": None if seconds is None else now_ms + round(seconds * 1000),
            }  # fmt: skip
            connection.execute(insert(access_tokens), row)
            return _token(connection.execute(select(access_tokens).where(self._here, _c.id == id)).one())

    def all(self) -> list[AccessToken]:
        """Every token, those that are not valid any more too, the oldest first."""
        with self._database.read() as connection:
            query = select(access_tokens).where(self._here).order_by(_c.created_ms, _c.id)
            return [_token(row) for row in connection.execute(query)]

    def page(self, prefix: str, after: str | None, limit: int) -> list[AccessToken]:
        """So many of the tenants whose prefix begins so, behind the token of this id. Raises InvalidValue for none."""
        # Compared letter by letter: LIKE of SQLite takes "acme:" for "ACME:", which is another tenant.
        within = (self._here, func.substr(_c.prefix, 1, len(prefix)) == prefix)
        query = select(access_tokens).where(*within).order_by(_c.created_ms, _c.id).limit(limit)
        with self._database.read() as connection:
            if after is not None:
                last = connection.execute(select(_c.created_ms).where(*within, _c.id == after)).scalar()
                if last is None:
                    raise InvalidValue(f"there is no token {after!r:.80} to go on behind")
                query = query.where(tuple_(_c.created_ms, _c.id) > tuple_(last, after))
            return [_token(row) for row in connection.execute(query)]

    def revoke(self, id: str) -> AccessToken:
        """Refuse a token from now on. Raises NotFound if there is none of this id."""
        with self._database.write() as connection:
            one = (self._here, _c.id == id)
            now_ms = clock_us(connection) // 1000
            connection.execute(update(access_tokens).where(*one, _c.revoked_ms.is_(None)).values(revoked_ms=now_ms))
            row = connection.execute(select(access_tokens).where(*one)).one_or_none()
            if row is None:
                raise NotFound(f"there is no token {id!r:.80}")
            return _token(row)

    def find(self, ids: Collection[str]) -> dict[str, FoundToken]:
        """Those of these ids that there are; at most some hundreds at once."""
        with self._database.read() as connection:
            rows = connection.execute(select(access_tokens).where(self._here, _c.id.in_(ids))).all()
            now = clock_us(connection) / 1_000_000 if rows else 0.0
        return {row.id: FoundToken(token := _token(row), row.digest, _left(token, now)) for row in rows}


def _token(row: Row[Any]) -> AccessToken:
    return AccessToken(
        id=row.id, prefix=row.prefix, rights=tuple(row.rights.split(",")), actor=row.actor,
        created=row.created_ms / 1000, expires=_seconds(row.expires_ms), revoked=_seconds(row.revoked_ms),
    )  # fmt: skip


def _seconds(time_ms: int | None) -> float | None:
    return None if time_ms is None else time_ms / 1000


def _left(token: AccessToken, now: float) -> float | None:
    if token.revoked is not None:
        return 0.0
    return None if token.expires is None else max(0.0, token.expires - now)
