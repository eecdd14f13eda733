"""The rules for the subjects of commits, which `.ci/run` checks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import check_commits
import pytest
from check_commits import LONGEST, faults, main


@pytest.mark.unit
@pytest.mark.parametrize(
    "subject",
    [
        "Refuse a phase longer than 200 characters",
        "Process events in the order of their arrival",
        "Need no second round trip for a batch",
        "Re-encrypt blocks in SQL",
        "Merge the two tables of names",
        "JSON-encode items once",
        "Ping the server before a lease is renewed",
    ],
)
def test_a_subject_in_the_imperative_is_accepted(subject: str) -> None:
    assert faults(subject) == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        ("Merge: review round 3", "scratch"),
        ("fixup", "scratch"),
        ("WIP: leases", "scratch"),
        ("Fixed the archiver", "imperative"),
        ("Fixing the archiver", "imperative"),
        ("Fixes the archiver", "imperative"),
        ("fix the archiver", "capitalized"),
        ("Fix: the archiver", "capitalized"),
        ("Merge branch 'main' into fix", "scratch"),
        ("Read files of /tmp", "path"),
        ("Fix the archiver.", "full stop"),
        ("Read /tmp/trees/a/notes", "path"),
        ("Say " + "a" * LONGEST, "characters"),
    ],
)
def test_another_subject_is_refused(subject: str, reason: str) -> None:
    assert any(reason in fault for fault in faults(subject))


def git(place: Path, *arguments: str) -> str:
    known = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    run = subprocess.run(["git", *known, "-C", str(place), *arguments], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def commit(place: Path, *texts: str) -> str:
    git(place, "commit", "-q", "--allow-empty", *(f"--message={each}" for each in texts))
    return git(place, "rev-parse", "HEAD")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    git(tmp_path, "init", "-q", "-b", "main")
    monkeypatch.setattr(check_commits, "ROOT", tmp_path)
    return tmp_path


def test_good_commits_after_the_first_pass_whatever_came_before(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(place, "wip")
    first = commit(place, "fixup")
    commit(place, "Add a test", "It says why.")
    assert main(first) == 0
    assert capsys.readouterr().out == ""


def test_each_commit_that_breaks_a_rule_is_printed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = commit(place, "Begin")
    git(place, "switch", "-q", "-c", "other")
    commit(place, "Add a test", "See /tmp/notes.")
    git(place, "switch", "-q", "main")
    commit(place, "Added a test.")
    git(place, "merge", "-q", "--no-ff", "-m", "Take both", "other")
    assert main(first) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for reason in ("names a path of a machine in its text", "ends with a full stop", "is a merge commit"):
        assert sum(reason in line for line in lines) == 1


def test_a_history_without_the_first_commit_is_an_error(place: Path) -> None:
    commit(place, "Begin")
    with pytest.raises(SystemExit, match="not a shallow clone"):
        main("0" * 40)
