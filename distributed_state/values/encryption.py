"""Values encrypted with AES-GCM before they leave the process.

Law: a sealed value opens only in its namespace, record and field, and the data of an event only under that event's
subject, type and id. It is stored as 0x01, the length of the key's id, the id, a random nonce of 12 bytes, and the
ciphertext with its tag.

Design: section 17.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_state.errors import ConfigurationError, InvalidValue
from distributed_state.values import codec, field_ttl
from distributed_state.values.codec import EVENT, MESSAGE, OUTPUT, SEALED, Codec
from distributed_state.values.model import Message

_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NONCE = 12
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class KeyRing:
    """Keys of 32 bytes (or 16, or 24) by id. `current` encrypts (the last one by default); all decrypt.

    Nonces are random, so replace a key before it has encrypted four thousand million values (NIST SP 800-38D, 8.3).
    """

    def __init__(self, keys: Mapping[str, bytes], *, current: str | None = None) -> None:
        try:
            # Imported here, because it belongs to the extra.
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigurationError("encryption needs: pip install 'distributed-state[encryption]'") from error
        if not isinstance(keys, Mapping) or not keys:
            raise ConfigurationError("a key ring is a mapping of ids to keys, and holds at least one")
        for name, key in keys.items():
            if not isinstance(name, str) or not _KEY_ID.fullmatch(name):
                raise ConfigurationError("the id of a key is 1 to 64 letters, digits, '.', '_' or '-'")
            if not isinstance(key, bytes) or len(key) not in (16, 24, 32):
                found = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"
                raise ConfigurationError(f"key {name!r}: a key is 32 bytes (or 16, or 24), not {found}")
        self.current = next(reversed(list(keys))) if current is None else current
        if self.current not in keys:
            raise ConfigurationError(f"the current key {self.current!r:.80} is not among {', '.join(keys)}")
        self._ciphers = {name: AESGCM(key) for name, key in keys.items()}
        self._refusals = InvalidTag, ValueError

    @classmethod
    def parse(cls, text: str, *, current: str | None = None) -> KeyRing:
        """Read `id:key` pairs, keys in base64, separated by commas or line ends; `#` begins a comment."""
        keys: dict[str, bytes] = {}
        for number, line in enumerate(re.split(r"[,\n]", text), start=1):
            entry = line.partition("#")[0].strip()
            if not entry:
                continue
            name, _, encoded = (part.strip() for part in entry.partition(":"))
            if not _KEY_ID.fullmatch(name) or not encoded:
                raise ConfigurationError(f"keys: entry {number} is not id:key")  # not the entry: it may be the key
            if name in keys:
                raise ConfigurationError(f"keys: {name!r} occurs twice")
            keys[name] = _decoded(name, encoded)
        return cls(keys, current=current)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the keys."""
        return tuple(self._ciphers)

    def encrypt(self, text: bytes, place: bytes) -> bytes:
        """Encrypt under the current key: nonce and ciphertext."""
        nonce = os.urandom(_NONCE)
        return nonce + self._ciphers[self.current].encrypt(nonce, text, place)

    def decrypt(self, name: str, data: bytes, place: bytes) -> bytes | None:
        """Undo `encrypt`; None if these bytes cannot be decrypted with this key, in this place."""
        try:
            return self._ciphers[name].decrypt(data[:_NONCE], data[_NONCE:], place)
        except self._refusals:
            return None

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self.ids)}; current {self.current})"

    def __reduce__(self) -> Any:
        raise TypeError("a key ring cannot be pickled: the result would contain its keys")


def _decoded(name: str, encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, altchars=b"-_" if set("-_") & set(encoded) else None, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise ConfigurationError(f"key {name!r}: is not base64")


@dataclass(frozen=True, slots=True)
class Encryption:
    """Which values are encrypted, and with which keys: by default every value of every field and every message.

    `fields` are names or patterns of names, such as `card*`; the outcomes of turns and the data of events are always
    encrypted. An unencrypted stored value that must be encrypted raises DecryptionFailed, except while
    `accept_plaintext` is set, for the time of a migration; writes always encrypt. Older unencrypted events can still be
    read. Not encrypted are ids, names of fields, types and subjects of events, phases, owners, actors, labels, request
    ids, names of tools and models, times, sizes and numbers of messages, and the reports of replicas. The hot tier of a
    process keeps small values decrypted in its memory.
    """

    keys: KeyRing
    fields: tuple[str, ...] = ("*",)
    messages: bool = True
    accept_plaintext: bool = False
    _pattern: re.Pattern[str] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.keys, KeyRing):
            raise ConfigurationError("keys: give a KeyRing")
        if isinstance(self.fields, str) or not all(isinstance(name, str) and name for name in self.fields):
            raise ConfigurationError("fields: give a tuple of names or patterns, such as ('ssn', 'card*')")
        object.__setattr__(self, "fields", tuple(self.fields))
        patterns = "|".join(fnmatch.translate(name) for name in self.fields)
        object.__setattr__(self, "_pattern", re.compile(patterns) if patterns else None)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Encryption | None:
        """From DISTRIBUTED_STATE_KEYS (`id:base64,...`) or DISTRIBUTED_STATE_KEY_FILE (one such pair per line).

        The last key encrypts unless DISTRIBUTED_STATE_CURRENT_KEY names another. Also read: _ENCRYPTED_FIELDS (patterns
        separated by commas, default *), _ENCRYPTED_MESSAGES (default true), _ACCEPT_PLAINTEXT. None without keys.
        """
        given = {
            name: environment[f"DISTRIBUTED_STATE_{name}"]
            for name in (
                "KEYS",
                "KEY_FILE",
                "CURRENT_KEY",
                "ENCRYPTED_FIELDS",
                "ENCRYPTED_MESSAGES",
                "ACCEPT_PLAINTEXT",
            )
            if environment.get(f"DISTRIBUTED_STATE_{name}")
        }
        if not given:
            return None
        if ("KEYS" in given) == ("KEY_FILE" in given):
            raise ConfigurationError(
                f"{', '.join(f'DISTRIBUTED_STATE_{name}' for name in given)} ask for encryption: "
                "exactly one of DISTRIBUTED_STATE_KEYS and DISTRIBUTED_STATE_KEY_FILE holds the keys"
            )
        text = given["KEYS"] if "KEYS" in given else _read(given["KEY_FILE"])
        patterns = [name.strip() for name in given.get("ENCRYPTED_FIELDS", "*").split(",")]
        return cls(
            KeyRing.parse(text, current=given.get("CURRENT_KEY")),
            fields=tuple(name for name in patterns if name),
            messages=_switch("ENCRYPTED_MESSAGES", given, default=True),
            accept_plaintext=_switch("ACCEPT_PLAINTEXT", given, default=False),
        )

    def covers(self, name: str) -> bool:
        """Whether the values of this field, or messages, are encrypted."""
        if name[:1] == "#":
            # The outcome of a request may contain any data.
            return self.messages if name in (MESSAGE, "#summary") or name.startswith(OUTPUT) else True
        return self._pattern is not None and self._pattern.match(name) is not None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path!r}: the keys cannot be read: {type(error).__name__}") from None


