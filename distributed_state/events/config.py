"""The configuration of an agent, from a file or from the fleet. Law: an invalid config never replaces a valid one.

The fleet's configuration is stored in a record and read from there. The event names the changed settings, without their
values, because events reach more readers than records do.

Design: section 12.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from distributed_state.errors import ConfigurationError, InvalidValue, StateError
from distributed_state.settings import absolute
from distributed_state.values import codec

log = logging.getLogger(__name__)
Source = str | os.PathLike[str] | Mapping[str, Any]
RECORD = "agent-config"  # of scope app: a field for all agents, and one for each agent with a config of its own


def field_of(agent: str) -> str:
    """The record's field with the config of one agent, or of all agents with ""."""
    if not isinstance(agent, str):
        raise InvalidValue(f"agent is the name of one, not a {type(agent).__name__}")
    return f"agent:{agent}" if agent else "all"


@dataclass(frozen=True, slots=True)
class Spread:
    """A config for the whole fleet. `time` is in seconds since 1970, `version` is that of its record."""

    config: dict[str, Any]
    time: float
    version: int


def newest(fields: Mapping[str, Any], agent: str, version: int) -> Spread | None:
    """The fleet's latest config for this agent."""
    found = [_spread(fields.get(name), version) for name in (field_of(""), field_of(agent))]
    return max(filter(None, found), key=lambda each: each.time, default=None)


def _spread(found: Any, version: int) -> Spread | None:
    """The config in a field of the record; other content is ignored, so that agents can still start."""
    given, time = (found.get("config"), found.get("time")) if isinstance(found, dict) else (None, None)
    return Spread(given, float(time), version) if isinstance(given, dict) and isinstance(time, (int, float)) else None


def difference(before: Any, found: dict[str, Any], agent: str) -> dict[str, Any]:
    """The data of the event for a new config. `before` is the record's previous value."""
    given = before.get("config") if isinstance(before, dict) else None
    changed = _differing(given if isinstance(given, dict) else {}, found)
    return {"agent": agent, "changed": sorted(changed), "digest": digest(found)}


def digest(found: dict[str, Any]) -> str:
    """SHA-256 of a config, in hex, to compare a config with the fleet's."""
    return hashlib.sha256(json.dumps(found, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a file: JSON if it is named .json, else YAML. Raises ConfigurationError with the place."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # an invalid file name raises ValueError
        raise ConfigurationError(f"{str(file)!r}: cannot be read: {error}") from error
    try:
        found = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{file}, line {error.lineno}, column {error.colno}: {error.msg}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigurationError(f"{file}{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"{file}: {error}") from error
    return _object({} if found is None else found, str(file))


def of_fleet(source: Source) -> dict[str, Any]:
    """The config for the whole fleet, from a mapping or a file. Raises ConfigurationError, InvalidValue."""
    if isinstance(source, (str, os.PathLike)):
        return read(source)
    if not isinstance(source, Mapping):
        raise InvalidValue(f"a config is a mapping or the path of a file, not {type(source).__name__}")
    return _object(dict(source), "config")


def _object(found: Any, place: str) -> dict[str, Any]:
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigurationError(f"{place}: must hold an object with string keys, not a {type(found).__name__}")
    try:
        # Only JSON values can be sent to every replica and compared there; YAML's dates, for example, cannot.
        value: dict[str, Any] = codec.decode(codec.encode(found, "config"))
    except StateError as error:
        raise ConfigurationError(f"{place}: {error}") from error
    return value


def part_of(found: dict[str, Any], agent: str) -> dict[str, Any]:
    """One agent's part of a config: the config itself, or with `agents` the agent's entry there merged over the rest.

    `agents` is a mapping by name, or a list of objects with a `name`.
    """
    agents = found.get("agents")
    if isinstance(agents, list):
        named = [each for each in agents if isinstance(each, dict) and each.get("name") == agent]
        agents = {agent: {name: value for name, value in named[-1].items() if name != "name"}} if named else {}
    if not isinstance(agents, dict):
        return found
    mine = agents.get(agent)
    beside = {name: value for name, value in found.items() if name != "agents"}
    return beside | (mine if isinstance(mine, dict) else {})


class Config:
    """The current config of one agent: `value` is a dict, or a model of the class that the agent named."""

    def __init__(self, agent: str, model: type[BaseModel] | None, source: Source | None) -> None:
        self._agent = agent
        self._model = model
        self._path = Path(absolute(os.fspath(source))) if isinstance(source, (str, os.PathLike)) else None
        self._given = None if source is None or self._path else of_fleet(source)
        self._raw: dict[str, Any] = {}
        self._file: dict[str, Any] | None = None  # as last read, valid or not
        self._seen: tuple[float, int] | None = None
        self._version = 0
        self._time = 0.0
        self.value: Any = {}

    def begin(self, spread: Spread | None) -> None:
        """Take the newer one of file and fleet at the start. Raises ConfigurationError if neither is valid."""
        if self._path is not None:
            self._seen = self._stat()
            self._given = self._file = read(self._path)
        if spread is not None:
            self._version = spread.version
            self._time = spread.time
            if self._seen is None or spread.time > self._seen[0]:
                try:
                    self._put(spread.config)
                    return
                except ConfigurationError as error:
                    if self._given is None:
                        raise
                    log.error("agent %s starts with its own config, not the fleet's: %s", self._agent, error)
        self._put(self._given or {})

    def with_source(self, source: Source) -> Config:
        """The config of the same agent from another source."""
        return Config(self._agent, self._model, source)

    @property
    def has_file(self) -> bool:
        """Whether the config is in a file, which can be read again."""
        return self._path is not None

    @property
    def has_source(self) -> bool:
        """Whether the agent was given a config."""
        return self.has_file or self._given is not None

    def reload(self) -> set[str]:
        """Read the file again and return the names whose values changed.

        After a ConfigurationError nothing has changed.

        An unmodified file has no effect, even if the fleet received another config since.
        """
        if self._path is None:
            return set()
        self._seen = self._stat()
        found = read(self._path)
        if found == self._file:
            return set()
        self._file = found
        return self._put(found)

    def take(self, spread: Spread) -> set[str]:
        """Take the fleet's config if it is newer than the current one; returns the names whose values changed."""
        if spread.version <= self._version:
            return set()
        # The record also changes for other agents: a known config is not taken again over a newer file.
        known = spread.time == self._time
        self._version = spread.version
        self._time = spread.time
        return set() if known else self._put(spread.config)

    def touched(self) -> bool:
        """Whether the file was modified since it was read."""
        return self._path is not None and self._stat() != self._seen

    def _stat(self) -> tuple[float, int] | None:
        assert self._path is not None
        try:
            found = self._path.stat()
        except (OSError, ValueError):
            return None
        return found.st_mtime, found.st_size

    def _put(self, found: dict[str, Any]) -> set[str]:
        raw = part_of(found, self._agent)
        try:
            value = raw if self._model is None else self._model.model_validate(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "config"
            source = f"{self._path}: " if self._path is not None else ""
            raise ConfigurationError(f"{source}{place}: {first['msg']}") from error
        changed = _differing(raw, self._raw)
        self._raw = raw
        self.value = value
        return changed


def _differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if _value(one, name) != _value(other, name)}


def _value(raw: dict[str, Any], name: str) -> bytes | None:
    # Compared as text, because 1, 1.0 and True are equal in Python.
    return codec.encode(raw[name], name) if name in raw else None
