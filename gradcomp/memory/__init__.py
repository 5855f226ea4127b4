"""What a rank remembers between steps: planes, residuals, states of transforms, and their
checkpoints.
"""
