"""What the processes of LangChain's fleet do until they are killed. Law: a line is printed when a turn was added."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage

from distributed_state import StateStore
from distributed_state.adapters.langchain import DistributedChatMessageHistory

SESSIONS = ("s0", "s1")


def _turns(me: str, settings: dict[str, Any], *, at_once: bool) -> None:
    with StateStore.open(**settings) as store:
        for number in itertools.count():
            id, turn = random.choice(SESSIONS), f"{me}-{number}"
            history = DistributedChatMessageHistory(id, store)
            said = [HumanMessage(turn), AIMessage(turn)]
            for some in [said] if at_once else [[each] for each in said]:
                history.add_messages(some)
            print(id, turn, flush=True)  # noqa: T201 - the pipe to the test
            time.sleep(random.random() * 0.005)


def at_once(me: str, settings: dict[str, Any]) -> None:
    """Each turn is added as a chain adds it: all of its messages in one call."""
    _turns(me, settings, at_once=True)


def one_by_one(me: str, settings: dict[str, Any]) -> None:
    """Each message is added by a call of its own."""
    _turns(me, settings, at_once=False)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"]))
