"""What each adapter costs beside its framework's own store. Law: both do the same, in one run, on the same servers."""
