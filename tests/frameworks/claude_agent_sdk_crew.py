"""What the processes do that the test of a fleet of Claude's agents kills. Law: a line for each acknowledged turn."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis.asyncio
from claude_agent_sdk import (
    ClaudeAgentOptions,
    SessionStore,
    Transport,
    get_session_messages_from_store,
    project_key_for_directory,
    query,
)
from frameworks.speaking import QUESTION, TTL, Words, begin, fall_silent

from distributed_state import AsyncSession, AsyncStateStore, Stopped
from distributed_state.adapters.claude_agent_sdk import DistributedSessionStore, stream

CLAUDE = Path(__file__).with_name("claude_stand_in.py")
ID = "5f0b3f7e-8f0c-4d8c-9d0a-0f4a1f6f2b11"


def options(sessions: SessionStore, config: str = "", **more: Any) -> ClaudeAgentOptions:
    """Those of a run whose files are in a folder of this worker alone."""
    environment = {"CLAUDE_CONFIG_DIR": config} if config else {}
    return ClaudeAgentOptions(cli_path=CLAUDE, session_store=sessions, env=environment, **more)


async def ask(sessions: SessionStore, prompt: str, config: str, **more: Any) -> list[Any]:
    """The messages of a run."""
    return [message async for message in query(prompt=prompt, options=options(sessions, config, **more))]


async def ask_again(sessions: SessionStore, prompt: str, config: str) -> None:
    """The next turn of the session, or its first."""
    begun = await sessions.load({"project_key": project_key_for_directory(), "session_id": ID})
    await ask(sessions, prompt, config, **({"resume": ID} if begun else {"session_id": ID}))


async def said(sessions: SessionStore) -> list[str]:
    """The texts of the conversation, as the next run would be sent them."""
    found = await get_session_messages_from_store(sessions, ID)
    return [text_of(each.message) for each in found]


def text_of(message: Any) -> str:
    content = message["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


@asynccontextmanager
async def theirs(folder: str, url: str, prefix: str) -> AsyncIterator[SessionStore]:
    """The store on Redis that the SDK's archive has as its example."""
    spec = importlib.util.spec_from_file_location("example", f"{folder}/examples/session_stores/redis_session_store.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as client:
        yield module.RedisSessionStore(client, prefix=prefix)


async def take_turns(me: str, settings: dict[str, Any], folder: str) -> None:
    """Take turns with the others until killed: one on our session, which is held for it, and one on theirs."""
    async with (
        AsyncStateStore.open(**settings) as store,
        theirs(folder, settings["url"], settings["namespace"]) as other,
    ):
        ours = DistributedSessionStore(store)
        with tempfile.TemporaryDirectory() as config:
            for number in range(1_000_000):
                async with ours.session_record(ID).lock(ttl=2, wait=60):
                    await ask_again(ours, f"{me}-{number}", config)
                print(f"ours {me}-{number}", flush=True)  # noqa: T201 - to the test
                await ask_again(other, f"{me}-{number}", config)
                print(f"theirs {me}-{number}", flush=True)  # noqa: T201


# An answer that is streamed


class Speaker(Transport):
    """A process of Claude Code that says these words, in this one."""

    def __init__(self, words: Words, sessions: DistributedSessionStore) -> None:
        self._words = words
        self._asked = asyncio.Event()
        self._requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def connect(self) -> None:
        pass

    async def write(self, data: str) -> None:
        self._requests.put_nowait(json.loads(data))

    async def read_messages(self) -> AsyncIterator[dict[str, Any]]:  # type: ignore[override]
        while True:
            frame = await self._requests.get()
            if frame["type"] == "user":
                break
            response = {"subtype": "success", "request_id": frame["request_id"], "response": {}}
            yield {"type": "control_response", "response": response}
        first, last = str(uuid.uuid4()), str(uuid.uuid4())
        yield _mirror({"type": "user", "uuid": first, "parentUuid": None, "message": frame["message"]})
        said = ""
        async for word in self._words:
            said += word
            event = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
            yield {"type": "stream_event", "uuid": str(uuid.uuid4()), "session_id": ID, "event": event}
        message = {"role": "assistant", "model": "m", "content": [{"type": "text", "text": said}], "usage": {}}
        yield _mirror({"type": "assistant", "uuid": last, "parentUuid": first, "message": message})
        yield {"type": "assistant", "message": message, "session_id": ID}
        numbers = {"duration_ms": 1, "duration_api_ms": 1, "num_turns": 1}
        yield {"type": "result", "subtype": "success", "is_error": False, "session_id": ID, **numbers}

    async def close(self) -> None:
        pass

    def is_ready(self) -> bool:
        return True

    async def end_input(self) -> None:
        pass


def _mirror(*entries: dict[str, Any]) -> dict[str, Any]:
    folder = Path(os.environ["CLAUDE_CONFIG_DIR"]) / "projects" / project_key_for_directory()
    return {"type": "transcript_mirror", "filePath": str(folder / f"{ID}.jsonl"), "entries": [*entries]}


def session(store: AsyncStateStore) -> AsyncSession:
    return DistributedSessionStore(store).session_record(ID)


async def serve(store: AsyncStateStore, words: Words) -> None:
    ours = DistributedSessionStore(store)
    async with session(store).turn(request_id="r", ttl=TTL) as turn:
        await begin(turn, "attempt")
        made = options(ours, include_partial_messages=True, session_store_flush="eager")
        said = stream(turn, query(prompt=QUESTION, options=made, transport=Speaker(words, ours)))
        try:
            async with turn.stoppable():
                async for _ in said:
                    pass
        except Stopped:
            await turn.session.append({"role": "assistant", "content": said.text})
        turn.outcome = said.text


async def kept(store: AsyncStateStore) -> list[str]:
    return [text_of(each.to_dict()) for each in await session(store).messages() if each.role]


async def speak(**arguments: Any) -> None:
    await fall_silent(serve, **arguments)


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"])))
