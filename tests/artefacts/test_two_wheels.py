"""Two releases as built wheels, each in an environment of its own, on the same servers while turns arrive.

Law: each turn is sent once, to a worker that is ready; none fails, is lost or is doubled, whichever release serves it.
"""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from itertools import cycle
from pathlib import Path

import pytest
from below import ROOT, until
from check_artefacts import Environment, Failed
from later_releases import later_release, replaced

from deploy.load.client import Client, Target
from distributed_state import StateStore
from distributed_state.programs.servers import free_port, redis_server

pytestmark = pytest.mark.timeout(600)  # three environments are installed
IDS = ("a", "b", "c")
BESIDE = ("pyproject.toml", "README.md", "LICENSE")  # what a wheel is built of, beside the package
CLIENTS = 4
TURNS = 60  # that are served before the next step


def last_release(folder: Path) -> None:
    """The sources of the newest tag before this commit; before the first tag those of the working tree."""
    # A commit that is released has a tag itself.
    describe = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^"]
    tag = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    if tag:
        line = ["git", "archive", tag, "distributed_state", *BESIDE]
        archived = subprocess.run(line, cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
            archive.extractall(folder, filter="data")
    else:
        sources(folder)


def sources(folder: Path, *steps: str, version: str | None = None) -> None:
    """The sources of the working tree, with further migrations and as another version if they are given."""
    later_release(folder, *steps)
    for name in BESIDE:
        text = (ROOT / name).read_text()
        if name == "pyproject.toml" and version is not None:
            text = replaced(r'^version = ".*"$', f'version = "{version}"', text)
        (folder / name).write_text(text)


def wheel(folder: Path) -> Path:
    """Build a wheel of sources."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "dist", folder]
    subprocess.run(build, check=True)
    (built,) = (folder / "dist").glob("*.whl")
    return Path(built)


class Releases:
    """The last release, the next one, whose migration expands the tables, and one whose migration contracts them."""

    def __init__(self, folder: Path) -> None:
        last_release(folder / "old")
        sources(folder / "new", "next", version="98.0.0")
        sources(folder / "contracting", "next", "last", version="99.0.0")
        self.old, self.new, self.contracting = (
            Environment(folder / "installed" / name, f"{wheel(folder / name)}[postgres,serve]")
            for name in ("old", "new", "contracting")
        )


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    return Releases(tmp_path_factory.mktemp("releases"))


class Served:
    """A worker of a release that serves HTTP."""

    def __init__(self, release: Environment, target: Target, log: Path) -> None:
        self.target, self.log = target, log
        with log.open("w") as output:
            words = ("serve", "--insecure", "--port", str(target[1]))
            self.process = release.start("distributed-state", *words, output=output)

    async def stop(self) -> None:
        """End it in order."""
        self.process.terminate()
        await until(lambda: self.process.poll() is not None, 60)
        assert self.process.returncode == 0, self.log.read_text()


class Fleet:
    """Clients that send turns without a pause, to the workers that are ready."""

    def __init__(self, url: str, archive: str, folder: Path, stack: ExitStack) -> None:
        self.url, self.archive = url, archive
        self.targets = [("127.0.0.1", free_port()) for _ in range(3)]
        self.said: dict[str, dict[int, str]] = {id: {} for id in IDS}  # the text of each turn, by its version
        self.failed: list[str] = []
        self._client = Client(self.targets, tries=1)
        self._folder, self._stack = folder, stack
        self._started: list[Served] = []

    @property
    def served(self) -> int:
        """How many turns were acknowledged."""
        return sum(map(len, self.said.values()))

    async def start(self, release: Environment, place: int) -> Served:
        """Start a worker, and wait until turns are sent to it."""
        log = self._folder / f"worker-{len(self._started)}.log"
        worker = Served(release, self.targets[place], log)
        self._started.append(worker)
        self._stack.callback(worker.process.wait)
        self._stack.callback(worker.process.kill)
        await until(lambda: worker.target not in self._client._out or worker.process.poll() is not None, 60)
        assert worker.process.poll() is None, log.read_text()
        return worker

    async def go_on(self) -> None:
        """Until more turns were served, or failed."""
        wanted = self.served + TURNS
        await until(lambda: self.served >= wanted or self.failed, 60)

    @asynccontextmanager
    async def balanced(self) -> AsyncIterator[None]:
        """Look which workers are ready while the block runs."""
        with closing(self._client):
            balancing = asyncio.create_task(self._client.balance())
            await until(lambda: len(self._client._out) == len(self.targets))
            yield
            balancing.cancel()
            await asyncio.wait([balancing])

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Send turns while the block runs; at its end each was answered."""
        for id in IDS:
            status, answer = await self._client.request("POST", "/v1/conversations", {"id": id})
            assert status == 201, answer
        ended = asyncio.Event()
        clients = [asyncio.create_task(self._turns(me, ended)) for me in range(CLIENTS)]
        try:
            yield
        finally:
            ended.set()
            await asyncio.gather(*clients)

    async def _turns(self, me: int, ended: asyncio.Event) -> None:
        for number, id in enumerate(cycle(IDS)):
            if ended.is_set():
                return
            text = f"{me} {number}"
            turn = {"messages": [{"role": "user", "content": text}]}
            try:
                status, answer = await self._client.request("POST", f"/v1/conversations/{id}/turns", turn)
            except (OSError, TimeoutError) as error:
                self.failed.append(repr(error))
                await asyncio.sleep(0.05)  # a worker that is gone refuses at once
                continue
            if status == 200:
                self.said[id][answer["version"]] = text
            else:
                self.failed.append(f"{status} {answer}")

    def check(self, url: str) -> None:
        """Everything that was acknowledged is there: in order, and once."""
        with StateStore.open(url, archive=self.archive, namespace="n") as store:
            store.admin.archive()
            assert not [each for each in store.admin.doctor() if not each.ok and each.name.startswith("partition")]
            for id in IDS:
                versions = sorted(self.said[id])
                assert versions == list(range(2, len(versions) + 2)), "the first one is that of the conversation"
                session = store.session(id)
                assert [message.content for message in session.messages()] == [self.said[id][at] for at in versions]
                assert [change.version for change in session.history()] == [1, *versions]


@contextmanager
def fleet_of(url: str, releases: Releases, archive: str, folder: Path) -> Iterator[Fleet]:
    """A fleet without workers, on migrated tables of the last release."""
    for release in (releases.old, releases.new, releases.contracting):
        release.variables |= {
            "DISTRIBUTED_STATE_URL": url,
            "DISTRIBUTED_STATE_ARCHIVE": archive,
            "DISTRIBUTED_STATE_NAMESPACE": "n",
        }
    releases.old.run("distributed-state", "migrate")
    with ExitStack() as stack:
        yield Fleet(url, archive, folder, stack)


def test_two_wheels_serve_beside_one_another_and_the_new_one_is_taken_back(
    releases: Releases, postgres_url: str, tmp_path: Path
) -> None:
    """Tables are expanded beside the old worker; an autoscaler then starts an old one, the only one at the end."""

    async def steps(fleet: Fleet) -> None:
        async with fleet.balanced():
            first = await fleet.start(releases.old, 0)
            async with fleet.load():
                await fleet.go_on()
                await asyncio.to_thread(releases.new.run, "distributed-state", "migrate")
                new = await fleet.start(releases.new, 1)
                await fleet.go_on()
                await first.stop()
                await fleet.go_on()
                scaled = await fleet.start(releases.old, 2)
                await fleet.go_on()
                await new.stop()
                await asyncio.to_thread(releases.old.run, "distributed-state", "migrate")
                await fleet.go_on()
                again = await fleet.start(releases.old, 0)
                await fleet.go_on()
            await scaled.stop()
            await again.stop()

    with redis_server() as server:
        with fleet_of(server.url, releases, postgres_url, tmp_path) as fleet:
            asyncio.run(steps(fleet))
        assert not fleet.failed
        assert fleet.served >= 6 * TURNS
        fleet.check(server.url)
        server.stop()
    with redis_server() as empty:
        fleet.check(empty.url)  # from SQL alone


def test_a_contraction_names_the_workers_that_are_too_old_and_afterwards_they_are_refused(
    releases: Releases, postgres_url: str, tmp_path: Path
) -> None:
    async def steps(fleet: Fleet) -> None:
        async with fleet.balanced():
            await asyncio.to_thread(releases.new.run, "distributed-state", "migrate")
            late = [await fleet.start(releases.old, 0), await fleet.start(releases.new, 1)]
            async with fleet.load():
                await asyncio.to_thread(releases.contracting.run, "distributed-state", "migrate")
                last = await fleet.start(releases.contracting, 2)
                await fleet.go_on()
                with pytest.raises(Failed) as refused:
                    await asyncio.to_thread(releases.contracting.run, "distributed-state", "migrate", "--contract")
                message = " ".join(str(refused.value).split())
                assert "workers older than 99 need what would be removed; replace them first: " in message
                assert all(f"process {worker.process.pid} on " in message for worker in late)
                assert f"process {last.process.pid} on " not in message
                await fleet.go_on()
                for worker in late:
                    await worker.stop()
                await asyncio.to_thread(releases.contracting.run, "distributed-state", "migrate", "--contract")
                await fleet.go_on()
                with pytest.raises(Failed) as refused:
                    await asyncio.to_thread(releases.new.run, "distributed-state", "serve", "--insecure", "--port", "0")
                message = " ".join(str(refused.value).split())
                assert "needs quarantine.of_the_next: install the newer release that removed it" in message
                await fleet.go_on()
            await last.stop()

    with redis_server() as server:
        with fleet_of(server.url, releases, postgres_url, tmp_path) as fleet:
            asyncio.run(steps(fleet))
        assert not fleet.failed
        fleet.check(server.url)


def test_a_worker_that_is_killed_instead_fails_turns(releases: Releases, postgres_url: str, tmp_path: Path) -> None:
    """The negative control: clients of this fleet repeat nothing and find out late, so they notice it."""

    async def steps(fleet: Fleet) -> None:
        async with fleet.balanced():
            first, second = await fleet.start(releases.old, 0), await fleet.start(releases.old, 1)
            async with fleet.load():
                await fleet.go_on()
                assert not fleet.failed
                first.process.kill()
                await until(lambda: fleet.failed)
            await second.stop()

    with redis_server() as server, fleet_of(server.url, releases, postgres_url, tmp_path) as fleet:
        asyncio.run(steps(fleet))
