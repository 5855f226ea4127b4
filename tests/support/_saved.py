"""What tests look at in a saved state, and how they damage one."""

import copy

LEFT_OUT = object()


def parts_of(state):
    """Return the tensors of a state of one rank, by part and name."""
    (own,) = state["ranks"].values()
    return {k: v for k, v in (state["replicated"] | own).items() if k != "tensors"}


def with_value(state, path, value):
    """Return a copy of a nested state with another value at a path, or without it."""
    state = copy.deepcopy(state)
    place = state
    for key in path[:-1]:
        place = place[key]
    if value is LEFT_OUT:
        del place[path[-1]]
    else:
        place[path[-1]] = value(place[path[-1]]) if callable(value) else value
    return state


def paths_of(state, here=()):
    """Yield the path of every value of a nested state."""
    items = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if isinstance(state, list)
        else ()
    )
    for key, value in items:
        yield (*here, key)
        yield from paths_of(value, (*here, key))
