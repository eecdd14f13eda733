"""A fleet of processes as an operator sees it: the doctor, the log of a worker, a Prometheus with our rules.

Law: every instrument is the one that users have; nothing is asked here that an operator could not ask.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from below import ROOT

from distributed_state.programs.servers import free_port

RULES = ROOT / "deploy" / "observe" / "rules.yml"
COMMAND = [sys.executable, "-m", "distributed_state"]
SECONDS = 15.0
LINE = frozenset(("time", "level", "logger", "message"))


@dataclass
class Fleet:
    """Servers' URLs and the processes that use them."""

    url: str
    archive: str
    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    ops: dict[str, list[int]] = field(default_factory=lambda: {"worker": [], "archiver": []})
    ports: list[int] = field(default_factory=list)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    token: str = ""  # with which turns and pages are asked for; without one, workers serve everybody
    prometheus: str = ""

    @property
    def environment(self) -> dict[str, str]:
        given = {"URL": self.url, "ARCHIVE": self.archive, "NAMESPACE": "told", "PARTITIONS": "4"} | self.settings
        return (
            os.environ
            | {"PYTHONPATH": str(ROOT)}
            | {f"DISTRIBUTED_STATE_{name}": value for name, value in given.items()}
        )

    def start(self, name: str, *words: str, **settings: str) -> subprocess.Popen[bytes]:
        """A process of the command line; what it writes is in `name`.log."""
        environment = self.environment | {f"DISTRIBUTED_STATE_{key}": value for key, value in settings.items()}
        with (self.folder / f"{name}.log").open("ab") as log:
            started = subprocess.Popen(
                [*COMMAND, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        self.processes[name] = started
        return started

    def worker(self, name: str = "worker", *, archives: bool = True) -> None:
        """One that serves, and is ready."""
        port, ops = free_port(), free_port()
        access = "--tokens" if self.token else "--insecure"
        words = ("serve", access, "--port", str(port), "--ops-port", str(ops))
        self.start(name, *words, ARCHIVER=str(archives).lower())
        self.ports.append(port)
        self.ops["worker"].append(ops)
        within(60, lambda: status(f"http://127.0.0.1:{ops}/readyz") == 200, self.text(name))

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def unready(self, name: str, **settings: str) -> int:
        """Another worker, with these settings; its port. It is waited for until it listens, or has ended."""
        port, ops = free_port(), free_port()
        self.start(name, "serve", "--insecure", "--port", str(port), "--ops-port", str(ops), **settings)
        self.ops["worker"].append(ops)
        self._name_targets()
        url, process = f"http://127.0.0.1:{ops}/healthz", self.processes[name]
        within(60, lambda: status(url) == 200 or process.poll() is not None, self.text(name))
        return port

    def archiver(self, name: str = "archiver") -> None:
        """One that archives alone."""
        ops = free_port()
        self.start(name, "archiver", "--metrics-port", str(ops))
        self.ops["archiver"].append(ops)
        within(60, lambda: "archived_partitions 4.0" in scraped(ops), self.text(name))

    def watch(self, stack: ExitStack) -> None:
        """Start a Prometheus with the rules of deploy/observe that scrapes all of them each second."""
        place, port = self.folder / "prometheus", free_port()
        place.mkdir()
        shutil.copy(RULES, place / "rules.yml")
        self._name_targets()
        jobs = [
            {"job_name": job, "file_sd_configs": [{"files": [f"{place}/{job}.json"], "refresh_interval": "1s"}]}
            for job in self.ops
        ]
        every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config = {"global": every, "rule_files": ["rules.yml"], "scrape_configs": jobs}
        (place / "prometheus.yml").write_text(yaml.safe_dump(config))
        with (place / "log").open("wb") as log:
            words = [f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data"]
            words.append(f"--web.listen-address=127.0.0.1:{port}")
            started = subprocess.Popen(["prometheus", *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.processes["prometheus"] = started
        self.prometheus = f"http://127.0.0.1:{port}"
        within(30, lambda: len(self.up()) == sum(map(len, self.ops.values())), lambda: (place / "log").read_text())

    def _name_targets(self) -> None:
        """Have Prometheus scrape each that there is, also who came later."""
        for job, ports in self.ops.items():
            targets = [{"targets": [f"127.0.0.1:{each}" for each in ports]}] if ports else []
            written = self.folder / "prometheus" / f"{job}.new"
            written.write_text(json.dumps(targets))
            written.rename(written.with_suffix(".json"))

    def up(self) -> list[str]:
        """The targets that Prometheus reached."""
        with suppress(httpx.HTTPError, json.JSONDecodeError):  # while it starts
            found = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": "up == 1"}).json()
            return [each["metric"]["instance"] for each in found["data"]["result"]]
        return []

    def alerts(self) -> set[str]:
        """The alerts whose expression holds now, whether or not for long enough to be sent."""
        found = httpx.get(f"{self.prometheus}/api/v1/alerts", timeout=10).json()
        return {each["labels"]["alertname"] for each in found["data"]["alerts"]}

    def holds(self, expression: str) -> list[str]:
        """What Prometheus finds of an expression now, as text; nothing if it does not hold."""
        found = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": expression}, timeout=10).json()
        return [json.dumps(each) for each in found["data"]["result"]]

    def page(self, port: int | None = None) -> list[str]:
        """What the inspector's page of the fleet marks as wrong, as who looks at it reads it."""
        marked = re.findall(r'<(tr|p) class="problem"[^>]*>(.*?)</\1>', self.whole_page(port), re.DOTALL)
        return [html.unescape(" ".join(re.sub("<[^>]*>", " ", text).split())) for _, text in marked]

    def whole_page(self, port: int | None = None) -> str:
        """That page, "" if the worker has ended."""
        with suppress(httpx.HTTPError):
            url = f"http://127.0.0.1:{port or self.ports[0]}/inspect/fleet"
            return httpx.get(url, timeout=15, headers=self.headers).text
        return ""

    def text(self, name: str) -> Any:
        return lambda: (self.folder / f"{name}.log").read_text()

    def logged(self, name: str, after: int = 0) -> list[dict[str, Any]]:
        """The lines of a log, from this one on, that are of a warning or worse; each has to be JSON."""
        whole = (self.folder / f"{name}.log").read_text()
        lines = [json.loads(line) for line in whole[: whole.rfind("\n") + 1].splitlines()]
        return [each for each in lines[after:] if each["level"] in ("WARNING", "ERROR", "CRITICAL")]

    def malformed(self, name: str, after: int = 0, *, fields: frozenset[str] = LINE | {"replica"}) -> list[str]:
        """The lines of a log from this one on that do not say when, how bad, from where and whose, and all noise."""
        whole = (self.folder / f"{name}.log").read_text()
        lines = whole[: whole.rfind("\n") + 1].splitlines()[after:]
        # Errors that nobody took, as asyncio, threads and the interpreter tell of them
        noise = re.compile("never retrieved|never awaited|Exception in thread|Exception ignored|unclosed")
        return [
            line
            for line in lines
            if noise.search(line) or not line.startswith("{") or not fields <= json.loads(line).keys()
        ]

    def doctor(self, settings: dict[str, str] | None = None) -> tuple[int, list[str]]:
        """Its exit code, and what it says of what is not well, if need be with other settings than the fleet's."""
        given = {f"DISTRIBUTED_STATE_{name}": value for name, value in (settings or {}).items()}
        done = subprocess.run(
            [*COMMAND, "doctor", "--json"], capture_output=True, text=True, env=self.environment | given, check=False
        )
        found = [json.loads(line) for line in done.stdout.splitlines()]
        said = [f"{each['name']}: {each['found']}" for each in found if not each["ok"]]
        return done.returncode, said or done.stderr.splitlines()

    def finding(self, name: str) -> list[str]:
        """The doctor's line of this name, with whether it is well; none if there is none."""
        done = subprocess.run([*COMMAND, "doctor", "--json"], capture_output=True, env=self.environment, check=False)
        found = [each for each in map(json.loads, done.stdout.splitlines()) if each["name"] == name]
        return [f"{'well' if each['ok'] else 'bad'}: {each['found']}" for each in found]

    def make_token(self) -> None:
        """Have a token made, with which everything is asked for from now on."""
        words = [*COMMAND, "token", "create", "--all-tenants", "--rights", "read,write,delete,events,admin"]
        done = subprocess.run(words, capture_output=True, text=True, env=self.environment, check=True)
        self.token = done.stdout.strip()

    def close(self) -> None:
        """End what was started, each by itself."""
        for each in self.processes.values():
            if each.poll() is None:
                each.send_signal(signal.SIGCONT)
                each.kill()
                each.wait()


def status(url: str, headers: dict[str, str] | None = None) -> int:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=3, headers=headers).status_code
    return 0


def scraped(ops: int) -> str:
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{ops}/metrics", timeout=3).text
    return ""


def within(seconds: float, condition: Any, said: Any) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)


@contextmanager
def turns(fleet: Fleet) -> Iterator[Counter[int]]:
    """Ten turns a second to the workers, whatever is answered; how often each status was."""
    over = threading.Event()
    answered: Counter[int] = Counter()

    def ask(number: int, client: httpx.Client) -> int:
        url, id = f"http://127.0.0.1:{fleet.ports[number % len(fleet.ports)]}/v1/conversations", f"c{number % 40}"
        body = {"request_id": f"r{number}", "messages": [{"role": "user", "content": "x" * 50_000}]}
        with suppress(httpx.HTTPError):
            answer = client.post(f"{url}/{id}/turns", json=body)
            return client.post(url, json={"id": id}).status_code if answer.status_code == 404 else answer.status_code
        return 0

    def send() -> None:
        number = 0
        with httpx.Client(timeout=2, headers=fleet.headers) as client:
            while not over.wait(0.1):
                number += 1
                answered[ask(number, client)] += 1

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield answered
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class Named:
    """When an instrument named a fault, in seconds from its beginning, and by which words; None if it did not."""

    seconds: float | None
    words: str


def named(
    fleet: Fleet, wanted: dict[str, str], began: float, past: int, *, log: str = "worker", page: int | None = None,
    settings: dict[str, str] | None = None, ways: dict[str, Any] | None = None,
) -> dict[str, Named]:  # fmt: skip
    """How long each instrument takes until it says what it is wanted to say, by instrument.

    That is a regular expression, for `metric` one of Prometheus. Whose log and page, and a doctor with which settings,
    may be said, and other `ways` to ask an instrument for its lines.
    """
    found: dict[str, Named] = {}
    seen: dict[str, list[str]] = {}

    def asked(instrument: str, ask: Any) -> None:
        while time.monotonic() < began + SECONDS + 5 and instrument not in found:
            lines = ask()
            seen[instrument] = lines
            now = time.monotonic() - began
            for line in lines:
                if instrument == "metric" or re.search(wanted[instrument], line):
                    found[instrument] = Named(now, line)
                    return
            time.sleep(0.2)

    def doctor() -> list[str]:
        code, lines = fleet.doctor(settings)
        return lines if code == 1 else []

    instruments = {
        "doctor": doctor,
        "page": lambda: fleet.page(page),
        "log": lambda: [each["message"] for each in fleet.logged(log, past)],
        "metric": lambda: fleet.holds(wanted["metric"]),
        "alert": lambda: sorted(fleet.alerts()),
    } | (ways or {})
    threads = [threading.Thread(target=asked, args=(each, instruments[each])) for each in wanted]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return {
        name: found.get(name, Named(None, " | ".join(seen.get(name, []))[-600:]))
        for name in instruments
        if name in wanted
    }
