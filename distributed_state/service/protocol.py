"""A connection of a client. Law: what the parser leaves open ends here: endless heads, upgrades, broken pipelines."""

from __future__ import annotations

from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from distributed_state.service.streaming import TRANSPORT


class Protocol(HttpToolsProtocol):
    """A connection that a request can break off. `head` is how many bytes a request's line and headers may have."""

    def __init__(self, *given: Any, head: int, **options: Any) -> None:
        super().__init__(*given, **options)
        self._head, self._unfinished = head, 0
        self._asked: deque[RequestResponseCycle] = deque()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state: dict[str, Any] = {**self.app_state, TRANSPORT: transport}

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn tells only the last request of a pipeline; the one that runs would go on writing.
        for cycle in self._asked:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unfinished += len(data)
        while data:
            data = self._parsed(data)
        # The parser keeps a head until it is whole, however long it gets.
        if self._unfinished > self._head and not self.transport.is_closing():
            self._refuse(f"A request's line and headers have at most {self._head} bytes.")

    def _parsed(self, data: bytes) -> bytes:
        """Hand it to the parser; what is to be parsed after that."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as asked:
            if self.parser.get_method() != b"CONNECT":
                return self._without_upgrade() + data[asked.args[0] :]
            self._refuse("This is no proxy.")
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")
        return b""

    def _without_upgrade(self) -> bytes:
        """The head again, for a new parser: this one takes what follows for another protocol, and the body is lost.

        A server may ignore the header (RFC 9110, 7.8); Java's HttpClient asks every server for h2c.
        """
        words = [self.parser.get_method(), self.url, b"HTTP/" + self.parser.get_http_version().encode()]
        lines = [b" ".join(words), *(b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade")]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"\r\n"])

    def _refuse(self, why: str) -> None:
        self.logger.warning(why)
        self.send_400_response(why)

    # What the parser tells

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        if self.parser.should_upgrade():
            return  # it comes once more, without that
        super().on_headers_complete()
        while self._asked and self._asked[0].response_complete:
            self._asked.popleft()
        self._asked.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
