"""``python -m gradcomp.doctor``: what is wrong with these ranks, their machines and their
network, and what to do about it.
"""
