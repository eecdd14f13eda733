"""Bridges to other frameworks. Law: an adapter uses what any program may use, and nothing here uses an adapter."""
