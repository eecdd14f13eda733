"""`python -m distributed_state` is the command `distributed-state`."""

from distributed_state.programs.cli import main

main()
