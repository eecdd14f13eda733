"""Statements that SQLAlchemy has compiled, for all databases of a run. Law: dialects of one version compile alike.

Each engine has a cache of its own. A test opens an engine or several, and would compile all that it uses again: a fifth
of the time of a short test.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, create_engine

_MOST = 3000


class Compiled(dict[Any, Any]):
    """What `compiled_cache` may be, with the kind of dialect in its keys instead of the dialect."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_shared(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= _MOST:
            self.clear()
        super().__setitem__(_shared(key), value)


def _shared(key: Any) -> Any:
    dialect, *rest = key
    return type(dialect), dialect.server_version_info, *rest


_COMPILED = Compiled()


def engine_that_shares(*given: Any, **options: Any) -> Engine:
    """As `create_engine`, with what the engines before it have compiled."""
    return create_engine(*given, **options, execution_options={"compiled_cache": _COMPILED})
