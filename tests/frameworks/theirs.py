"""The tests of a framework itself, from its source archive, run with our adapter in place of its own stores.

Law: pip fetches an archive once, by its hash; it lies unpacked in pytest's cache, and its tests have their own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def archive(name: str, cache: Path) -> Path:
    """The folder of the source archive of this distribution, as `archives.txt` pins it."""
    (pinned,) = (
        line for line in HERE.joinpath("archives.txt").read_text().splitlines() if line.startswith(f"{name}==")
    )
    folder = cache / pinned.split()[0]
    with FileLock(f"{folder}.lock"):  # of several processes of a run one fetches it
        if not folder.exists():
            wanted, fetched = cache / f"{name}.txt", cache / f"{name}.fetched"
            wanted.write_text(pinned + "\n")
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
            command += ["--require-hashes", "-r", str(wanted), "-d", str(fetched)]
            subprocess.run(command, check=True, timeout=300)
            (found,) = fetched.iterdir()
            with tarfile.open(found) as tar:
                tar.extractall(cache / f"{name}.unpacked", filter="data")
            (unpacked,) = (cache / f"{name}.unpacked").iterdir()
            unpacked.rename(folder)  # last: what is there is whole
    return folder


@dataclass(frozen=True)
class Ended:
    """How those of their tests ended that used our adapter, by name, and what the run printed."""

    outcomes: Mapping[str, str]
    printed: str

    def named(self, outcome: str) -> set[str]:
        return {name for name, each in self.outcomes.items() if each == outcome}


def run(
    folder: Path, tests: Iterable[str], *, plugin: str, made: Path, environment: Mapping[str, str],
    apart: Iterable[str] = (), options: Iterable[str] = (),
) -> Ended:  # fmt: skip
    """Run these of their tests with a plugin of ours, but for those named in `apart`."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        plugin,
        "-p",
        "no:cacheprovider",
        "--timeout=60",
    ]
    command += ["-p", "no:langsmith_plugin", "-n", "2", f"--made={made}", *options, *tests]
    command += [f"--deselect={name}" for name in apart]
    places = [str(HERE), str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert made.exists(), printed
    return Ended(json.loads(made.read_text()), printed)
