"""Where the command `distributed-state` starts, also as `python -m distributed_state`.

Law: Ctrl-C ends it without a traceback also while it is loaded.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Load the command and run it."""
    # Python would show where in an import it was interrupted. `shell` handles the signal once it is there.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from distributed_state.programs.cli import main

    main()


if __name__ == "__main__":
    main()
