"""Where the command starts. Law: Ctrl-C ends it without a word also while it is loaded."""

from __future__ import annotations

import signal


def main() -> None:
    """Load the command and run it."""
    # Python would show where in an import it was interrupted. `shell` handles the signal once it is there.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from distributed_state.programs.cli import main

    main()
