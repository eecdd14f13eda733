"""Where hot, warm and cold meet. Law: there is one read path, one write path and one archiver.

Design: section 4.
"""
