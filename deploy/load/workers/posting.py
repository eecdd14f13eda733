"""Inputs that are posted, and whether each was answered once. Law: what fails is posted again under its own id."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import TracebackType

from deploy.load.workers.processes import Began, said
from distributed_state import DurabilityUnknown, Message, StateStore, Unavailable
from distributed_state.programs.servers import wait_until

_AGAIN_SECONDS = 0.1


class Poster:
    """Posts inputs at a constant rate, in turn to some sessions, while the block runs."""

    def __init__(self, store: StateStore, handler: str, rate: float, sessions: int) -> None:
        self.posted: dict[str, list[str]] = {}  # the texts, by session
        self.due: dict[str, float] = {}  # when each text was to be posted, by time.time()
        self._store = store
        self._handler = handler
        self._rate = rate
        self._sessions = sessions
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def _run(self) -> None:
        begin = time.time()
        for number in count():
            at = begin + number / self._rate
            if self._ended.wait(max(0.0, at - time.time())):
                return
            id, text = f"posted-{number % self._sessions}", f"input {number}"
            self.due[text] = at
            self._post(id, text)
            self.posted.setdefault(id, []).append(text)

    def _post(self, id: str, text: str) -> None:
        while True:
            try:
                self._store.session(id).post(said(text), request_id=text, handler=self._handler)
            except (Unavailable, DurabilityUnknown):
                time.sleep(_AGAIN_SECONDS)
            else:
                return

    def __enter__(self) -> Poster:
        self._running = self._pool.submit(self._run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._pool.shutdown()
        if error is None:
            self._running.result()  # raises what it raised

    def pauses(self, found: Sequence[Began], since: float, until: float) -> list[float]:
        """How long the inputs of a time waited until their handler began, in seconds."""
        first = {each.text: each.at for each in reversed(found)}
        return [first[text] - at for text, at in self.due.items() if text in first and since <= at < until]


def unanswered(posted: Mapping[str, Sequence[str]], found: Mapping[str, Sequence[Message]]) -> Iterator[str]:
    """What is wrong with conversations in which each input is to be answered once, in order; `posted` by session."""
    for id, texts in posted.items():
        messages = [(each.role, each.content) for each in found[id]]
        asked = [text for role, text in messages if role == "user"]
        answers = [text for role, text in messages if role == "assistant"]
        if asked != list(texts):
            yield f"{id}: {len(texts)} inputs were posted, and {len(asked)} are there: {asked[:3]}"
        if answers != [f"to {text}" for text in texts]:
            yield f"{id}: {len(texts)} inputs were posted, and {len(answers)} answered: {answers[:3]}"


def wait_for_answers(store: StateStore, posted: Mapping[str, Sequence[str]], seconds: float = 120.0) -> list[str]:
    """Wait until nothing waits in these sessions; what is wrong then."""
    for id in posted:
        wait_until(lambda id=id: not store.session(id).inbox(), f"an input of {id} is not served", seconds)
    found = {id: store.session(id).messages(fresh=True) for id in posted}
    return list(unanswered(posted, found))
