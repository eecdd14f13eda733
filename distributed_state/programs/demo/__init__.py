"""Shows to newcomers, in one terminal, that run for real and verify what they show."""
