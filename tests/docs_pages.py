"""The pages of the documentation, run as a reader runs them. Law: in a folder of their own, on servers of their own."""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import io
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from below import server_binary
from docs_apis import in_blocking_words
from docs_blocks import Block, WrongBlock, blocks

from distributed_state import AsyncStateStore, StateStore
from distributed_state.programs.servers import redis_server

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.joinpath("docs").rglob("*.md"))]
APIS = ("asyncio", "blocking")

# Servers that a page names by where they usually are. It gets its own in their place.
REDIS = re.compile(r"redis://(?:localhost|127\.0\.0\.1)(?::6379)?(?:/\d+)?(?![\w.:])")
POSTGRES = re.compile(r"postgresql(?:\+psycopg)?://(?:\w+(?::\w+)?@)?(?:localhost|127\.0\.0\.1)(?::5432)?/\w+")
PORT = re.compile(r"(?:(?<=localhost:)|(?<=127\.0\.0\.1:)|(?<=port[ =]))(?:80\d\d|9464)\b")
SECONDS = 60  # for one block of the shell


def blocks_of(page: Path) -> list[Block]:
    return blocks(str(page.relative_to(ROOT)), page.read_text())


def chosen(found: list[Block], *, frameworks: bool) -> list[Block]:
    """Those to run here, and the files that they use; with frameworks, of pages that need them all, else none."""
    kept = [each for each in found if (each.file or each.runs) and (frameworks or "frameworks" not in each.words)]
    wanted = any(each.runs and (not frameworks or "frameworks" in each.words) for each in kept)
    return kept if wanted else []


def runs(*, frameworks: bool) -> Iterator[tuple[Path, str, list[Block]]]:
    """Each page that has something to run here, once on each of its APIs."""
    for page in PAGES:
        try:
            kept = chosen(blocks_of(page), frameworks=frameworks)
        except WrongBlock:
            continue  # the test of all pages names it
        for api in apis_of(kept) if kept else ():
            yield page, api, kept


def apis_of(found: list[Block]) -> tuple[str, ...]:
    """A page is run once on each API that it is written for."""
    return APIS if any("both" in each.words for each in found) else APIS[:1]


def takes_long(found: list[Block]) -> bool:
    """Whether a page starts processes: the shell's, or servers."""
    return any(
        each.runs and (each.language == "sh" or REDIS.search(each.text) or POSTGRES.search(each.text)) for each in found
    )


def text_on(api: str, block: Block) -> str:
    both = "both" in block.words and api == "blocking"
    return in_blocking_words(block.text) if both else block.text


def compiled(block: Block, text: str) -> Any:
    """The program, with the page's own lines in its errors."""
    return _compiled(block, ast.parse("\n" * block.first + text))


def _compiled(block: Block, tree: ast.Module) -> Any:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if "both" in block.words and block.file is None else 0
    return compile(tree, str(ROOT / block.page), "exec", flags=flags, dont_inherit=True)


class Reached(ast.NodeTransformer):
    """Marks each loop's body, each function's body and each assertion of a page, and finds those that nothing ran.

    Code that never runs cannot fail. Handlers of errors may stay unused. A mark leaves a file in a folder, since some
    programs of a page run in processes of their own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kinds: dict[str, str] = {}
        folder.mkdir(exist_ok=True)

    def marked(self, block: Block, text: str) -> ast.Module:
        """The program, which notes what it reaches."""
        self._page = block.page
        return ast.fix_missing_locations(self.visit(ast.parse("\n" * block.first + text)))

    def unreached(self) -> dict[str, str]:
        """Where each part is that nothing ran, and what it is."""
        return {place: kind for place, kind in self._kinds.items() if not self._noted(place).exists()}

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        return node

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return [self._mark(node, "assertion"), node]

    def _visit_body(self, node: Any) -> Any:
        self.generic_visit(node)
        text = [isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in node.body]
        program = [each for each, is_text in zip(node.body, text, strict=True) if not is_text]
        if not all(isinstance(each, ast.Raise) for each in program):  # such as a stub
            kind = "loop" if isinstance(node, ast.For | ast.AsyncFor | ast.While) else "function"
            node.body.insert(int(text[0]), self._mark(node, kind))
        return node

    visit_For = visit_AsyncFor = visit_While = visit_FunctionDef = visit_AsyncFunctionDef = _visit_body

    def _mark(self, node: ast.stmt, kind: str) -> ast.stmt:
        place = f"{self._page}:{node.lineno}"
        self._kinds[place] = kind
        note = ast.parse(f"__import__('pathlib').Path({str(self._noted(place))!r}).touch()").body[0]
        return ast.copy_location(note, node)

    def _noted(self, place: str) -> Path:
        return self._folder / place.replace("/", "+")


class OwnServers:
    """What stands in for the servers that a page names, each started when it is named first."""

    def __init__(self, redis: Callable[[], str], postgres: Callable[[], str]) -> None:
        self._start = {"redis": redis, "postgres": postgres}
        self._found: dict[str, str] = {}

    def named_in(self, text: str) -> str:
        """The same text with the page's own servers and ports."""
        text = REDIS.sub(lambda match: self._of("redis"), text)
        text = POSTGRES.sub(lambda match: self._of("postgres"), text)
        return PORT.sub(lambda match: self.port(int(match[0])), text)

    def port(self, usual: int) -> str:
        """A free port in the place of a usual one."""
        return self._of(str(usual))

    def _of(self, name: str) -> str:
        if name not in self._found:
            self._found[name] = self._start.get(name, _free_port)()
        return self._found[name]


