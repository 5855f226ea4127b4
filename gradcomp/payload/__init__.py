"""The format of payloads: forms, pieces, layouts, headers, keys of random numbers."""
