"""Full-text search over records: the index that follows the archive, and its queries.

Law: search that is off has no cost.

Design: section 21.
"""
