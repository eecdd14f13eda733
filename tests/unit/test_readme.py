"""The README is true: its example runs, and its table of settings is the settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed_state import Settings

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


def settings_table() -> str:
    """The settings as the README shows them."""
    lines = ["| setting | default | |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = f"{field.default:,}" if type(field.default) is int else repr(field.default).replace("'", '"')
        lines.append(f"| `{name}` | `{default}` | {field.description} |")
    return "\n".join(lines)


def test_every_setting_is_documented_with_its_default() -> None:
    """The table in the README is made from the settings."""
    assert settings_table() in README
