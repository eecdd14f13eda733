"""What is measured at several sizes: one module for each curve."""
