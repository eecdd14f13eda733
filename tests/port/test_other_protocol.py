"""A URL with TLS for a server without it, and the reverse. Law: the error says so at once, not after the timeout."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from certificates import signed_certificates

from distributed_state.errors import ConfigurationError, WarmUnavailable
from distributed_state.port.connections import Connections

TIMEOUT = 20.0


@contextmanager
def server(context: ssl.SSLContext | None, *, stopped: bool = False) -> Iterator[str]:
    """As a Redis with TLS, or without: it then waits for the end of what it takes for a command."""

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            if context is None:
                answer(connection)
            else:
                with context.wrap_socket(connection, server_side=True) as within:
                    answer(within)

    def answer(connection: socket.socket) -> None:
        while taken := connection.recv(4096):
            if taken.startswith(b"*") and not stopped:
                connection.sendall(b"-NOAUTH Authentication required.\r\n")

    def listen(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, args=(listener,), daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signed_certificates(tmp_path_factory.mktemp("certificates"))


def with_tls(folder: Path, *, asks: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED if asks else ssl.CERT_NONE
    return context


def refused(url: str, timeout: float = TIMEOUT) -> Exception:
    with pytest.raises((ConfigurationError, WarmUnavailable)) as caught:
        Connections(url, timeout).look()
    return caught.value


@pytest.mark.parametrize("scheme", ["rediss", "rediss+cluster", "rediss+sentinel"])
def test_tls_with_a_server_that_speaks_none_is_an_error_at_once(scheme: str) -> None:
    with server(None) as place:
        began = time.monotonic()
        error = refused(f"{scheme}://{place}{'/main' if 'sentinel' in scheme else ''}")
        assert time.monotonic() - began < TIMEOUT / 2
    assert isinstance(error, ConfigurationError)
    assert f"{place} does not speak TLS" in str(error)
    assert "redis://" in str(error)


@pytest.mark.parametrize("asks", [False, True], ids=["", "with certificates of clients"])
def test_a_plain_url_for_a_server_with_tls_is_an_error_at_once(folder: Path, asks: bool) -> None:
    with server(with_tls(folder, asks=asks)) as place:
        error = refused(f"redis://{place}")
    assert isinstance(error, ConfigurationError)
    assert f"{place} speaks TLS: use rediss://" in str(error)


def test_a_server_that_says_nothing_is_only_unavailable() -> None:
    with server(None, stopped=True) as place:
        for scheme in "redis", "rediss":
            assert isinstance(refused(f"{scheme}://{place}", 1.0), WarmUnavailable)


def test_the_right_url_gets_the_answer_of_the_server(folder: Path) -> None:
    with server(with_tls(folder)) as place:
        error = refused(f"rediss://{place}?ssl_ca_certs={folder}/ca.crt")
    assert "Authentication required" in str(error)
    with server(None) as place:
        assert "Authentication required" in str(refused(f"redis://{place}"))
