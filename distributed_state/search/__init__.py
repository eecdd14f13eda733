"""Full-text search over records: the index that follows the archive, and its queries. Law: while off, it costs nothing.

Design: section 21.
"""
