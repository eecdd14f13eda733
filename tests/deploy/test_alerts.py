"""Each alert says what was seen, with units, and leads to a runbook whose commands exist."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any

import pytest
import redis
import sqlalchemy
import typer
import yaml
from below import ROOT
from docs_blocks import blocks
from typer.testing import CliRunner

from distributed_state import StateStore
from distributed_state.programs.cli import shell
from distributed_state.programs.servers import RedisServer

PAGE = (ROOT / "docs/running/alerts.md").read_text()
SITE = yaml.safe_load((ROOT / "tools/site.yml").read_text())["site_url"]
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load((ROOT / "deploy/observe/rules.yml").read_text())["groups"]
    for rule in group["rules"]
}
UsageError = typer.BadParameter.__mro__[1]  # of click, which newer releases of Typer contain
RUNBOOKS: dict[str, str] = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE))
GIVEN = {"ID": "c1", "NEW": "c2", "BRANCH": "3-9f2c01ab", "TOKEN": "7"}  # the words that a reader replaces

each_alert = pytest.mark.parametrize("name", RULES)
each_runbook = pytest.mark.parametrize("name", RUNBOOKS)


def commands(runbook: str) -> list[list[str]]:
    """The words of each command, without the comment that says what to look for."""
    lines = [line for block in blocks("alerts.md", runbook) for line in block.text.splitlines()]
    assert all(re.search(r"\S +# \S", line) for line in lines), "each command says what to look for"
    return [shlex.split(line.partition(" | grep ")[0], comments=True) for line in lines]


def inside(words: list[str]) -> tuple[str, list[str]]:
    """The program that a command runs at last, and its words: in a container, and in the shell there."""
    if words[:3] == ["docker", "compose", "exec"]:
        words = words[4:]
    if words[:2] == ["sh", "-c"]:
        words = shlex.split(words[2])
    return words[0], words[1:]


def checked(words: list[str]) -> None:
    """Raise if there is no such command, option or service."""
    if words[0] == "distributed-state":
        command: Any = typer.main.get_command(shell.app)
        rest = [GIVEN.get(word, word) for word in words[1:]]
        while hasattr(command, "commands") and rest and rest[0][0] != "-":
            command = command.commands[rest.pop(0)]
        command.make_context(command.name, rest).close()
        return
    if words[:2] == ["docker", "start"]:  # which containers, another command lists
        return checked(shlex.split(" ".join(words[2:]).removeprefix("$(").removesuffix(")")))
    assert words[:2] == ["docker", "compose"], words
    given = compose().parse_args(words[2:])
    scaled = [given.scale.partition("=")[0]] if getattr(given, "scale", None) else []
    assert {*given.services, *scaled} <= SERVICES.keys(), words
    assert words[2] != "up" or scaled, "`up` also stops those above the number that .env says"
    assert words[2] != "exec" or inside(words)[0] in ("valkey-cli", "psql"), words


def compose() -> argparse.ArgumentParser:
    """The commands and options of `docker compose` that runbooks use."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    several = parser.add_subparsers(required=True)
    for name, flags, values in (
        ("ps", ["--all", "--quiet"], []), ("logs", [], ["--since"]),
        ("up", ["-d", "--no-deps", "--no-recreate"], ["--scale"]),
    ):  # fmt: skip
        one = several.add_parser(name, exit_on_error=False)
        for each in flags:
            one.add_argument(each, action="store_true")
        for each in values:
            one.add_argument(each)
        one.add_argument("services", nargs="+")
    one = several.add_parser("exec", exit_on_error=False)
    one.add_argument("services", nargs=1)
    one.add_argument("command", nargs=argparse.REMAINDER)
    return parser


@pytest.mark.unit
def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    assert RUNBOOKS.keys() == RULES.keys()
    assert list(RUNBOOKS) == list(RULES), "in the order of the rules"


@pytest.mark.unit
@each_alert
def test_an_alert_leads_to_its_runbook(name: str) -> None:
    assert RULES[name]["annotations"]["runbook_url"] == f"{SITE}running/alerts/#{name.lower()}"


@pytest.mark.unit
@each_runbook
def test_a_runbook_says_how_bad_it_is_what_to_run_and_when_to_wake_somebody(name: str) -> None:
    text = RUNBOOKS[name]
    meaning, *rest = [each for each in text.strip().split("\n\n") if each]
    assert meaning[0].isupper()
    assert [each for each in rest if each.startswith("**How bad:** ")], "how bad it is"
    assert rest[-1].startswith("**Wake somebody** "), "when to wake somebody"
    assert len(commands(text)) == 3


@pytest.mark.unit
@each_runbook
def test_the_commands_of_a_runbook_exist(name: str) -> None:
    for words in commands(RUNBOOKS[name]):
        checked(words)


