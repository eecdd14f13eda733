"""The page about the command line. Law: what `--help` says, and no more."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer.main
from docs_tables import code, table

from distributed_state.programs.cli import shell

NAME = "distributed-state"
_MARKUP = re.compile(r"(?<!\\)\[/?[a-z_ ]*\]")  # of rich


def command_page() -> str:
    """Every command with its help."""
    root = typer.main.get_command(shell.app)
    found = list(commands(root, NAME))
    parts = [
        "# Commands",
        _text(root.help),
        "Options of the program precede the name of the command; options of a command follow it.",
        table(("command", "what it does"), (
            (f"[`{path}`](#{_anchor(path)})", _text(each.help).split("\n\n")[0]) for path, each in found
        )),
        "## Options of the program",
        _parameters(root),
    ]  # fmt: skip
    for path, each in found:
        parts += [f"## `{path}` {{ #{_anchor(path)} }}", f"```text\n{_usage(path, each)}\n```", _text(each.help)]
        parts.append(_parameters(each))
    return "\n\n".join(part for part in parts if part)


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each command under a group, those of groups within it too, by what is typed."""
    for name, each in group.commands.items():
        if each.hidden:
            continue
        typed = f"{path} {name}"
        if hasattr(each, "commands"):
            yield from commands(each, typed)
        else:
            yield typed, each


def _anchor(path: str) -> str:
    return path.removeprefix(f"{NAME} ").replace(" ", "-")


def _usage(path: str, command: Any) -> str:
    given = [each for each in command.params if each.param_type_name == "argument"]
    arguments = [f"[{_shown(each)}]" if not each.required else _shown(each) for each in given]
    return " ".join([path, "[OPTIONS]", *arguments])


def _shown(argument: Any) -> str:
    return f"{argument.metavar or argument.name.upper()}{'...' if argument.nargs == -1 else ''}"


def _parameters(command: Any) -> str:
    rows = []
    for each in command.params:
        if getattr(each, "hidden", False) or each.name in ("install_completion", "show_completion"):
            continue
        if each.param_type_name == "argument":
            typed = code(_shown(each))
        else:
            typed = ", ".join(map(code, [*each.opts, *each.secondary_opts]))
        rows.append((typed, _default(each), code(each.envvar or ""), _text(getattr(each, "help", ""))))
    return table(("given", "default", "environment", "what it is"), rows) if rows else ""


def _default(parameter: Any) -> str:
    default = parameter.default
    if parameter.required:
        return "required"
    if default is None or default is False or callable(default) or default in ((), [], ""):
        return ""
    return code(getattr(default, "value", default))


def _text(help: str | None) -> str:
    """The help as Markdown: rich's markup is none here."""
    return _MARKUP.sub("", inspect.cleandoc(help or "")).replace("\\[", "[").replace("\f", "")
