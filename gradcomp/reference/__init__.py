"""The arithmetic in NumPy, written to be read; only tests and benchmark checks import it."""
