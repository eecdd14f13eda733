"""The agent of the chat demo: the handler of its sessions. `distributed-state work` runs it in each worker.

Law: all that it knows of a conversation is in the turn, so that any worker may give the next answer.
"""

from __future__ import annotations

import asyncio
import os
import re

from distributed_state import AsyncStateStore, AsyncTurn, Stopped

HANDLER = "answer"
NAME, PAUSE = "CHAT_WORKER", "CHAT_PAUSE"  # in the environment: the worker's name, seconds between two words


def opened() -> AsyncStateStore:
    """The store with its handler, on the servers of the environment."""
    store = AsyncStateStore.open()
    name, pause = os.environ[NAME], float(os.environ[PAUSE])

    @store.handler(HANDLER)
    async def answer(turn: AsyncTurn) -> None:
        """Answer the message that waits longest. If the worker dies, another one begins the answer again."""
        (given,) = turn.take(turn.inbox[0].number)
        await turn.stream({"worker": name})
        said = ""
        try:
            async with turn.stoppable():
                for word in scripted(given.number):  # from a model
                    said += word
                    await turn.stream(word)
                    await asyncio.sleep(pause)
        except Stopped:
            said += "(stopped)"
        turn.append(given.message, {"role": "assistant", "name": name, "content": said})

    return store


ANSWERS = (
    "Oslo is lovely in June, and it is light until late. Take the ferry from the harbour to Hovedøya in the morning, "
    "swim on the south side of the island, and look at the ruins of the monastery. In the afternoon walk up the roof "
    "of the opera house, and from there along the water to the Munch museum. In the evening sit at Vippa, where a "
    "dozen kitchens share one hall, and watch the boats come in. If it rains, the National Museum has room for a day.",
    "For Bergen, take the morning train. The line climbs from the fjord to the high plain at Finse, where snow lies "
    "until July, and comes down again through forty tunnels; sit on the left. In Bergen stay near Bryggen, go up "
    "Fløyen on foot and come down by the funicular, and eat fish soup at the market. Keep one day for the boat to "
    "Mostraumen, and take a coat: it rains on two days out of three, and the third one is worth it.",
    "Two nights in each city are enough for a first visit, with the train between them as a day of its own. Book the "
    "train early, the hotels a month ahead, and nothing else: museums rarely sell out, and the weather decides "
    "better than a plan. Bring shoes for wet stone, a swimsuit, and a card, because few places take cash. With an "
    "evening to spare, take the tram to Ekeberg and see the city from where Munch painted the sky.",
)


def scripted(number: int) -> list[str]:
    """The words of an answer, as a model would stream them: to an input with this number."""
    return re.findall(r"\S+\s*", ANSWERS[(number - 1) % len(ANSWERS)] + " ")
