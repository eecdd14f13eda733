"""The program of docs/how-to/typescript.md: compiled against the description of a running service, and run in Node."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from docs_pages import ROOT, blocks_of
from serving import served

from distributed_state import StateStore

PAGE = ROOT / "docs" / "how-to" / "typescript.md"
PINNED = "openapi-fetch@0.17 openapi-typescript@7 typescript@5 @types/node@22"


def run(folder: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.fail(f"{program} is missing: install Node.js 20 or newer and npm, or run `bash .ci/run pages`")
    made = tmp_path_factory.mktemp("typescript")
    (made / "package.json").write_text('{"private": true, "type": "module"}')
    quiet = ("--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts")
    run(made, "npm", "install", *quiet, *PINNED.split())
    return made


def test_the_program_of_the_page_is_typed_and_follows_an_answer(folder: Path, servers: Any, tmp_path: Path) -> None:
    place = {"url": servers.redis("valkey").url, "archive": f"sqlite:///{tmp_path}/a.db", "namespace": "typescript"}
    shown = {block.file: block.text for block in blocks_of(PAGE)}
    compiling = next(text for text in (block.text for block in blocks_of(PAGE)) if "tsc --strict" in text)
    reloaded = threading.Event()
    with StateStore.open(**place, stream_interval=0.0) as store, served(**place) as http:

        @store.handler("support")
        def answer(turn: Any) -> None:
            (asked,) = turn.take()
            turn.append(asked.message)
            turn.stream("Rain, ")
            turn.flush()
            reloaded.wait(60)
            turn.stream("then sun.")
            turn.append({"role": "assistant", "content": "Rain, then sun."})

        working = threading.Thread(target=store.work)
        working.start()
        try:
            api = str(http.base_url).rstrip("/")
            run(folder, "npx", "openapi-typescript", f"{api}/v1/openapi.json", "-o", "schema.d.ts")
            (folder / "chat.ts").write_text(shown["chat.ts"])
            compile_only, _ = compiling.split(" && ")
            run(folder, *compile_only.split())
            process = subprocess.Popen(
                ["node", "chat.js"], cwd=folder, env=os.environ | {"API": api}, stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            lines = [process.stdout.readline().strip() for _ in range(3)]
            reloaded.set()
            rest, _ = process.communicate(timeout=60)
        finally:
            reloaded.set()
            store.stop_working()
            working.join(60)
    assert lines == ["attempt 1: version 2, repeated: false", "attempt 2: version 2, repeated: true", "Rain,"]
    assert rest.split("\n") == ["then sun.", "ended", ""]
    assert process.returncode == 0


def test_a_body_that_is_wrong_does_not_compile(folder: Path, servers: Any, tmp_path: Path) -> None:
    """The negative control: the types know the bodies."""
    with served(servers.redis("valkey").url, f"sqlite:///{tmp_path}/b.db", "wrong") as http:
        run(
            folder,
            "npx",
            "openapi-typescript",
            str(http.base_url.join("/v1/openapi.json")),
            "-o",
            "schema.d.ts",
        )
    text = next(block.text for block in blocks_of(PAGE) if block.file == "chat.ts")
    (folder / "wrong.ts").write_text(text.replace('fields: { city: "Oslo" }', "fields: 3"))
    with pytest.raises(AssertionError, match="TS2322"):
        run(
            folder,
            "npx",
            "tsc",
            "--noEmit",
            "--strict",
            "--target",
            "es2022",
            "--module",
            "nodenext",
            "--lib",
            "es2023,dom,dom.asynciterable",
            "wrong.ts",
        )