@pytest.mark.unit
@pytest.mark.parametrize(
    "line",
    [
        "distributed-state docter", "distributed-state replicas --roles archiver", "distributed-state end-lease ID",
        "docker compose logs --since 10m workers", "docker compose ps --every worker", "docker compose exec redis sh",
        "docker compose up -d --no-deps --no-recreate --scale archivers=4 archiver",
        "docker compose up -d --no-deps --no-recreate archiver", "docker compose ps --all workers",
        "docker start $(docker compose ps --all --quiet workers)",
    ],
)  # fmt: skip
def test_a_command_that_does_not_exist_would_be_found(line: str) -> None:
    with pytest.raises((KeyError, AssertionError, UsageError, SystemExit)):
        checked(shlex.split(line))


def test_the_commands_for_the_servers_work(servers: Any, postgres_url: str) -> None:
    """Those of valkey-cli and psql, as Valkey and PostgreSQL take them."""
    with StateStore.open(archive=postgres_url):
        pass  # makes the tables
    engine = sqlalchemy.create_engine(postgres_url)
    server: RedisServer = servers.redis("valkey")
    tried = set()
    with redis.Redis.from_url(server.url) as client, engine.connect() as connection:
        for words in [words for text in RUNBOOKS.values() for words in commands(text)]:
            program, rest = inside(words)
            if program == "psql":
                connection.execute(sqlalchemy.text(rest[rest.index("-c") + 1]))
            elif program == "valkey-cli":
                asked = rest[rest.index("--no-auth-warning") + 1 :]
                if asked[:2] != ["CONFIG", "SET"]:  # which would change the server of other tests
                    client.execute_command(*asked)
            tried.add(program)
    engine.dispose()
    assert {"psql", "valkey-cli"} <= tried


def test_the_commands_for_the_fleet_end_as_they_should(
    servers: Any, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fleet of one replica; exit code 1 of `doctor` is a finding."""
    url = servers.redis("valkey").url
    monkeypatch.setenv("DISTRIBUTED_STATE_URL", url)
    monkeypatch.setenv("DISTRIBUTED_STATE_ARCHIVE", postgres_url)
    monkeypatch.setenv("DISTRIBUTED_STATE_NAMESPACE", "runbooks")
    found = {
        tuple(words[1:]) for text in RUNBOOKS.values() for words in commands(text) if words[0] == "distributed-state"
    }
    with StateStore.open(url, archive=postgres_url, namespace="runbooks") as store:
        store.session("c1").set("city", "Oslo")
        for words in sorted(found):
            if {*words} & {"NEW", "TOKEN"}:
                continue  # they need a branch, and a lease
            done = CliRunner().invoke(shell.app, [GIVEN.get(word, word) for word in words])
            assert done.exit_code in ((0, 1) if words == ("doctor",) else (0,)), (words, done.output)
            assert "Traceback" not in done.output


@pytest.mark.unit
@each_alert
def test_every_number_in_an_alert_has_a_unit(name: str) -> None:
    assert unitless(RULES[name]["annotations"]["summary"]) == []


@pytest.mark.unit
def test_a_number_without_a_unit_would_be_found() -> None:
    assert unitless("seen: {{ $value }}") == unitless("{{ $value }}, and more") == ["{{ $value }}"]
    assert unitless("{{ $value | humanizeDuration }}") == unitless("{{ $value }} hosts") == []


def unitless(summary: str) -> list[str]:
    """The numbers of a summary that are neither a duration or a share nor followed by what they count."""
    return [
        value
        for value, after in re.findall(r"(\{\{ \$value[^}]*\}\})(.{0,2})", summary)
        if not re.search(r"humanize(Duration|Percentage)", value) and not re.fullmatch(r" [a-z]", after)
    ]


@pytest.mark.unit
def test_maintenance_silences_what_a_planned_restart_causes_and_no_loss() -> None:
    (rule,) = yaml.safe_load((ROOT / "deploy/observe/alertmanager.yml").read_text())["inhibit_rules"]
    assert rule == {
        "source_matchers": ['alertname="Maintenance"'],
        "target_matchers": ['maintenance="silences"'],
    }
    assert "Maintenance" in RULES
    silenced = {name for name, each in RULES.items() if each["labels"].get("maintenance") == "silences"}
    assert {"InstanceDown", "WorkerNotReady", "NobodyServes", "ReplicaLost", "SqlDown", "RedisRefusing"} <= silenced
    lost = {"RedisLostData", "CommitsDiverged", "Quarantined", "ArchiveDiverged", "PartitionLagging", "Resyncs"}
    refused = {"RedisFull", "RedisMemory", "WritesRefusedForBackpressure", "JournalNearlyFull", "JournalFullSoon"}
    assert not (lost | refused | {"Maintenance"}) & silenced


@pytest.mark.unit
def test_no_alert_says_what_another_one_says() -> None:
    summaries = [rule["annotations"]["summary"] for rule in RULES.values()]
    meanings = [text.strip().split("\n\n")[0] for text in RUNBOOKS.values()]
    assert len({*summaries}) == len(summaries)
    assert len({*meanings}) == len(meanings)
