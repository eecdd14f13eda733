"""Session services by URI, for ADK's command line and web server. Law: a URI says where all is kept, and no more.

Example, in the `services.py` beside the agents::

    from distributed_state.adapters.adk import register

    register()

and then `adk web --session_service_uri "distributed+redis://localhost:6379/0?archive=postgresql://localhost/agents"`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from google.adk.cli.service_registry import get_service_registry

from distributed_state import AsyncStateStore
from distributed_state.adapters.adk.service import DistributedSessionService

_SERVERS = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_SETTINGS = ("archive", "namespace")


def register(scheme: str = "distributed") -> None:
    """Let ADK make services of URIs: `distributed+redis://host/0?archive=...&namespace=...`, for each kind of server.

    `distributed://?archive=...` alone runs in this process, archived to SQLite. Further parameters are those of the
    server's URL; an `&` or `%` within the archive's is written as %26 or %25.
    """
    registry = get_service_registry()
    for name in (scheme, *(f"{scheme}+{server}" for server in _SERVERS)):
        registry.register_session_service(name, _service)


def _service(uri: str, **kwargs: Any) -> DistributedSessionService:
    """The service that a URI names. It opens its store at its first use."""
    parts = urlsplit(uri)
    settings: dict[str, str] = {}
    rest: list[str] = []
    for option in filter(None, parts.query.split("&")):
        name, _, value = option.partition("=")
        if name in _SETTINGS:
            settings[name] = unquote(value)  # no plus becomes a space: databases are named as postgresql+psycopg://
        else:
            rest.append(option)
    server = parts.scheme.partition("+")[2]
    url = urlunsplit(parts._replace(scheme=server, query="&".join(rest))) if server else None
    return DistributedSessionService(
        AsyncStateStore.open(url, archive=settings.get("archive"), namespace=settings.get("namespace")), owned=True
    )
