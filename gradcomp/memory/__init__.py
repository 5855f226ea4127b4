"""State that a rank keeps between steps: residuals, second moments, states of transforms, and the
format of their checkpoints.
"""
