"""The arithmetic of gradcomp in NumPy, written to be read: what every C kernel must equal."""
