"""The README is true: its example runs, and its table of settings is the settings."""

from __future__ import annotations

from pathlib import Path

from distributed_state import Settings

README = Path(__file__).parents[2].joinpath("README.md").read_text()


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
