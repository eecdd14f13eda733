"""Every block of the documentation runs as it stands, on each API that it is shown for."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from diverging import QUIET, keep, lose
from docs_apis import OnOneApi, in_blocking_words
from docs_blocks import Block, WrongBlock, blocks
from docs_pages import (
    PAGES,
    ROOT,
    OwnServers,
    apis_of,
    blocks_of,
    chosen,
    compiled,
    own_servers,
    reader,
    runs,
    takes_long,
    text_on,
)

from distributed_state import AsyncStateStore


def cases() -> Iterator[Any]:
    """Each page on each of its APIs: what newcomers read first, if it starts no process.

    A wide run has the other pages, each on one API in turn, and a full run both.
    """
    for page, api, found in runs(frameworks=False):
        first = page.parent in (ROOT, ROOT / "docs", ROOT / "docs" / "start")
        apis = apis_of(found)
        turn = apis[zlib.crc32(page.name.encode()) % len(apis)]
        later = pytest.mark.wide if api == turn else pytest.mark.full
        marks = [] if first and not takes_long(found) else [later]
        yield pytest.param(api, found, id=f"{page.relative_to(ROOT)}-{api}", marks=marks)


def a_trip_diverges(own: OwnServers) -> None:
    """Two commits are acknowledged, their server loses them, and the conversation goes on without them."""

    async def happens() -> None:
        place = {"url": own.named_in("redis://localhost"), "archive": own.named_in("postgresql://localhost/agents")}
        async with AsyncStateStore.open(**place, **QUIET) as store:
            session = store.session("trip")
            await session.set("city", "Oslo")

            async def two_commits() -> None:
                await session.set("city", "Bergen")
                await session.set("nights", 2)

            lost = await lose(store, "trip", two_commits)
            await session.set("city", "Narvik")
            await store.admin.archive()
            await keep(store, lost)

    asyncio.run(happens())


# Pages about a thing that a reader cannot cause, and what causes it first.
HAPPENED = {"docs/concepts/epochs.md": a_trip_diverges}


@pytest.mark.parametrize(("api", "found"), list(cases()))
def test_a_page_does_what_it_says(
    api: str, found: list[Block], servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer does what stands there, from top to bottom."""
    monkeypatch.chdir(tmp_path)
    with own_servers(servers.database) as own, reader(api, own) as somebody:
        if found[0].page in HAPPENED:
            HAPPENED[found[0].page](own)
        somebody.read(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_program_of_a_page_compiles(page: Path) -> None:
    """Those that are run nowhere, too; a file that is shown on both APIs is a program on each."""
    for block in blocks_of(page):
        if block.language == "python":
            for api in apis_of([block]):
                compiled(block, text_on(api, block))


# How it is judged: each of these must fail.

PAGE = "# A page\n\n{}\n"


def read(text: str, api: str = "asyncio") -> None:
    """Somebody reads this page. Of a page in tests no server is started."""
    found = blocks("README.md", PAGE.format(text))
    with reader(api, OwnServers(redis=lambda: "redis://nowhere", postgres=lambda: "nothing")) as somebody:
        somebody.read(chosen(found, frameworks=False))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("api", ["asyncio", "blocking"])
def test_a_page_of_all_that_there_is_is_read(api: str, folder: Path) -> None:
    """Names, files, variables, the directory and what is printed go from block to block."""
    text = """
```python both
import asyncio

from distributed_state import AsyncStateStore

store = await AsyncStateStore.open(archive="memory")
await store.session("c1").set("city", "Oslo")
await asyncio.sleep(0)
print((await store.session("c1").get("city")).upper(), "1.25 ms")
```

```text output
OSLO ... ms
```

```python title="deep/program.py"
print("from a file")
```

```sh
cd deep
name=program
```

```sh
python $name.py
```

```text output
from a file
```
"""
    read(text, api)
    assert (folder / "deep/program.py").exists()


def test_a_block_that_fails_fails_the_page(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        read("```python\nx = 1\ny = x / 0\n```")
    assert raised.traceback[-1].lineno == 4, "as the page counts, from 0"
    with pytest.raises(AssertionError, match=r"README\.md:3: ended with 1"):
        read("```sh\nfalse\ntrue\n```")
    with pytest.raises(AssertionError, match=r"README\.md:3: ended with 7"):
        read("```sh\n(exit 7) | cat\n```")
    with pytest.raises(SyntaxError):
        read("```python\nawait something\n```")


def test_other_output_than_is_shown_fails_the_page(folder: Path) -> None:
    for text in ("```python\nprint(2)\n```", "```sh\necho 2\n```"):
        read(text + "\n\n```text output\n2\n```")
        with pytest.raises(AssertionError, match=r"README.md:3: prints\n2\n"):
            read(text + "\n```text output\n1\n```")


UNREACHED = {
    "for x in []:\n    x.there_is_no_such_name": "3 (loop)",
    "while False:\n    pass": "3 (loop)",
    "if False:\n    assert 1 == 2": "4 (assertion)",
    'def f():\n    """Says so."""\n    return 1 / 0': "3 (function)",
    "class A:\n    async def f(self):\n        return 1": "4 (function)",
}


@pytest.mark.parametrize(("program", "named"), UNREACHED.items())
def test_a_loop_a_function_or_an_assertion_that_nothing_runs_fails_the_page(
    program: str, named: str, folder: Path
) -> None:
    line, kind = named.split(" ", 1)
    with pytest.raises(AssertionError, match=rf"never reached: README\.md:{int(line) + 1} {re.escape(kind)}"):
        read(f"```python\n{program}\n```")
    name = "program.py"  # also where it runs in a process of its own
    with pytest.raises(AssertionError, match=rf"never reached: README\.md:{int(line) + 1} {re.escape(kind)}"):
        read(f'```python title="{name}"\n{program}\n```\n\n```sh\npython {name}\n```')


def test_what_only_an_error_would_reach_may_stay_unused(folder: Path) -> None:
    read("```python\ntry:\n    x = 1\nexcept OSError:\n    assert False\n```")
    read("```python\nclass Protocol:\n    def f(self):\n        raise NotImplementedError\n```")


def test_a_file_for_frameworks_is_left_out_without_them() -> None:
    text = """
```python title="always.py"
pass
```

```python title="here.py" frameworks
pass
```

```sh
true
```

```sh frameworks
true
```
"""
    files = [[each.file for each in chosen(blocks("README.md", text), frameworks=there)] for there in (False, True)]
    assert files == [["always.py", None], ["always.py", "here.py", None, None]]


def test_a_block_that_is_not_run_says_why(folder: Path) -> None:
    read("```sh no-run: it needs a cluster\nfalse\n```")
    with pytest.raises(WrongBlock, match=r"README\.md:3: no-run wants its reason"):
        read("```sh no-run:\nfalse\n```")


@pytest.mark.parametrize("first", ["python blocking", "sh both", "bash", "console", "py", "yaml both", "text outputs"])
def test_a_first_line_that_nobody_understands_is_refused(first: str) -> None:
    with pytest.raises(WrongBlock, match=r"README\.md:3: "):
        read(f"```{first}\n1\n```")


def test_output_of_nothing_is_refused() -> None:
    for before in ("", "```yaml\na: 1\n```\n", "```python\n1\n```\nAnd then:\n", "```sh no-run: no\n1\n```\n"):
        with pytest.raises(WrongBlock, match="output stands right behind"):
            read(before + "```text output\n1\n```")


def test_a_block_without_an_end_is_refused() -> None:
    with pytest.raises(WrongBlock, match="has no end"):
        read("```python\n1")


def test_what_a_page_leaves_in_the_background_ends_with_it(folder: Path) -> None:
    read("```sh\nsleep 1000 &\necho $! > pid\n```")
    pid = int((folder / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_servers_and_ports_are_the_pages_own() -> None:
    own = OwnServers(redis=lambda: "redis://r:1", postgres=lambda: "postgresql+psycopg://p/x")
    assert own.named_in("redis://localhost:6379/0 redis://127.0.0.1, redis://host:6379") == (
        "redis://r:1 redis://r:1, redis://host:6379"
    )
    assert own.named_in('"postgresql+psycopg://me:pw@localhost/agents"') == '"postgresql+psycopg://p/x"'
    port = own.port(8080)
    assert own.named_in("curl http://localhost:8080/v1 --port 8080 :8080") == (
        f"curl http://localhost:{port}/v1 --port {port} :8080"
    )
    assert own.port(8081) != port != "8080"


# The blocking text

TEXTS = {
    "async with AsyncStateStore.open() as store:\n    pass\n": "with StateStore.open() as store:\n    pass\n",
    "x = (await a.b(1, c=[2])).d\n": "x = a.b(1, c=[2]).d\n",
    "f((await a.b()).c)\n": "f(a.b().c)\n",
    "f(await a.b())\n": "f(a.b())\n",
    "x = (await a.b() or c)\n": "x = (a.b() or c)\n",
    "print((await a.b())[0])\n": "print(a.b()[0])\n",
    "x = [y async for y in a if await b(y)]\n": "x = [y for y in a if b(y)]\n",
    'x = f"{await a.b(1)} await"\n': 'x = f"{a.b(1)} await"\n',
    'x = "await AsyncRecord"  # await an AsyncRecord here\n': 'x = "await AsyncRecord"  # an Record here\n',
    "import asyncio\n\nasync def main():\n    await a()\n\nasyncio.run(main())\n": "def main():\n    a()\n\nmain()\n",
    "await anext(x)\n": "next(x)\n",
    "import asyncio\n\nawait asyncio.sleep(1)\n": "import time\n\ntime.sleep(1)\n",
}


@pytest.mark.parametrize(("asyncio", "blocking"), TEXTS.items())
def test_a_blocking_text_is_what_somebody_would_write(asyncio: str, blocking: str) -> None:
    assert in_blocking_words(asyncio) == blocking


def test_a_program_of_one_api_is_none_for_both() -> None:
    with pytest.raises(OnOneApi, match="asyncio would be left"):
        in_blocking_words("import asyncio\nawait asyncio.gather(a(), b())\n")
    with pytest.raises(OnOneApi, match="the same on both APIs"):
        in_blocking_words("x = 1\n")


def test_blocks_stand_in_lists_too() -> None:
    found = blocks("a.md", "1. So:\n\n    ```python\n    if x:\n        y\n    ```\n")
    assert found == [
        Block("a.md", 3, 6, "    ", "python", frozenset(), {}, None, "if x:\n    y\n", None),
    ]


@pytest.mark.unit
@pytest.mark.parametrize("page", ["README", "docs/how-to/fastapi", "docs/how-to/gunicorn", "docs/how-to/celery"])
def test_programs_that_ask_a_model_show_its_time(page: str) -> None:
    """Otherwise the history calls a slow turn slow elsewhere."""
    programs = [each.text for each in blocks(page, (ROOT / f"{page}.md").read_text()) if ".turn(" in each.text]
    assert programs
    assert all("with turn.model(" in each for each in programs)
