"""The resources of the service, one file each. Law: an operation is one call to the store, or one turn."""
