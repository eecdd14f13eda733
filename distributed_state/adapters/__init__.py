"""Bridges to other frameworks. Law: adapters use only the public interface, and nothing else uses an adapter."""
