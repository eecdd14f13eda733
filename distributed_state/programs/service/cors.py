"""Web pages that may call the service. Law: none may, unless its origin is named."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from distributed_state.programs.service.routes import READ, SENT


def cors(origins: tuple[str, ...]) -> list[Middleware]:
    """Let the scripts of these pages call the service. Credentials of the browser are never sent along."""
    return [
        Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=READ, expose_headers=SENT, max_age=600,
        )
    ]  # fmt: skip
