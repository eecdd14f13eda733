"""A server whose power fails: it comes back as it was when its files were last known to be on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distributed_state.programs.servers import RedisServer, redis_server


class Rewound:
    """A server with an append-only file, which a power cut shortens."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.kept = 0

    def _file(self) -> Path:
        (found,) = self.server.directory.glob("appendonlydir/*.incr.aof")
        return found

    def note(self) -> None:
        """What is there now is on disk."""
        self.kept = self._file().stat().st_size

    def rewind(self) -> None:
        """The power goes, and comes back: what was written since the note never reached the disk."""
        self.server.kill()
        with self._file().open("r+b") as file:
            file.truncate(self.kept)
        self.server.start()

    def whole(self) -> bytes:
        """Its file as it is now."""
        return self._file().read_bytes()

    def restart(self, whole: bytes = b"") -> None:
        """It ends and begins again with all that is on disk, or another server takes over that has this file."""
        self.server.kill()
        if whole:
            self._file().write_bytes(whole)
        self.server.start()


@contextmanager
def rewindable() -> Iterator[Rewound]:
    """Run one; its file is written at each command."""
    # During an fsync of a busy disk a server puts off writing for up to two seconds; so this one does none.
    with redis_server("--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0") as own:
        yield Rewound(own)
