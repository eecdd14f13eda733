"""Conditions of a request, and links to the next page. Law: the ETag of a record is its version, and it is strong.

Source: RFC 9110, section 13; RFC 8288 for links.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from distributed_state.errors import Conflict, InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.programs.service import requests
from distributed_state.programs.service.routes import IF_MATCH, IF_NONE_MATCH
from distributed_state.values.field_ttl import NEVER

_TAG = re.compile(r'"([^"]*)"')  # with the spaces around it, a header of spaces took the square of their number
_VERSION = re.compile(r'"([0-9]{1,18})"')


@dataclass(frozen=True, slots=True)
class Conditions:
    """What must hold for a write: the record is at this version, or exists, or does not."""

    version: int | None = None
    exists: bool | None = None

    @property
    def may_begin(self) -> bool:
        """Whether they hold for a record that is not there yet."""
        return not self.version and not self.exists

    def check(self, version: int, deleted: bool = False) -> None:
        """Raise Conflict unless they hold for a record that nobody else changes meanwhile."""
        if self.version is not None and self.version != version:
            raise Conflict(f"expected version {self.version}, found version {version}", version=version)
        if self.exists is not None and self.exists is not (version > 0 and not deleted):
            raise Conflict(f"the record exists {'not' if self.exists else 'already'}", version=version)


def of_write(request: Request) -> Conditions:
    """The conditions of a write. Raises InvalidValue for those that no write can have."""
    match, none = (
        requests.header(request, each).strip() if each in request.headers else None
        for each in (IF_MATCH, IF_NONE_MATCH)
    )
    if match is not None and none is not None:
        raise InvalidValue("give If-Match or If-None-Match, not both")
    if none not in (None, "*"):
        raise InvalidValue("a write takes If-None-Match: * alone, for a record that is not there yet")
    if match is None:
        return Conditions(exists=None if none is None else False)
    if match == "*":
        return Conditions(exists=True)
    found = _VERSION.fullmatch(match)
    if found is None:
        raise InvalidValue(f'If-Match is * or one version as an ETag has it, as "7", not {match!r:.80}')
    return Conditions(version=int(found[1]))


def not_modified(request: Request, entry: CachedRecord) -> Response | None:
    """The answer to a client that has this version of the record already; None if it has not."""
    given = requests.header(request, IF_NONE_MATCH)
    # A field that has a deadline goes without a new version.
    if not given or entry.expires != NEVER:
        return None
    if given.strip() != "*" and str(entry.version) not in (tag[1] for tag in _TAG.finditer(given)):
        return None
    return Response(status_code=304, headers={"ETag": f'"{entry.version}"'})


def next_page(request: Request, **changed: Any) -> dict[str, str]:
    """The header that leads to the next page: the same query with these parameters."""
    kept = [each for each in requests.pairs(request) if each[0] not in changed]
    query = urlencode([*kept, *changed.items()], errors="surrogatepass")
    return {"Link": f'<{requests.path_of(request)}?{query}>; rel="next"'}
