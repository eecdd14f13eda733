"""The rules for the subjects of commits, which `.ci/run` checks."""

from __future__ import annotations

import pytest
from check_commits import LONGEST, faults

pytestmark = pytest.mark.unit


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
