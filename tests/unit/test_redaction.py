"""Passwords of servers, keys, and values that are to be encrypted are in no repr, error or log."""

from __future__ import annotations

import base64
import logging
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from distributed_state import ConfigurationError, Encryption, KeyRing, Settings, StateError, StateStore
from distributed_state.settings import without_password

KEY = base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2@host:6379/0", "redis://...@host:6379/0"),
        ("redis://user:hun/ter2@host/0", "redis://...@host/0"),
        ("redis://user:hun@ter2@host/0", "redis://...@host/0"),
        ("redis://user:hun?ter2@host/0", "redis://..."),
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
        assert "hun" not in text
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


# Each would end a part of the URL, were it not written with %: the rest of the password would stand where the host,
# the port, the path or the options are read.
PARTS = "aaaa", "bbbb", "cccc"
PASSWORDS = [mark.join(PARTS) for mark in ("@", "@:", "/", "/:@", "?", "#", ":/", "[", "@1/", ":1/", "?x=", "%")]


@pytest.mark.parametrize("password", ["aaaa@bbbb:cccc/dddd", *PASSWORDS])
@pytest.mark.parametrize("port", ["1", "port", "99999"])
def test_no_part_of_a_password_is_repeated(password: str, port: str) -> None:
    """Whether the URL can be read nevertheless or not."""
    for at in (f"u:{password}@127.0.0.1:{port}", f":{password}@127.0.0.1:{port}"):
        for given in (
            {"url": f"redis://{at}/0", "archive": "memory", "retry_for": 0},
            {"archive": f"postgresql://{at}/db"},
            {"archive": f"postgresql+psycopg://{at}/db?connect_timeout=1"},
        ):
            refused(given, password)


def refused(given: dict[str, Any], password: str) -> None:
    with pytest.raises(StateError) as caught:
        StateStore.open(**given)
    error: BaseException | None = caught.value
    while error is not None:
        assert not any(part in f"{error} {error.args}" for part in ("aaaa", "bbbb", "cccc", "dddd"))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if "@" in password:
        assert isinstance(caught.value, ConfigurationError)
        assert "%40" in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"archive": "postgresql://u:hunter2@127.0.0.1:1/db?nonsense=hunter2"},
        {"url": "redis://:hunter2@127.0.0.1:1/0?nonsense=hunter2", "archive": "memory"},
        {"url": "redis://:hunter2@127.0.0.1:1/hunter2", "archive": "memory"},
    ],
    ids=str,
)
def test_what_no_driver_understands_of_a_url_is_refused_at_once(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        StateStore.open(**given)
    assert "hunter2" not in str(caught.value)


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
    assert planned.stdout == "1 records: 2 values and 0 copies in Redis to re-encrypt, 0 records unreadable\n"
    done = command(tmp_path, "reencrypt", KEYS=two)
    assert done.stdout == "1 records: 2 values and 0 copies in Redis re-encrypted, 0 records unreadable\n"
    assert "1 records, 2 values" in done.stderr
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


def test_replacing_keys_ends_cleanly_at_ctrl_c(tmp_path: Path) -> None:
    """What is done is said and stays; the next run does the rest."""
    one, two = KeyRing.parse(f"one:{KEY}"), f"one:{KEY},two:{base64.b64encode(b'2' * 32).decode()}"
    given = {"archive": f"sqlite:///{tmp_path}/a.db", "durability": "memory", "encryption": Encryption(one)}
    with StateStore.open(**given) as store, store.batch() as batch:
        for number in range(500):
            batch.on(store.session(f"s{number}")).set("a", number)
    environment = os.environ | {"DISTRIBUTED_STATE_KEYS": two}
    call = [sys.executable, "-m", "distributed_state", "--archive", f"sqlite:///{tmp_path}/a.db", "reencrypt"]
    pipe = subprocess.PIPE
    with subprocess.Popen(call, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "100 records, 100 values\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    done = int(out.split()[0])
    assert 100 <= done < 500
    rest = int(command(tmp_path, "reencrypt", KEYS=two).stdout.split()[2])
    # Events come last: the 500 of how these records began are still to be done.
    assert 500 - done - 100 <= rest - 500 <= 500 - done, "of the page that was being done, some are"


def test_keys_that_cannot_be_read_are_not_printed(tmp_path: Path) -> None:
    for keys in (KEY, f"one:{KEY[:-4]}", f"one:{KEY}x"):
        refused = command(tmp_path, "get", "s", KEYS=keys)
        assert refused.returncode == 1
        assert "error:" in refused.stderr
        assert KEY[:20] not in refused.stderr
