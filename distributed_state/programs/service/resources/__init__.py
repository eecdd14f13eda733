"""What is served, a file for each resource. Law: an operation is one call of the store's, or one turn."""