@contextmanager
def own_servers(databases: Callable[[], str]) -> Iterator[OwnServers]:
    """What a page needs, gone afterwards. Databases are those of the run's server."""
    with ExitStack() as stack:

        def redis() -> str:
            return stack.enter_context(redis_server(binary=server_binary("valkey"))).url

        yield OwnServers(redis, databases)


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


class Reader:
    """Somebody who does what a page says, block after block, in the present directory."""

    def __init__(self, api: str, servers: OwnServers) -> None:
        self.api, self.servers = api, servers
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self._reached = Reached(Path(".reached").absolute())
        self._shells: list[int] = []
        self._runner: asyncio.Runner | None = None

    def read(self, found: list[Block]) -> None:
        for block in found:
            text = self.servers.named_in(text_on(self.api, block))
            if block.file is not None:
                path = Path(block.file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(ast.unparse(self._reached.marked(block, text)) if block.language == "python" else text)
                continue
            printed = self._shell(block, text) if block.language == "sh" else self._python(block, text)
            if block.output is not None:
                expect(block, self.servers.named_in(block.output), printed)
        unreached = self._reached.unreached()
        assert not unreached, f"never reached: {', '.join(f'{where} ({kind})' for where, kind in unreached.items())}"

    def _python(self, block: Block, text: str) -> str:
        code = _compiled(block, self._reached.marked(block, text))
        with redirect_stdout(io.StringIO()) as printed:
            if code.co_flags & inspect.CO_COROUTINE:
                self._awaited(eval(code, self.names))
            else:
                exec(code, self.names)
        return printed.getvalue()

    def _awaited(self, coroutine: Any) -> None:
        if self._runner is None:
            self._runner = asyncio.Runner()
        self._runner.run(coroutine)

    def _shell(self, block: Block, text: str) -> str:
        """What it prints. Variables and the directory stay for the next block, and so does what it put behind."""
        state = Path(".shell").absolute()
        script = f"""
            set -aeuo pipefail
            [ ! -f {state} ] || . {state}
            trap '{{ export -p; printf "cd %q\\n" "$PWD"; }} >{state}' EXIT
        """
        own = {name: value for name, value in os.environ.items() if not name.startswith("DISTRIBUTED_STATE_")}
        own |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(Path.cwd()),
            "DISTRIBUTED_STATE_SERVE_PORT": self.servers.port(8080),  # of a service to which no port is given
        }
        command = ["bash", "-c", script + text]
        # Into files: what is left in the background would keep a pipe open.
        with open(".stdout", "w") as stdout, open(".stderr", "w") as stderr:
            shell = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=own, start_new_session=True
            )
        self._shells.append(shell.pid)
        status = shell.wait(SECONDS)
        printed = Path(".stdout").read_text()
        assert status == 0, f"{block.where}: ended with {status}\n{printed}\n{Path('.stderr').read_text()}"
        return printed

    def close(self) -> None:
        """End what the page left running, as the end of its program does."""
        for value in self.names.values():
            if isinstance(value, AsyncStateStore) and self._runner is not None:
                self._runner.run(value.close())
            elif isinstance(value, StateStore):
                value.close()
        if self._runner is not None:
            self._runner.close()
        for group in self._shells:
            _end(group)


@contextmanager
def reader(api: str, servers: OwnServers) -> Iterator[Reader]:
    """A reader, gone with what was started."""
    with ExitStack() as stack:
        stack.enter_context(_importing_from(Path.cwd()))
        found = Reader(api, servers)
        stack.callback(found.close)
        yield found


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """A program finds the files of its page, as one that `python` starts does."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if folder in Path(getattr(module, "__file__", None) or "/").parents:
                del sys.modules[name]


def _end(group: int) -> None:
    """End what a shell left in the background; whoever is not gone soon is killed."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.02)
        os.killpg(group, signal.SIGKILL)


def expect(block: Block, shown: str, printed: str) -> None:
    """What is shown is what was printed; `...` stands for anything."""
    printed = textwrap.dedent(printed)  # as the page's own text is
    want, got = (re.sub(r"[ \t]+$", "", each, flags=re.MULTILINE).strip() + "\n" for each in (shown, printed))
    told = f"{block.where}: prints\n{got}and the page shows\n{want}"
    assert doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS), told
