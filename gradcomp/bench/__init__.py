"""Measurements of gradcomp: ``python -m gradcomp.bench NAME`` (demo, codec, ratio).

Importing this package imports none of them; every benchmark needs the extra ``bench`` (rich,
matplotlib, scikit-learn).
"""
