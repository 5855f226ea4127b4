"""The bytes and where they stand: forms, pieces, layouts, headers, random numbers."""
