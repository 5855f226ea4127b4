"""Tables of codecs in tests: each has every codec of `KINDS`, or names those that it leaves out."""

from gradcomp.codecs import KINDS, resolve


def check_kinds(table, *, without=()):
    """Raise ValueError unless each codec of `KINDS` is in a table or named in `without`, and none
    in both: a new codec must not be left out by accident.

    Args:
        table: codecs, their names, or tuples that begin with one; a list, or a dictionary's values.
        without: names of the codecs that the table leaves out.
    """
    rows = table.values() if isinstance(table, dict) else table
    codecs = (row[0] if isinstance(row, tuple) else row for row in rows)
    absent = {kind.name for kind in KINDS} - {resolve(codec).name for codec in codecs}
    if absent != set(without):
        odd = sorted(absent ^ set(without))
        raise ValueError(f"add {odd} to this table of codecs, or correct without={without!r}")
