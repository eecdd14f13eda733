#!/usr/bin/env python
"""Check what a release publishes: that its wheel alone does the main job, in an environment without a clone.

    python -m build && python tools/check_artefacts.py dist

Each step is a process in an empty folder, whose Python has the wheel and what it needs. Prints the sizes, and exits
with 1 at the first step that fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import venv
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "distributed_state/"
EMBEDDED = """
from distributed_state import StateStore

with StateStore.open(archive="sqlite:///embedded.db") as store:
    store.session("c1").set("city", "Oslo")
    store.admin.archive()
with StateStore.open(archive="sqlite:///embedded.db") as store:
    print(store.session("c1").get("city"))
"""
SECONDS = 300


class Failed(Exception):
    """A step that failed, and what it printed."""


def tracked() -> set[str]:
    """The files of the package that git has."""
    found = subprocess.run(["git", "ls-files", PACKAGE], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def missing(wheel: Path, sdist: Path, wanted: set[str]) -> list[str]:
    """Say which files of the package are in neither, and which files of others are in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        here = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as sources:
        there = {name.partition("/")[2] for name in sources.getnames()}
    said = [f"{wheel.name} has no {name}" for name in sorted(wanted - here)]
    said += [f"{wheel.name} has {name}, which git does not know" for name in sorted(here - wanted)]
    return said + [f"{sdist.name} has no {name}" for name in sorted(wanted - there)]


class Environment:
    """A Python that has the wheel, and an empty folder in which its commands run."""

    def __init__(self, folder: Path, requirement: str, **variables: str) -> None:
        self.folder = folder / "work"
        self.folder.mkdir(parents=True)
        venv.create(folder / "venv", with_pip=True)
        self._bin = folder / "venv" / "bin"
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self.variables = {name: value for name, value in os.environ.items() if name not in hidden} | variables
        self.run("pip", "install", "--quiet", requirement)

    def run(self, *words: str, seconds: float = SECONDS) -> str:
        """Run a command; return what it printed. Raises Failed."""
        done = subprocess.run(
            self._line(words), cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=seconds,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    @contextmanager
    def serving(self, *words: str) -> Iterator[str]:
        """Run a command until the block ends; yields the first address that it prints. Raises Failed."""
        process = self.start(*words, output=subprocess.PIPE)
        try:
            assert process.stdout is not None
            printed = ""
            for line in process.stdout:
                printed += line
                if address := re.search(r'http://[^\s"]+', line):
                    yield address[0]
                    break
            else:
                raise Failed(f"{' '.join(words)} printed no address:\n{printed}")
        finally:
            process.terminate()
            process.communicate(timeout=SECONDS)

    def start(self, *words: str, output: IO[str] | int) -> subprocess.Popen[str]:
        """Start a command, which writes all that it prints to `output`."""
        return subprocess.Popen(
            self._line(words), cwd=self.folder, env=self.variables, text=True, stdout=output, stderr=subprocess.STDOUT
        )

    def _line(self, words: Sequence[str]) -> list[str]:
        return [str(self._bin / words[0]), *words[1:]]


def fetched(address: str, *paths: str) -> list[bytes]:
    """What a browser gets at an address, and then at paths of the same server. Raises Failed."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    base = "/".join(address.split("/")[:3])
    try:
        return [browser.open(each, timeout=SECONDS).read() for each in (address, *(base + path for path in paths))]
    except OSError as error:
        raise Failed(f"{address}: {error}") from error


def main_job(bare: Environment, served: Environment) -> Iterator[str]:
    """Do everything that the wheel promises; yield the name of each step that passed. Raises Failed."""
    if bare.run("python", "-c", EMBEDDED) != "Oslo\n":
        raise Failed("an embedded store lost a field")
    yield "an embedded store"
    bare.run("distributed-state", "--archive", "sqlite:///migrated.db", "migrate")
    yield "migrations"
    served.run("distributed-state", "replay", "--kill", "1")
    yield "replay, on a server of a wheel"
    served.run("distributed-state", "demo", "lifecycle")
    yield "demo lifecycle"
    place = ("distributed-state", "--archive", "sqlite:///served.db")
    served.run(*place, "set", "c1", "city", '"Oslo"')
    with served.serving(*place, "inspect") as address:
        page, style, icon = fetched(address, "/inspect/static/inspector.css", "/inspect/static/icon.svg")
        if b"c1" not in page or not style or b"<svg" not in icon:
            raise Failed(f"the inspector's pages lack something:\n{page.decode()}")
    yield "inspect, with its pictures"
    with served.serving(*place, "serve", "--insecure", "--port", "0") as address:
        fetched(address + "/readyz")
    yield "serve"


def main(words: Sequence[str]) -> int:
    """Check the wheel and the sdist of a folder."""
    (wheel,), (sdist,) = (list(Path(words[0]).resolve().glob(each)) for each in ("*.whl", "*.tar.gz"))
    for each in (wheel, sdist):
        print(f"{each.name}: {each.stat().st_size / 1e6:.2f} MB")
    if wrong := missing(wheel, sdist, tracked()):
        print("\n".join(wrong))
        return 1
    with tempfile.TemporaryDirectory() as folder:
        try:
            bare = Environment(Path(folder, "bare"), str(wheel))
            served = Environment(Path(folder, "served"), f"{wheel}[server,serve]")
            for passed in main_job(bare, served):
                print(f"ok: {passed}", flush=True)
        except Failed as failed:
            print(failed)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
