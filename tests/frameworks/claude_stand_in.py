#!/usr/bin/env python3
"""Stands in for Claude Code, which needs a key: it answers each prompt with "You said: ..." and keeps transcripts.

Law: of its protocol and its files only what the Agent SDK and our adapter see. A prompt "slowly ..." is answered word
by word, each after a moment; "with a subagent ..." is answered by two agents.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def option(name: str) -> str | None:
    return next((each.partition("=")[2] for each in sys.argv if each.startswith(f"--{name}=")), None)


def send(**frame: Any) -> None:
    print(json.dumps(frame), flush=True)  # noqa: T201 - to the SDK


class Transcript:
    """A file of entries, each of which names the one before it."""

    def __init__(self, path: Path, session: str) -> None:
        self._path = path
        self._session = session
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self._leaf = next((each["uuid"] for each in reversed(entries) if "uuid" in each), None)

    def add(self, *entries: dict[str, Any]) -> None:
        made = [self._entry(each) for each in entries]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in made)
        if "--session-mirror" in sys.argv:
            send(type="transcript_mirror", filePath=str(self._path), entries=made)

    def _entry(self, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["type"] not in ("user", "assistant"):
            return {**entry, "sessionId": self._session}
        parent, self._leaf = self._leaf, str(uuid.uuid4())
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"parentUuid": parent, **entry, "uuid": self._leaf, "timestamp": now, "sessionId": self._session}


def says(text: str) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    return {"id": str(uuid.uuid4()), "role": "assistant", "model": "stand-in", "content": content, "usage": {}}


def answer(session: str, prompt: str, folder: Path) -> None:
    main = Transcript(folder / f"{session}.jsonl", session)
    main.add({"type": "user", "message": {"role": "user", "content": prompt}})
    if prompt.startswith("with a subagent"):
        other = Transcript(folder / session / "subagents" / f"agent-{uuid.uuid4().hex[:8]}.jsonl", session)
        other.add({"type": "user", "message": {"role": "user", "content": prompt}, "isSidechain": True})
        other.add({"type": "assistant", "message": says("Done."), "isSidechain": True})
    text = f"You said: {prompt}"
    for word in re.findall(r"\S+\s*", text):
        if prompt.startswith("slowly"):
            time.sleep(0.02)
        if "--include-partial-messages" in sys.argv:
            event = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
            send(type="stream_event", uuid=str(uuid.uuid4()), session_id=session, event=event)
    message = says(text)
    main.add({"type": "assistant", "message": message}, {"type": "last-prompt", "lastPrompt": prompt})
    send(type="assistant", message=message, session_id=session, uuid=str(uuid.uuid4()))
    numbers = {"duration_ms": 1, "duration_api_ms": 1, "num_turns": 1}
    send(type="result", subtype="success", is_error=False, session_id=session, result=text, **numbers)


def main() -> None:
    session = option("resume") or option("session-id") or str(uuid.uuid4())
    folder = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude") / "projects"
    folder /= re.sub(r"[^a-zA-Z0-9]", "-", str(Path.cwd().resolve()))
    for frame in map(json.loads, sys.stdin):
        if frame["type"] == "control_request":
            response = {"subtype": "success", "request_id": frame["request_id"], "response": {}}
            send(type="control_response", response=response)
        elif frame["type"] == "user":
            answer(session, frame["message"]["content"], folder)


if __name__ == "__main__":
    main()
