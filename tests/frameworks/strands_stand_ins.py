"""A plugin of pytest for Strands' own tests: where they make a repository or a manager of theirs, they get ours.

Law: only what tests import is replaced. ADAPTER says what stands in: "theirs" is their own (the control), "ours" is
this package, with the store of the settings in the environment. Those that made one are counted.
"""

from __future__ import annotations

import importlib
import os
import shutil
import uuid
from typing import Any

import made
import pytest
from strands.session import FileSessionManager

from distributed_state import StateStore
from distributed_state.adapters.strands import DistributedSessionManager

pytest_plugins = ["made"]

_stores: list[StateStore] = []
_files: dict[str, set[str]] = {}  # the sessions of each folder


def _store() -> StateStore:
    if not _stores:
        _stores.append(StateStore.open(namespace=f"t{uuid.uuid4().hex[:12]}"))
    return _stores[0]


class _Placed(DistributedSessionManager):
    """Sessions of a place, which is a folder, or a repository's own."""

    place: str

    def _session(self, session_id: str) -> Any:
        return super()._session(f"{self.place} {session_id}")


class File(_Placed):
    """Stands for FileSessionManager."""

    def __init__(self, session_id: str, storage_dir: str | None = None, **more: Any) -> None:
        self.place = f"{storage_dir}"
        _files.setdefault(self.place, set()).add(session_id)
        made.note()
        super().__init__(session_id, _store())


class Repository(_Placed):
    """Stands for MockedSessionRepository: no session is made with it."""

    def __init__(self) -> None:
        self.place = uuid.uuid4().hex
        made.note()
        self._store, self._options, self._read = _store().aio, {}, {}


def _copied(folder: str, to: str) -> None:
    """Stands for `shutil.copytree` of a folder of sessions."""
    for id in _files[folder]:
        _store().session(f"{folder} {id}").fork(f"{to} {id}")


def _note(kind: type) -> None:
    begin = kind.__init__

    def noted(self: object, *given: object, **options: object) -> None:
        made.note()
        begin(self, *given, **options)

    kind.__init__ = noted  # type: ignore[misc]


def pytest_configure(config: pytest.Config) -> None:
    theirs = importlib.import_module("tests.fixtures.mock_session_repository")
    if os.environ["ADAPTER"] != "ours":
        _note(theirs.MockedSessionRepository)
        _note(FileSessionManager)
        return
    theirs.MockedSessionRepository = Repository  # type: ignore[attr-defined]
    for module in ("strands.session", "strands.session.file_session_manager"):
        importlib.import_module(module).FileSessionManager = File  # type: ignore[attr-defined]
    shutil.copytree = lambda folder, to: _copied(folder, to)


def pytest_unconfigure(config: pytest.Config) -> None:
    while _stores:
        _stores.pop().close()