def _switch(name: str, given: Mapping[str, str], *, default: bool) -> bool:
    text = given.get(name)
    if text is None:
        return default
    if text.lower() not in _SWITCH:
        raise ConfigurationError(f"DISTRIBUTED_STATE_{name} is {text!r:.40}, use true or false")
    return _SWITCH[text.lower()]


class Sealed(Codec):
    """The codec of one record's values; `encryption` says which of them are encrypted."""

    __slots__ = ("_encryption",)
    seals = True

    def __init__(self, encryption: Encryption, namespace: str, record: str) -> None:
        super().__init__(namespace, record)
        self._encryption = encryption

    def of(self, record: str, namespace: str | None = None) -> Codec:
        """The codec of another record, because ciphertext is bound to its record."""
        return Sealed(self._encryption, namespace or self.namespace, record)

    def covers(self, name: str) -> bool:
        """Whether the values of this field are encrypted."""
        return self._encryption.covers(name)

    def seal(self, text: bytes, name: str) -> bytes:
        """JSON text as it is stored: encrypted, if the field requires it."""
        return self.enclose(text, name) if self.covers(name) else text

    def encode(self, value: Any, key: str) -> bytes:
        """A field's value as it is stored."""
        return self.seal(self.text(value, key), key)

    def enclose(self, text: bytes, name: str) -> bytes:
        """JSON text, encrypted."""
        keys = self._encryption.keys
        return SEALED + b"%c%b" % (len(keys.current), keys.current.encode()) + keys.encrypt(text, self._place(name))

    def open(self, data: bytes, name: str) -> bytes:
        """The JSON text of a stored value. Raises DecryptionFailed."""
        data = field_ttl.split(data)[1]
        if data[:1] != SEALED:
            # Events do not become state, and the audit trail may be older than the keys.
            strict = not self._encryption.accept_plaintext and not name.startswith(EVENT)
            if strict and self.covers(name):
                raise self.failed(data, name, "as required; accept_plaintext allows plaintext during a migration")
            return data
        keys = self._encryption.keys
        key = codec.key_id(data)
        if key not in keys.ids:
            raise self.failed(data, name, f"and the key ring has {', '.join(keys.ids)}")
        text = keys.decrypt(key, data[2 + len(key) :], self._place(name))
        if text is None:
            raise self.failed(data, name, "and does not open: another key, another place, or damaged")
        return text

    def _place(self, name: str) -> bytes:
        parts = (self.namespace.encode(), self.record.encode(), name.encode("utf-8", "surrogatepass"))
        return b"".join(b"%d:%b" % (len(part), part) for part in parts)

    def stale(self, data: bytes, name: str) -> bool:
        """Whether the value would be stored differently today: under another key, or encrypted instead of plain."""
        data = field_ttl.split(data)[1]
        if data[:1] != SEALED:
            return self.covers(name)
        return codec.key_id(data) != self._encryption.keys.current

    def carry(self, data: bytes, name: str, to: Codec) -> bytes:
        """Convert a stored value for another record, or for this one under the current key."""
        text = self.open(data, name)
        same = (self.namespace, self.record) == (to.namespace, to.record)
        if same and not self.stale(data, name):
            return data
        # A value that was encrypted stays encrypted, even if that is no longer required.
        sealed = isinstance(to, Sealed) and field_ttl.split(data)[1][:1] == SEALED
        again = to.enclose(text, name) if isinstance(to, Sealed) and sealed else to.seal(text, name)
        return field_ttl.mark(data) + again

    # Errors about values that cannot be stored do not reveal their contents.

    def text(self, value: Any, key: str) -> bytes:
        """JSON text of a value, before encryption; an error does not reveal the contents."""
        if not self.covers(key):
            return codec.encode_value(value, key)
        try:
            return codec.encode_value(value, key)
        except InvalidValue:
            pass
        raise InvalidValue(
            f"{key}: is neither a JSON value nor bytes; the part is not named because it is to be encrypted"
        )

    def encode_message(self, message: Message | dict[str, Any]) -> bytes:
        """A message as it is stored; an error does not reveal the contents."""
        if not self.covers(MESSAGE):
            return codec.encode_message(message)
        checked = message if isinstance(message, Message) else codec.as_message(message)
        return self.encode(checked.to_dict(), MESSAGE)
