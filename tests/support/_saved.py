"""What tests look at in a saved state."""


def parts_of(state):
    """Return the tensors of a state of one rank, by part and name."""
    (own,) = state["ranks"].values()
    return {k: v for k, v in (state["replicated"] | own).items() if k != "tensors"}
