"""Signal handlers that raise at any moment, as Celery's soft time limit and Ctrl-C in a notebook do."""

from __future__ import annotations

import subprocess
import sys


def test_writing_a_command_may_be_interrupted_at_any_moment() -> None:
    """In a process of its own, which hiredis ended within the first hundreds (SIGSEGV)."""
    program = """if True:
        import signal
        from distributed_state.port.connections import _Words
        from distributed_state.port.lives import Packer

        class Interrupted(BaseException): ...

        def interrupt(*_):
            raise Interrupted

        signal.signal(signal.SIGALRM, interrupt)
        packer, driver, count = Packer("a-life"), _Words(), 0
        while count < 3000:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00003 + count % 97 * 1e-7)
                while True:
                    packer.pack([(b"EVALSHA", 1, 2, 3, 4, 5, 6, 7, 8, 9)])
                    driver.pack("SELECT", 1)
            except Interrupted:
                count += 1
        print(count)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3000\n"), done.stderr
