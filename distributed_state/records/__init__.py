"""What is done with one record, through a handle."""
