"""Session services by URI, for ADK's command line and web server. Law: a URI says all that `AsyncStateStore.open` needs.

Example, in the `services.py` beside the agents::

    from distributed_state.adapters.adk import register

    register()

and then `adk web --session_service_uri "distributed+redis://localhost:6379/0?archive=postgresql://localhost/agents"`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from google.adk.cli.service_registry import get_service_registry

from distributed_state import AsyncStateStore
from distributed_state.adapters.adk.service import DistributedSessionService

_SERVERS = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_SETTINGS = ("archive", "namespace")


def register(scheme: str = "distributed") -> None:
    """Let ADK make services of URIs: `distributed+redis://host/0?archive=...&namespace=...`, for each kind of server.

    `distributed://?archive=...` alone runs in this process, archived to SQLite. Further parameters are those of the
    server's URL.
    """
    registry = get_service_registry()
    for name in (scheme, *(f"{scheme}+{server}" for server in _SERVERS)):
        registry.register_session_service(name, _service)


def _service(uri: str, **kwargs: Any) -> DistributedSessionService:
    """The service that a URI names. It opens its store at its first use."""
    parts = urlsplit(uri)
    options = parse_qsl(parts.query, keep_blank_values=True)
    settings = {name: value for name, value in options if name in _SETTINGS}
    rest = urlencode([(name, value) for name, value in options if name not in _SETTINGS])
    server = parts.scheme.partition("+")[2]
    url = urlunsplit(parts._replace(scheme=server, query=rest)) if server else None
    return DistributedSessionService(AsyncStateStore.open(url, **settings), owned=True)
