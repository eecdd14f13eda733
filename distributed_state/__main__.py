"""Where the command `distributed-state` starts, also as `python -m distributed_state`.

Law: Ctrl-C ends the command without a traceback, even while its modules are imported.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Load the command and run it."""
    # During the imports Python would print a traceback. Once `shell` is imported, it handles the signal.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "opperator" in sys.argv:
        # An agent reads its config and logs its status on these. Until it runs they would end the process.
        for name in ("SIGHUP", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda *_: None)
    from distributed_state.programs import logs
    from distributed_state.programs.cli import main

    if not sys.stderr.isatty():
        logs.take_uncaught()
    main()


if __name__ == "__main__":
    main()
