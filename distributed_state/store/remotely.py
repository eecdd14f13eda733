"""What `open` does of a URL of a service. Law: what is the service's to say is refused, not ignored.

Design: section 26.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distributed_state.errors import ConfigurationError
from distributed_state.remote.addresses import service

_OWN = ("token", "retry_for", "timeout")


def opened_remotely(opens: Callable[..., Any], url: str | None, settings: Mapping[str, Any], **others: object) -> Any:
    """The remote store that `opens` opens, None if the URL is no service's. Raises ConfigurationError."""
    found = service(url)
    if found is None:
        if "token" in settings:
            raise ConfigurationError("token: is for a store behind a service, at an http:// or https:// URL")
        return None
    theirs = [name for name, value in {**others, **settings}.items() if value is not None and name not in _OWN]
    if theirs:
        raise ConfigurationError(
            f"{', '.join(theirs)}: of a store behind a service, as at http://, that is set there, by `serve`; "
            "a Redis is at redis://"
        )
    return opens(found, **settings)
