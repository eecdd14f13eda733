"""Passwords of servers, keys, and values that are to be encrypted are in no repr, error or log."""

from __future__ import annotations

import base64
import logging
import traceback
from typing import Any

import pytest

from distributed_state import ConfigurationError, Settings, StateError, StateStore
from distributed_state.settings import without_password

pytestmark = pytest.mark.unit

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
