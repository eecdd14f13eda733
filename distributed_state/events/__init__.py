"""Lifecycle events: handlers, the fleet's config, the audit. Law: an event is written with the change it describes.

Design: section 12.
"""
