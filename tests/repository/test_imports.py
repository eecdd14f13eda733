"""The modules of the package keep the contracts of pyproject.toml, and a module that breaks one is found."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

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


# A line that a module may not have, the contract that it breaks, and what the report of that contract shows.
WRONG = [
    ("values/keys.py", "from distributed_state.port import waited", "Imports point down", "values.keys -> "),
    ("hot/cache.py", "from distributed_state.warm import link", "Imports point down", "hot.cache -> "),
    (
        "port/commands.py",
        "from distributed_state.port import sockets",
        "in a circle",
        "allowed in distributed_state.port.",
    ),
    ("store/doctor.py", "from distributed_state.programs import replay", "Imports point down", "store.doctor -> "),
    ("programs/servers/process.py", "from distributed_state.programs import demo", "Programs stand", "process -> "),
    ("records/record.py", "from distributed_state import StateStore", "public names, which", "records.record -> "),
    ("adapters/langchain.py", "from distributed_state.errors import StateError", "public names only", "langchain -> "),
    ("adapters/agno/records.py", "from distributed_state.adapters import langchain", "do not know", "agno.records -> "),
    ("agents/hooks.py", "from distributed_state.tiers import read", "Agents use", "agents.hooks -> "),
    (
        "programs/logs.py",
        "import distributed_state.adapters.stores",
        "Only commands load adapters",
        "programs.logs -> ",
    ),
]


def test_an_import_that_breaks_a_contract_is_found(tmp_path: Path) -> None:
    """Each of them, in one copy of the package: a report takes a second."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    for module, line, _, _ in WRONG:
        changed = tmp_path / PACKAGE.name / module
        changed.write_text(f"{changed.read_text()}\n\ndef wrong() -> None:\n    {line}\n")
    status, report = lint(tmp_path)
    assert status == 1, report
    # Below its title each broken contract shows the imports that break it, on lines as wide as a terminal.
    titled = re.split(r"\n(.+)\n-{10,}\n", report.partition("Broken contracts")[2])
    shown = dict(zip(titled[1::2], titled[2::2], strict=True))
    for module, _, contract, found in WRONG:
        (broken,) = (text for title, text in shown.items() if contract in title)
        assert found in " ".join(broken.split()), f"{module}: {report}"
