"""Routes whose names may hold anything. Law: a path is taken apart first, and each of its names is decoded once.

So the id that is compared with a caller's prefix is the one that is read or written.

Design: section 23.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from starlette.convertors import Convertor, PathConvertor, StringConvertor
from starlette.routing import Match, Route
from starlette.types import Scope

from distributed_state.values import path_names

ROUTE = "distributed_state.route"
"""In the scope of a request: the path of its route, as "/v1/users/{id}"."""
UNREADABLE = "distributed_state.unreadable"
"""In the scope of a request: why a name of its path cannot be read, "" if all can be."""
_PARTS = "distributed_state.parts"
_NONE: tuple[Match, Scope] = (Match.NONE, {})
_NAME = re.compile(r"{(\w+)(?::\w+)?}")


class NamedRoute(Route):
    """A route that takes names percent-encoded, and in base64url where `base64` is the first part behind `start`.

    The last name may be a `path`: that is all that is left.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], *, methods: list[str], start: str = "") -> None:
        super().__init__(path, endpoint, methods=methods)
        self._start = start.count("/")
        form = path.split("/")[1:]
        named = {at: found[1] for at, each in enumerate(form) if (found := _NAME.fullmatch(each))}
        self._size = len(form)
        self._words = [(at, each.encode()) for at, each in enumerate(form) if at not in named]
        self._names = [(at, name, self.param_convertors[name]) for at, name in named.items()]
        self._rest = bool(self._names) and isinstance(self._names[-1][2], PathConvertor)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether it serves this request, and what its path names."""
        if scope["type"] != "http":
            return _NONE
        parts, encoded = _parts(scope, self._start)
        size = len(parts)
        # All but one of a hundred routes end here.
        if size != self._size and not (self._rest and size > self._size):
            return _NONE
        for at, word in self._words:
            if parts[at] != word and unquote_to_bytes(parts[at]) != word:
                return _NONE
        if size > self._size:
            parts = [*parts[: self._size - 1], b"/".join(parts[self._size - 1 :])]
        found: dict[str, Any] = {}
        problem = ""
        for at, name, kind in self._names:
            try:
                if not _take(found, name, kind, parts[at], encoded):
                    return _NONE
            except ValueError:
                problem = f"{name}: not {'base64url of ' if encoded else ''}UTF-8 where its % are decoded"
        params = {**scope.get("path_params", {}), **found}
        child = {"endpoint": self.endpoint, "path_params": params, ROUTE: self.path, UNREADABLE: problem}
        served = not self.methods or scope["method"] in self.methods
        return (Match.FULL if served else Match.PARTIAL), child


def _take(found: dict[str, Any], name: str, kind: Convertor[Any], part: bytes, encoded: bool) -> bool:
    """Read a name, False if there is none here. Raises ValueError if it cannot be read."""
    if isinstance(kind, StringConvertor | PathConvertor):
        if not part and isinstance(kind, StringConvertor):
            return False
        found[name] = path_names.read_base64(part) if encoded else path_names.read(part)
        return True
    text = path_names.read(part)
    if re.fullmatch(kind.regex, text) is None:
        return False
    found[name] = kind.convert(text)
    return True


def _parts(scope: Scope, start: int) -> tuple[list[bytes], bool]:
    """The parts of a request's path below the root, as they were sent; whether their names are in base64url."""
    root: str = scope.get("root_path", "")
    known: tuple[str, int, tuple[list[bytes], bool]] | None = scope.get(_PARTS)
    if known is None or known[0] != root or known[1] != start:
        raw: bytes | None = scope.get("raw_path")
        if raw is None:  # a server need not say it
            raw = quote(scope["path"]).encode()
        begin, *parts = raw.split(b"/")
        # A target that does not begin with '/' names another host, or nothing.
        parts = [] if begin else parts[root.count("/") :]
        encoded = parts[start : start + 1] == [path_names.BASE64.encode()]
        if encoded:
            parts = parts[:start] + parts[start + 1 :]
        known = scope[_PARTS] = root, start, (parts, encoded)
    return known[2]
