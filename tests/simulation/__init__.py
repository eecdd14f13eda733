"""A whole fleet in one process, replayed from a seed.

Law: everything that the outside decides is drawn from one generator, so that a run is a function of its seed.

Replicas, servers and SQL are objects of one thread. The product runs unchanged on `SimulatedPort`; who runs next, how
long a message takes, whether an answer arrives, when a server dies and what time it is are drawn from the seed.

    python -m tests.simulation --seed 7 --trace
"""
