"""The fault matrix: what is broken, at which durability level, on which topology, and what became of each write.

`python -m deploy.load.matrix` runs it, `python -m deploy.load.matrix.soak` for an hour at random. Law: what is
acknowledged is noted outside the process that wrote it, and read back by one that wrote nothing.
"""
