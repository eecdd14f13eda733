"""`python -m distributed_state` is the command `distributed-state`."""

from distributed_state.programs.start import main

main()
