"""Tokens that identify callers of the service. Law: only a token's holder knows it; the store keeps its digest.

A token is `dstate_<id>_<secret>`: a prefix that scanners for leaked secrets recognize, an id that may be shown and
logged, and 256 random bits. Random bits cannot be guessed, so a plain SHA-256 is enough, and a slow hash would not add
security.

Design: section 17.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Literal, get_args

from distributed_state.errors import InvalidValue

Right = Literal["read", "write", "delete", "events", "admin"]
RIGHTS: tuple[Right, ...] = get_args(Right)
BEGINNING = "dstate_"
_SHAPE = re.compile(r"dstate_([0-9a-f]{16})_[A-Za-z0-9_-]{43}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,98}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AccessToken:
    """A token as it is stored, without its secret. Times are in seconds since 1970 by SQL's clock."""

    id: str
    prefix: str  # of all ids that its holder may use; "" stands for every tenant
    rights: tuple[str, ...]
    actor: str
    created: float
    expires: float | None
    revoked: float | None
    made_by: str | None = None  # the id of the token that authorized its creation


@dataclass(frozen=True, slots=True)
class FoundToken:
    """A token from SQL, its digest, and its remaining validity in seconds: 0 if invalid, None without a limit."""

    token: AccessToken
    digest: bytes
    left: float | None


def make() -> tuple[str, str]:
    """Make a token: its id, and its text, which is shown once."""
    id = secrets.token_hex(8)
    return id, f"{BEGINNING}{id}_{secrets.token_urlsafe(32)}"


def id_of(text: str) -> str | None:
    """The id in the text of a token; None if the text is not a token."""
    shaped = _SHAPE.fullmatch(text)
    return shaped[1] if shaped else None


def is_id(text: str) -> bool:
    """Whether a token may have this id."""
    return _ID.fullmatch(text) is not None


def digest(text: str) -> bytes:
    """The digest that is stored for a token."""
    return hashlib.sha256(text.encode()).digest()


def prefix_of(tenant: str) -> str:
    """The prefix of a tenant's ids, `acme:` of "acme" and of "acme:".

    It ends with a colon: without the colon, "acme" would also begin the ids of a tenant "acme2". Raises InvalidValue.
    """
    if not isinstance(tenant, str) or _TENANT.fullmatch(tenant) is None:
        raise InvalidValue(f"a tenant is letters, digits, '.', '_', '-' and ':', at most 99, not {tenant!r:.80}")
    return tenant if tenant.endswith(":") else f"{tenant}:"
