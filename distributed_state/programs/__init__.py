"""Programs and servers that run next to the library. Law: they use only its public interface."""
