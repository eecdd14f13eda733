"""The code that combines hot, warm and cold. Law: there is one read path, one write path and one archiver.

Design: section 4.
"""
