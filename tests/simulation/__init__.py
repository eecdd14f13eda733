"""A whole fleet in one process, replayed from a seed.

Law: one generator decides everything that the outside would decide, so that a run is a function of its seed.

Replicas, servers and SQL are objects in one thread. The product runs unchanged on `SimulatedPort`. The seed decides
which task runs next, how long a message takes, whether an answer arrives, when a server dies and what time it is.

    python -m tests.simulation --seed 7 --trace
"""
