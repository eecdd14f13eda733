"""Copies the transcripts of Claude Code and of the Agent SDK into a store. Law: entries are added, never changed.

A session is a file, `projects/<project>/<session>.jsonl`; the folder `<session>` beside it has the files of its
subagents. The SDK keeps metadata of a subagent in another file, and as an entry in a store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

from claude_agent_sdk import SessionKey, SessionStoreEntry

from distributed_state import AsyncStateStore, InvalidValue, NotFound, StateStore
from distributed_state.adapters.adopting import DELETED, EQUAL, Found, Name, canonical, deleted, removed, removed_item
from distributed_state.adapters.claude_agent_sdk import SUBAGENTS, DistributedSessionStore, unknown
from distributed_state.results import Change

_NOTES = "agent_metadata"  # the type of the entry about a subagent, which is not in its transcript
Entry = dict[str, Any]


async def threads(
    stack: AsyncExitStack,
    store: StateStore | AsyncStateStore,
    source: Any,
    *,
    into: Callable[[Any], DistributedSessionStore] = DistributedSessionStore,
) -> Threads:
    """The sessions below a folder `projects`, or below a folder that has one, as `~/.claude`, and of the target."""
    return Threads(_folder(source), into(store))


def _folder(source: Any) -> Path:
    if not isinstance(source, str | Path):
        raise InvalidValue(f"the source is a folder, not a {type(source).__name__}")
    folder = Path(source).expanduser()
    folder = folder / "projects" if (folder / "projects").is_dir() else folder
    if not folder.is_dir():
        raise NotFound(f"there is no folder {str(folder)!r:.200}")
    return folder


class Threads:
    """The sessions of a folder and of the target."""

    def __init__(self, folder: Path, target: DistributedSessionStore) -> None:
        self._folder = folder
        self._target = target

    async def names(self) -> Sequence[Name]:
        """Project and id of each session, the one that was changed last at the end: so it is the newest here, too."""
        found = sorted(self._folder.glob("*/*.jsonl"), key=lambda path: (path.stat().st_mtime, path))
        return [(path.parent.name, path.stem) for path in found]

    async def compare(self, name: Name) -> Found:
        """Compare all transcripts of a session."""
        project, id = name
        record = self._target.session_record(id, project)
        if await deleted(record):
            return DELETED
        work = []
        for subpath, theirs in self._theirs(name).items():
            key = _key(name, subpath)
            ours = cast(list[Entry], await self._target.load(key) or [])
            missing, differs = _missing(theirs, ours)
            if differs:
                return Found(differs=f"{subpath or 'its transcript'}: {differs}")
            if missing:
                work.append((key, len(ours), missing))
        if not work:
            return EQUAL
        if await removed(record, _removed):
            return Found(differs="entries were removed here")
        return Found(work=work)

    async def copy(self, name: Name, work: list[tuple[SessionKey, int, list[Entry]]]) -> None:
        """Add the missing entries, unless another writer has added some meanwhile."""
        async with self._target.session_record(name[1], name[0]).lock(ttl=10.0):
            for key, before, missing in work:
                if len(await self._target.load(key) or ()) == before:
                    await self._target.append(key, cast(list[SessionStoreEntry], missing))

    def _theirs(self, name: Name) -> Mapping[str, list[Entry]]:
        """The entries of each transcript: under "" the session's own, under their subpaths those of subagents."""
        project, id = name
        folder = self._folder / project / id
        found = {"": _entries(folder.with_name(f"{id}.jsonl"))}
        for path in sorted(folder.glob("subagents/**/*.jsonl")):
            notes = path.with_suffix(".meta.json")
            found[path.relative_to(folder).with_suffix("").as_posix()] = [
                *_entries(path),
                *([{**json.loads(notes.read_text(encoding="utf-8")), "type": _NOTES}] if notes.exists() else []),
            ]
        return found


def _removed(changes: Sequence[Change]) -> bool:
    return any(each.cleared or each.kept is not None for each in changes) or removed_item(changes, SUBAGENTS)


def _key(name: Name, subpath: str) -> SessionKey:
    key: SessionKey = {"project_key": name[0], "session_id": name[1]}
    return {**key, "subpath": subpath} if subpath else key


def _entries(path: Path) -> list[Entry]:
    """The entries of a file, each once. Without its last line, if that is still being written."""
    lines = path.read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                found.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise InvalidValue(f"{path}: line {number} is not JSON: {error}") from error
    return unknown(found, ())


def _missing(theirs: list[Entry], ours: list[Entry]) -> tuple[list[Entry], str]:
    """The entries that ours lacks, or why they cannot be added."""
    said, here = _said(theirs), _said(ours)
    common = min(len(said), len(here))
    for at in range(common):
        if canonical(said[at]) != canonical(here[at]):
            return [], f"entry {at + 1} is not the same here"
    if len(here) > common:
        return [], f"it went on here: {len(here) - common} entries of {len(here)} are not in the source"
    notes, noted = _notes(theirs), _notes(ours)
    return [*said[common:], *([] if canonical(notes) == canonical(noted) else notes)], ""


def _said(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.get("type") != _NOTES]


def _notes(entries: list[Entry]) -> list[Entry]:
    """The last entry about a subagent, which is the one that counts."""
    return [entry for entry in entries if entry.get("type") == _NOTES][-1:]
