"""``python -m gradcomp.doctor``: find problems of these ranks, their machines and their network,
and recommend remedies.
"""
