"""Where hot, warm and cold meet: one read path, one write path, one archiver."""
