"""A setting that is misspelt is told from the one that was meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from below import ROOT
from typer.main import get_command

from distributed_state import settings
from distributed_state.errors import ConfigurationError
from distributed_state.programs.cli.shell import _variables, app
from distributed_state.settings import Settings

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("archiv", r"^archiv: there is no such setting; did you mean archive\?$"),
        ("max_stalenes", r"did you mean max_staleness\?$"),
        ("zzz", r"^zzz: there is no such setting$"),
    ],
)
def test_a_misspelt_setting_is_named_with_the_one_that_is_like_it(given: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        Settings.of(**{given: "redis://:secret@host"})
    assert "secret" not in str(caught.value)


# Variables


def test_variables_give_the_settings_that_no_argument_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTED_STATE_PARTITIONS", "8")
    monkeypatch.setenv("distributed_state_archiver", "false")
    monkeypatch.setenv("DISTRIBUTED_STATE_TIMEOUT", "2.5")
    found = Settings.of(timeout=3, retry_for=None)
    assert (found.partitions, found.archiver, found.timeout, found.retry_for) == (8, False, 3.0, 10.0)
    monkeypatch.setenv("DISTRIBUTED_STATE_PARTITIONS", "many")
    with pytest.raises(ConfigurationError, match=r"^partitions: .*integer.*'many'"):
        Settings.of()


# Misspelt variables


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Set these variables, read the settings, and return the logged lines."""

    def read(*names: str, more: Iterable[str] = ()) -> list[str]:
        monkeypatch.setattr(settings, "_warned", set())
        caplog.clear()
        with monkeypatch.context() as patched:
            for name in names:
                patched.setenv(name, "secret")
            settings.warn_of_misspelt(more)
            Settings.of()
        return [each.getMessage() for each in caplog.records]

    return read


def test_a_misspelt_variable_is_named_once_and_without_its_value(warned: Any) -> None:
    (line,) = warned("DISTRIBUTED_STATE_RETRY_FRO")
    assert "DISTRIBUTED_STATE_RETRY_FRO has no effect; did you mean DISTRIBUTED_STATE_RETRY_FOR?" in line
    assert "secret" not in line
    (line,) = warned("DISTRIBUTED_STATE_SERVE_MAX_CONECTIONS", more=_variables(get_command(app)))
    assert line.endswith("did you mean DISTRIBUTED_STATE_SERVE_MAX_CONNECTIONS?")


def test_no_variable_that_has_an_effect_is_taken_for_a_misspelt_one(warned: Any) -> None:
    files = [*(ROOT / "distributed_state").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "docker-compose.yml"]
    written = {name for each in files for name in re.findall(r"DISTRIBUTED_STATE_[A-Z_]*[A-Z]", each.read_text())}
    commands = {*_variables(get_command(app))}
    assert len(written) > 20 < len(commands)
    fields = {f"DISTRIBUTED_STATE_{name.upper()}" for name in Settings.model_fields}
    others = sorted((written | commands) - fields)
    assert warned(*others) == []
    assert warned(*others, more=commands) == []
