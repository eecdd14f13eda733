"""Draw what a replay says as an animated terminal: docs/pictures/replay.svg.

    python tools/replay_picture.py [--into FILE]

It runs `distributed-state replay --kill 3`, so the picture shows what really happened.
"""

from __future__ import annotations

import argparse
import html
import subprocess
import sys
import textwrap
from pathlib import Path

COMMAND = ["distributed-state", "replay", "--kill", "3"]
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "replay.svg"
_WIDTH, _COLUMNS, _LINE = 760, 84, 22
_COLOURS = {"$": "#9ad1d4", "worker": "#f2a65a", " ": "#8fd18f", "verified": "#ffffff"}
_PAUSE = 0.7  # seconds between two lines
_STYLE = """
  text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }
  @media (prefers-reduced-motion: no-preference) {
    text { animation: appear .3s both; }
    @keyframes appear { from { opacity: 0; } to { opacity: 1; } }
  }
"""


def drawn(lines: list[str]) -> str:
    """The SVG of these lines, which appear one after the other."""
    shown = [(line, part) for line in lines for part in _wrapped(line)]
    height = _LINE * len(shown) + 36
    texts, at = [], -_PAUSE
    for number, (line, part) in enumerate(shown):
        at += _PAUSE if part == line or line.startswith(part) else 0.0
        colour = next(colour for start, colour in _COLOURS.items() if line.startswith(start))
        place = f'x="20" y="{34 + _LINE * number}" fill="{colour}" style="animation-delay: {at:.1f}s"'
        texts.append(f"  <text {place}>{html.escape(part)}</text>")
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"  <title>{html.escape(' '.join(COMMAND))}</title>",
        f"  <style>{_STYLE}  </style>",
        f'  <rect width="{_WIDTH}" height="{height}" rx="10" fill="#14232b"/>',
        *texts,
        "</svg>\n",
    ])  # fmt: skip


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, _COLUMNS, subsequent_indent="  ", drop_whitespace=False) or [line]


def said() -> list[str]:
    """What a replay prints of its kills and what it verified."""
    done = subprocess.run(
        [sys.executable, "-m", "distributed_state", *COMMAND[1:]], capture_output=True, text=True, check=True
    )
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    kept = [line for line in lines if line.startswith(("worker ", "  worker ", "verified: "))]
    return [f"$ {' '.join(COMMAND)}", *kept]


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, default=PICTURE, metavar="FILE")
    given = parser.parse_args()
    given.into.write_text(drawn(said()))


if __name__ == "__main__":
    main()
