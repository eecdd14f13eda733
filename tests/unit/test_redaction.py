"""Passwords of servers, keys, and values that are to be encrypted are in no repr, error or log."""

from __future__ import annotations

import base64
import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from distributed_state import ConfigurationError, Settings, StateError, StateStore
from distributed_state.settings import without_password

KEY = base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2@host:6379/0", "redis://...@host:6379/0"),
        ("redis://user:hun/ter2@host/0", "redis://...@host/0"),
        ("redis://user:hun@ter2@host/0", "redis://...@host/0"),
        ("redis://host:1/0?password=hunter2", "redis://host:1/0?..."),
        ("postgresql+psycopg://u:hunter2@host/db", "postgresql+psycopg://...@host/db"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
        ("memory", "memory"),
        ("hunter2@host", "..."),
    ],
)
def test_settings_are_shown_without_passwords(url: str, shown: str) -> None:
    settings = Settings.of(url=url, archive=url)
    for text in (repr(settings), str(settings), f"{settings}"):
        assert "ter2" not in text
        assert f"url='{shown}'" in text
        assert f"archive='{shown}'" in text
    assert without_password(url) == shown
    assert settings.url == url, "only what is shown changes"


@pytest.mark.parametrize(
    "given",
    [
        {"url": "redis://:hunter2@localhost:1/0", "archive": "memory", "retry_for": 0},
        {"url": "redis://:hunter2@localhost:1/0", "archive": "memory", "op_window": 1},
        {"url": "redis://:hunt/hunter2@localhost:1/0", "archive": "memory"},
        {"url": "redis://:hunt@hunter2/@localhost:1/0", "archive": "memory"},
        {"url": "redis:hunter2@localhost", "archive": "memory"},
        {"url": "http://:hunter2@localhost", "archive": "memory"},
        {"url": "redis://:hunter2@localhost:1/0"},
        {"url": ["hunter2"], "archive": "memory"},
        {"archive": "postgresql://u:hunter2@localhost:1/db"},
        {"archive": "postgresql://u@localhost:1/db?password=hunter2"},
        {"archive": "postgresql://u:hunter2@localhost:1/db?sslmode=nonsense"},
        {"archive": "postgrsql://u:hunter2@localhost:1/db"},
        {"archive": "hunter2@localhost"},
        {"archive": {"password": "hunter2"}},
        {"passwrod": "hunter2"},
    ],
    ids=str,
)
def test_no_error_of_opening_repeats_a_password(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(StateError) as caught:
        StateStore.open(**given)
    shown = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in shown
    assert "hunter2" not in caplog.text


def test_a_setting_that_is_no_secret_is_repeated() -> None:
    with pytest.raises(ConfigurationError, match=r"durability: .* \(given 'nonsense'\)"):
        Settings.of(durability="nonsense")


def command(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line as a user runs it."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("DISTRIBUTED_STATE_")}
    given = {f"DISTRIBUTED_STATE_{name}": text for name, text in environment.items()}
    call = [sys.executable, "-m", "distributed_state", "--archive", f"sqlite:///{folder}/a.db", "--log-level", "debug"]
    return subprocess.run([*call, *words], env=clean | given, capture_output=True, text=True, check=False, timeout=60)


def test_the_command_line_reads_writes_and_replaces_keys(tmp_path: Path) -> None:
    one, two = f"one:{KEY}", f"one:{KEY},two:{base64.b64encode(b'2' * 32).decode()}"
    assert command(tmp_path, "set", "s", "ssn", '"123-45"', KEYS=one).returncode == 0
    refused = command(tmp_path, "get", "s", "ssn")
    assert refused.returncode == 1
    assert "field 'ssn' is encrypted with key 'one' and this store has no keys" in " ".join(refused.stderr.split())
    assert command(tmp_path, "get", "s", "ssn", KEYS=one).stdout == '"123-45"\n'
    planned = command(tmp_path, "reencrypt", "--dry-run", KEYS=two)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout == "1 records: 1 values and 0 copies in Redis to encrypt anew, 0 records unreadable\n"
    done = command(tmp_path, "reencrypt", KEYS=two)
    assert done.stdout == "1 records: 1 values and 0 copies in Redis encrypted anew, 0 records unreadable\n"
    assert "1 records, 1 values" in done.stderr
    assert command(tmp_path, "reencrypt", KEYS=two).stdout.startswith("1 records: 0 values and 0 copies")
    only = two.partition(",")[2]
    keys = tmp_path / "keys"
    keys.write_text(f"# from November on\n{only}\n")
    assert command(tmp_path, "get", "s", "ssn", KEY_FILE=str(keys)).stdout == '"123-45"\n'
    lost = command(tmp_path, "reencrypt", KEYS=one)
    assert lost.returncode == 1
    assert "1 records unreadable" in lost.stdout
    assert "no keys" in command(tmp_path, "reencrypt").stderr
    for each in (refused, planned, done, lost):
        assert KEY not in each.stdout + each.stderr
        assert "123-45" not in each.stdout + each.stderr


def test_keys_that_cannot_be_read_are_not_printed(tmp_path: Path) -> None:
    for keys in (KEY, f"one:{KEY[:-4]}", f"one:{KEY}x"):
        refused = command(tmp_path, "get", "s", KEYS=keys)
        assert refused.returncode == 1
        assert "error:" in refused.stderr
        assert KEY[:20] not in refused.stderr
