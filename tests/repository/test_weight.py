"""What a program loads before it uses anything, counted in modules: time belongs to the benchmark."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

HEAVY = {"redis", "fakeredis", "sqlalchemy", "alembic", "pydantic", "tenacity", "cryptography"}
COMMAND = "import sys; from distributed_state.programs.cli import main; sys.argv = ['distributed-state', *{words}]"
LEAN = "import sys; sys.modules['prometheus_client'] = None; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def loaded_by(code: str) -> set[str]:
    """The modules that a new interpreter has once it has run `code`, beyond those it begins with."""
    report = "import atexit, sys; before = set(sys.modules); atexit.register("
    report += "lambda: print('loaded:', *(set(sys.modules) - before)))\n"
    done = run(report + code)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].removeprefix("loaded: ").split())


def own(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "distributed_state"}


def test_importing_the_package_loads_the_package_alone() -> None:
    loaded = loaded_by("import distributed_state")
    assert own(loaded) == {"distributed_state"}
    assert not HEAVY & loaded
    assert len(loaded) <= len(loaded_by("import redis")) / 10


def test_using_the_store_loads_what_it_needs_and_no_more() -> None:
    """The probe finds what is loaded; and neither agents nor the embedded server are needed to open a store."""
    loaded = loaded_by("from distributed_state import StateStore")
    assert {"redis", "sqlalchemy", "pydantic"} <= loaded
    assert not {"fakeredis", "alembic", "typer", "distributed_state.agents"} & loaded


def test_a_remote_store_is_loaded_where_its_url_is_opened_and_nowhere_else() -> None:
    """A store of one's own loads none of it, on both APIs; the second probe finds what there is."""
    own_store = "from distributed_state import AsyncStateStore, StateStore; "
    own_store += "StateStore.open(archive='memory').close(); AsyncStateStore.open(archive='memory')"
    own_store += "\nassert not [name for name in sys.modules if name.startswith('distributed_state.remote')]\n"
    at_a_url = "AsyncStateStore.open('http://127.0.0.1:1')"
    assert {"httpx", "distributed_state.remote.store"} <= loaded_by(own_store + at_a_url)


def test_an_error_costs_no_more_than_itself() -> None:
    loaded = loaded_by("from distributed_state import Conflict, Fenced")
    assert own(loaded) == {"distributed_state", "distributed_state.errors"}


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        *(pytest.param(words, marks=pytest.mark.wide) for words in (["--version"], ["send", "--help"])),
        *(pytest.param(words, marks=pytest.mark.wide) for words in (["archiver", "--help"], ["serve", "-h"])),
    ],
    ids=" ".join,
)
def test_help_is_shown_without_the_libraries_of_the_store(words: list[str]) -> None:
    loaded = loaded_by(COMMAND.format(words=words) + "; main()")
    # Typer itself may check options by pydantic; the first screen has none to check.
    assert not (HEAVY if words == ["--help"] else HEAVY - {"pydantic"}) & loaded
    places = {name.split(".")[1] for name in own(loaded) if "." in name}
    assert places == {"errors", "programs", "values"}, "the last for the names of rights"


@pytest.mark.wide
def test_a_command_that_needs_a_store_loads_one() -> None:
    """What the help does without is what the probe would have found."""
    loaded = loaded_by(COMMAND.format(words=["--archive", "memory", "sessions"]) + "; main()")
    assert {"redis", "fakeredis", "sqlalchemy", "distributed_state.store.blocking"} <= loaded


def test_without_orjson_the_import_says_what_to_do() -> None:
    """The state of a Python for which it has no wheel; with it, all other tests here import the package."""
    refused = run("import sys; sys.modules['orjson'] = None; import distributed_state")
    assert refused.stderr.splitlines()[-1].startswith(
        "ModuleNotFoundError: distributed_state needs orjson, which has no"
    )
    assert "pip install orjson" in refused.stderr


@pytest.mark.parametrize("name", ["fakeredis", "lupa"])
def test_without_the_embedded_server_a_store_on_a_server_opens(name: str, servers: Any) -> None:
    """As on a Python for which there are no wheels of it; an embedded store names the extra."""
    lean = f"import sys; sys.modules[{name!r}] = None; from distributed_state import StateStore\n"
    url = servers.redis("valkey").url
    opened = run(
        f"{lean}with StateStore.open({url!r}, archive='memory', namespace='lean-{name}') as store:\n"
        "    print(store.session('s').set('n', 1))"
    )
    assert opened.stdout == "1\n", opened.stderr
    refused = run(lean + "StateStore.open(archive='memory')").stderr.splitlines()[-1]
    assert f"ConfigurationError: the embedded server needs {name}, which is not installed" in refused
    assert "pip install 'distributed-state[embedded]'" in refused


@pytest.mark.wide
def test_without_prometheus_all_but_metrics_works() -> None:
    done = run(LEAN + "from distributed_state import *; import distributed_state, pydoc; print(Conflict)")
    assert (done.stdout, done.stderr) == ("<class 'distributed_state.errors.Conflict'>\n", "")
    shown = run(LEAN + "import distributed_state; help(distributed_state)")
    assert shown.stderr == ""
    assert "class StateStore" in shown.stdout
    refused = run(LEAN + "from distributed_state import metrics")
    assert refused.stderr.splitlines()[-1].endswith("pip install 'distributed-state[telemetry]'")


def test_metrics_are_offered_by_the_package() -> None:
    from distributed_state import metrics

    assert metrics.__name__ == "distributed_state.store.metrics"
    assert callable(metrics.collector)
