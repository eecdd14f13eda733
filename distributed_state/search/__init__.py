"""Finding what records say: the index that follows the archive, and what is asked of it. Law: off, it costs nothing.

Design: section 21.
"""
