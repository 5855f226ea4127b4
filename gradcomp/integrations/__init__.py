"""Integrations into frameworks that own the training loop. Each module imports its framework, so
import the one you use; the rest of gradcomp imports none of them.
"""
