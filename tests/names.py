"""Names of records, fields and items that are hard to carry in a path, and a proxy that decodes paths."""

from __future__ import annotations

import http.client
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, unquote_to_bytes, urlsplit

from hypothesis import strategies as st

HARD = (
    *("app/user/id", "table/1", "/", "//", "a/", "/a", ".", "..", "a/../b", "./a", "%2e%2e", "%2F", "%252f", "%"),
    *("%zz", "?a=b", "#", "a?b#c", "a b", "+", "a+b", "&", "=", "=YQ", "~YQ", "~", "-", "_", "base64", "fields"),
    *("\x00", "\n", "\x7f", "\\", "a;b", ":", "acme:a/b", "\ud800", "😀", "é", "e\u0301", "\u202e"),
    *("日本", "\ufffd", "\xff", "x" * 1024, "ä" * 512, "/" * 1024),
)  # fmt: skip
_LETTERS = "ab./%2fFeE?#&=+~-_: ;\\\"'<>\n\x00\x7f\xa0é日\ufffd\ud800\udfff\U0001f600"
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
NAMES = st.sampled_from(HARD) | st.text(_LETTERS, min_size=1, max_size=12).filter(lambda name: not _PAIR.search(name))
"""Names that the library takes: not two surrogates, of which JSON makes one character."""


class DecodingProxy:
    """A proxy that decodes each path and tidies it up, as some do. What must be escaped it escapes again."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        assert target.hostname is not None
        place = target.hostname, target.port

        class Passing(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def passed(self) -> None:
                path, _, query = self.path.partition("?")
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                onward = http.client.HTTPConnection(*place, timeout=30)
                onward.request(self.command, tidied(path) + (f"?{query}" if query else ""), body, dict(self.headers))
                answer = onward.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                onward.close()

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = passed

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Passing)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def tidied(path: str) -> str:
    """A path decoded, without empty parts and parts of dots, escaped as far as it has to be."""
    decoded = unquote_to_bytes(path)
    parts: list[bytes] = []
    for part in decoded.split(b"/"):
        if part == b"..":
            parts = parts[:-1]
        elif part not in (b".", b""):
            parts.append(part)
    tail = b"/" if parts and decoded.endswith(b"/") else b""
    return "/" + quote(b"/".join(parts) + tail, safe="/:@!$&'()*+,;=~")
