"""What `open` does of a URL of a service. Law: what is the service's to say is refused, not ignored.

Nothing of a remote store is imported before there is such a URL.

Design: section 26.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

from distributed_state.errors import ConfigurationError

_SCHEMES = ("http://", "https://")
_OWN = ("token", "retry_for", "timeout")
Kind = Literal["remote.store.AsyncRemoteStore", "remote.blocking.RemoteStore"]


def opened_remotely(kind: Kind, url: str | None, settings: Mapping[str, Any], **others: object) -> Any:
    """A store of this kind at the URL, None if that is no service's. Raises ConfigurationError."""
    found = os.environ.get("DISTRIBUTED_STATE_URL") if url is None else url
    if not isinstance(found, str) or not found.lower().startswith(_SCHEMES):
        if "token" in settings:
            raise ConfigurationError("token: is for a store behind a service, at an http:// or https:// URL")
        return None
    theirs = [name for name, value in {**others, **settings}.items() if value is not None and name not in _OWN]
    if theirs:
        raise ConfigurationError(
            f"the URL is that of a service, and {', '.join(theirs)} is not for its clients to say; "
            "a store of one's own is at redis://"
        )
    module, _, name = kind.rpartition(".")
    return getattr(import_module(f"distributed_state.{module}"), name).open(found, **settings)
