"""Programs and servers that are run beside the library. Law: they use it as any user may."""
