"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2].joinpath("README.md").read_text()


EXAMPLES = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import" in block]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.split("\n")[0])
def test_an_example_runs_as_it_stands(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer pastes a block of Python into a file."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)


def test_the_examples_are_found() -> None:
    assert len(EXAMPLES) >= 3
