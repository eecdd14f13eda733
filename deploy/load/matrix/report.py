"""What the cells came to, as lines and as Markdown. Law: a missed requirement is never left out."""

from __future__ import annotations

import os
import platform
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from deploy.load.matrix.cells import LEVELS, Cell
from deploy.load.matrix.run import Outcome

_ADDRESS = re.compile(r"^[\d.]+:\d+: ")
_COLUMNS = (
    "fault", "topology", "acknowledged", "lost", "doubled", "hidden", "branched", "quarantined", "detected", "seconds",
    "errors", "kept",
)  # fmt: skip
_SHOWN = 3


def row(outcome: Outcome) -> list[str]:
    """The cells of a line. `lost` names the levels."""
    lost = " ".join(f"{level} {len(tally.lost)}" for level, tally in outcome.levels.items() if tally.lost)
    counts = [str(outcome.count(each)) for each in ("doubled", "hidden", "branched", "quarantined")]
    return [
        outcome.cell.name, outcome.cell.topology, str(outcome.count("acknowledged")), lost or "0", *counts,
        " ".join(outcome.detected) or "-", f"{outcome.gap:.1f}", str(outcome.errors),
        "yes" if not outcome.missed else "NO",
    ]  # fmt: skip


def line(outcome: Outcome) -> str:
    """One cell as it ends, with what it missed."""
    named = " · ".join(f"{name} {value}" for name, value in zip(_COLUMNS[2:-1], row(outcome)[2:-1], strict=True))
    levels = " ".join(f"{level} {tally.acknowledged}" for level, tally in outcome.levels.items())
    head = f"{'kept  ' if not outcome.missed else 'MISSED'} {outcome.cell.name} on {outcome.cell.topology}: {named}"
    tail = [f"       {each}" for each in outcome.missed[:_SHOWN]]
    if len(outcome.missed) > _SHOWN:
        tail.append(f"       and {len(outcome.missed) - _SHOWN} more")
    return "\n".join([f"{head} ({levels}; {outcome.seconds:.0f} s)", *tail])


def sums(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The sums over all cells, and for each level."""
    kept = sum(not each.missed for each in outcomes)
    yield f"{kept} of {len(outcomes)} cells meet the requirements"
    for level in LEVELS:
        tallies = [each.levels[level] for each in outcomes if level in each.levels]
        if tallies:
            counts = {
                name: sum(len(getattr(tally, name)) for tally in tallies)
                for name in ("lost", "doubled", "hidden", "branched", "quarantined", "violations")
            }
            acknowledged = sum(tally.acknowledged for tally in tallies)
            shown = ", ".join(f"{count:,} {name}" for name, count in counts.items())
            yield f"{level}: {acknowledged:,} acknowledged, {shown}"
    if causes := sum((tally.causes for each in outcomes for tally in each.levels.values()), Counter()):
        yield "set aside: " + ", ".join(f"{count:,} because {cause}" for cause, count in causes.most_common(5))


def not_reached(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Levels that were not offered, or at which nothing was acknowledged, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for level, why in outcome.not_reached.items():
            reason = _ADDRESS.sub("", why)  # each cell has servers of its own
            found.setdefault((level, reason), []).append(f"{outcome.cell.name}/{outcome.cell.topology}")
    for (level, why), cells in found.items():
        where = f"{len(cells)} cells" if len(cells) > 1 else cells[0]
        yield f"{level} in {where}: {why}"


def markdown(outcomes: Sequence[Outcome], impossible: Sequence[Cell], command: str) -> str:
    """The table of a run, with what was missed below it."""
    lines = [
        f"`{command}`, {time.strftime('%Y-%m-%d', time.gmtime())}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores.",
        "",
        "|".join(["", *_COLUMNS, ""]),
        "|".join(["", *["---"] * len(_COLUMNS), ""]),
        *("|".join(["", *row(each), ""]) for each in outcomes),
        "",
        *(f"- {each}" for each in sums(outcomes)),
    ]
    if missed := [each for each in outcomes if each.missed]:
        lines += ["", "Missed:", ""]
        lines += [f"- {each.cell.name} on {each.cell.topology}: {_first(each.missed)}" for each in missed]
    if levels := list(not_reached(outcomes)):
        lines += ["", "Levels that were not available:", "", *(f"- {each}" for each in levels)]
    if impossible:
        lines += ["", "Combinations that are not run:", ""]
        lines += [f"- {cell.name} on {cell.topology}: {cell.impossible}" for cell in impossible]
    return "\n".join(lines) + "\n"


def put(file: Path, kind: str, text: str) -> None:
    """Write the table: between the comments `<!-- kind -->` and `<!-- end of kind -->` if the file has them."""
    begin, end = f"<!-- {kind} -->\n", f"<!-- end of {kind} -->"
    old = file.read_text() if file.exists() else ""
    if begin in old and end in old:
        text = f"{old.partition(begin)[0]}{begin}\n{text}\n{end}{old.partition(end)[2]}"
    file.write_text(text)


def _first(missed: Sequence[str]) -> str:
    shown = "; ".join(missed[:_SHOWN])
    return shown if len(missed) <= _SHOWN else f"{shown}; and {len(missed) - _SHOWN} more"
