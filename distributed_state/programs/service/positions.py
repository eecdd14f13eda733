"""Positions of events as a tenant's callers get them. Law: they say nothing of what other tenants did.

A position counts the events of each partition, of all tenants together: plain, it would tell how busy the others are,
and when a given record of theirs may have changed. So it is encrypted, and of one of a few lengths. Every worker of the
store opens it: the key comes from the id of its archive, which no answer shows. Callers of all tenants get it plain.

Design: section 23.
"""

from __future__ import annotations

import hashlib
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from distributed_state.errors import InvalidValue

_NONCE = 12  # bytes
_STEP = 256  # lengths are multiples of it


class Positions:
    """Seals positions for the callers of one tenant, and opens those that were sealed for it."""

    def __init__(self, archive_id: str, tenant: str) -> None:
        key = hashlib.blake2b(archive_id.encode(), digest_size=32, person=b"event positions")
        self._cipher = AESGCM(key.digest()) if tenant else None
        self._tenant = tenant.encode()

    def seal(self, position: str) -> str:
        """The position as the tenant gets it."""
        if self._cipher is None:
            return position
        plain = position.encode()
        nonce = os.urandom(_NONCE)
        sealed = self._cipher.encrypt(nonce, plain.ljust(-(-len(plain) // _STEP) * _STEP), self._tenant)
        return urlsafe_b64encode(nonce + sealed).decode()

    def open(self, sealed: str) -> str:
        """The position as the store takes it: "oldest" and "" are themselves.

        Raises InvalidValue for what was not sealed for this tenant.
        """
        if self._cipher is None or sealed in ("oldest", ""):
            return sealed
        try:
            data = urlsafe_b64decode(sealed.encode())
            return self._cipher.decrypt(data[:_NONCE], data[_NONCE:], self._tenant).decode().rstrip()
        except (InvalidTag, ValueError) as error:
            raise InvalidValue("this is no position of a stream of events of this tenant's") from error
