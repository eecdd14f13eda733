"""The modules of the package keep the contracts of pyproject.toml, and a module that breaks one is found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import distributed_state

PACKAGE = Path(distributed_state.__file__).parent


def lint(folder: Path) -> tuple[int, str]:
    """What import-linter says of the package in a folder: its exit status and its report."""
    command = (Path(sys.executable).with_name("lint-imports"), "--no-cache")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_modules_keep_the_contracts() -> None:
    status, report = lint(PACKAGE.parent)
    assert status == 0, report


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("values/keys.py", "from distributed_state.port import waited", "Imports point down"),
        ("hot/cache.py", "from distributed_state.warm import link", "Imports point down"),
        ("port/commands.py", "from distributed_state.port import sockets", "in a circle"),
        ("store/doctor.py", "from distributed_state.programs import replay", "Imports point down"),
        ("programs/servers/process.py", "from distributed_state.programs import demo", "Programs stand beside"),
        ("records/record.py", "from distributed_state import StateStore", "public names, which load it"),
        ("adapters/langchain.py", "from distributed_state.errors import StateError", "public names only"),
        ("adapters/agno/records.py", "from distributed_state.adapters import langchain", "do not know one another"),
        ("agents/hooks.py", "from distributed_state.tiers import read", "Agents use the public store"),
        ("programs/logs.py", "import distributed_state.adapters.stores", "Only commands load adapters"),
    ],
)
def test_an_import_that_breaks_a_contract_is_found(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    changed = tmp_path / PACKAGE.name / module
    changed.write_text(f"{changed.read_text()}\n\ndef wrong() -> None:\n    {line}\n")
    status, report = lint(tmp_path)
    assert status == 1, report
    assert any(contract in each and " BROKEN" in each for each in report.splitlines()), report
