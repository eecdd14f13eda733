"""Lifecycle events: handlers, the audit, the fleet's config."""
