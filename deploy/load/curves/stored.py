"""Curves in a file. Law: a run replaces what it measured, and leaves what it did not."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.load.curves.curve import Curve
from distributed_state.programs.servers import postgres_binaries, redis_binary


@dataclass(frozen=True)
class Stored:
    """The curves of each measurement, by its name, and on what they were measured."""

    setting: dict[str, str]
    curves: dict[str, list[Curve]]

    @property
    def all(self) -> list[Curve]:
        """Every curve, in order."""
        return [curve for some in self.curves.values() for curve in some]

    @classmethod
    def read(cls, path: Path) -> Stored:
        """What is in a file."""
        found = json.loads(path.read_text())
        fields = Curve.__dataclass_fields__
        curves = {
            name: [Curve(**{key: value for key, value in each.items() if key in fields}) for each in some]
            for name, some in found["curves"].items()
        }
        return cls(found["setting"], curves)

    def write(self, path: Path) -> None:
        """Write them, with their slopes."""
        curves = {name: [asdict(each) | {"slope": each.slope} for each in some] for name, some in self.curves.items()}
        path.write_text(json.dumps({"setting": self.setting, "curves": curves}, indent=1) + "\n")


def merged(before: Path, measured: Stored, order: Sequence[str]) -> Stored:
    """What a file has, if it is there, and what was measured now; measurements that are no more go."""
    known = (Stored.read(before).curves if before.exists() else {}) | measured.curves
    return Stored(measured.setting, {name: known[name] for name in order if name in known})


def setting() -> dict[str, str]:
    """When and on what."""
    software = [
        f"Python {platform.python_version()}",
        _named(redis_binary()),
        _named(str(postgres_binaries() / "postgres")),
    ]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",  # of others, if it is asked for before anything is measured
        "software": ", ".join(software),
    }


def _named(program: str) -> str:
    """The name and version of a server, as `Redis server v=7.0.15 ...` and `postgres (PostgreSQL) 15.18` tell them."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"\d+(\.\d+)+", said)
    name = re.search(r"Redis|Valkey|PostgreSQL", said)
    return f"{name.group()} {version.group()}" if name and version else said.strip()
