#!/usr/bin/env python
"""Check the commits since the rule began: one change each, described in the imperative.

    python tools/check_commits.py [FIRST]     prints each commit that breaks a rule; exits with 1 if there are any

FIRST is the commit after which commits are checked, by default the one before the rule began.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEFORE_THE_RULE = "894316f44c647a570c9443b1d89973397479ed19"
LONGEST = 140
_PATH = re.compile(r"(?<![\w./])/(?:tmp|work|home|root|Users|mnt|private|var|opt)(?:/|\b)|\b[A-Z]:\\")
_SCRATCH = re.compile(
    r"(?:merge(?:d|:| (?:branch|pull|remote)\b)|(?:fixup|squash|amend)!|fixup\b|wip\b)", re.IGNORECASE
)
# Verbs that end like a past tense, a participle or a third person, and are none of these.
_VERBS = frozenset(
    ("Alias", "Bias", "Bring", "Bypass", "Embed", "Exceed", "Feed", "Focus", "Heed", "Need", "Ping", "Proceed", "Ring",
     "Seed", "Shed", "Shred", "Speed", "String", "Succeed")
)  # fmt: skip


def faults(subject: str) -> list[str]:
    """What is wrong with the subject of a commit; empty if it follows the rules."""
    found = []
    word = subject.split(maxsplit=1)[0] if subject.strip() else ""
    if _SCRATCH.match(subject):
        found.append("is a scratch commit: squash it or name its change")
    elif not re.fullmatch(r"[A-Z][A-Za-z'-]+", word):
        found.append("does not begin with a capitalized verb")
    elif re.search(r"(?:ed|ing|[^s]s)$", word) and word not in _VERBS:
        found.append(f"begins with {word!r}, not with an imperative")
    if subject.endswith("."):
        found.append("ends with a full stop")
    if len(subject) > LONGEST:
        found.append(f"has {len(subject)} characters, more than {LONGEST}")
    if _PATH.search(subject):
        found.append("names a path of a machine")
    return found


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace").stdout


def main(first: str = BEFORE_THE_RULE) -> int:
    """Check the commits after `first`; the number of those that break a rule, at most 1."""
    try:
        log = _git("log", "-z", "--format=%h%x1f%P%x1f%s%x1f%b", f"{first}..HEAD")
    except subprocess.CalledProcessError as error:
        sys.exit(f"git: {error.stderr.strip()}; the history since {first[:12]} is needed, so not a shallow clone")
    broken = 0
    for commit in filter(None, log.split("\0")):
        name, parents, subject, body = commit.split("\x1f")
        wrong = faults(subject)
        if len(parents.split()) > 1:
            wrong.append("is a merge commit: rebase instead")
        if _PATH.search(body):
            wrong.append("names a path of a machine in its text")
        if wrong:
            broken = 1
            print(f"{name} {subject!r}: {'; '.join(wrong)}")
    return broken


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
