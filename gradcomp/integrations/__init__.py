"""Frameworks that own the training loop. Each module imports its framework, so import the one
you use; nothing else imports them.
"""
