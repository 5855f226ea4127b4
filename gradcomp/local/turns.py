"""When which fragment of a model is exchanged: rounds of H inner steps, in which every fragment
has its turn once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from gradcomp.comm.base import Communicator
from gradcomp.engine.agree import agree_on_words

AGREED_ROUNDS = 64  # of a schedule of H, which ranks compare
SyncEvery = int | Callable[[int], int]


class Turns:
    """Counts inner steps and says whose turn it is.

    Fragment k of K begins its exchange ceil((k + 1) H / K) steps into a round, so that turns lie H
    / K apart and the last one ends the round.

    Args:
        sync_every: H, inner steps of a round; or a function of the round's number that returns it.
        fragments: K.

    Attributes:
        round: number of the round.
        done: inner steps of it that are done.

    Raises:
        ValueError: no positive integer, or fewer steps than fragments.
    """

    def __init__(self, sync_every: SyncEvery, fragments: int) -> None:
        if isinstance(fragments, bool) or not isinstance(fragments, int) or fragments < 1:
            raise ValueError(f"fragments must be an integer of at least 1, got {fragments!r}")
        self._sync_every, self.fragments = sync_every, fragments
        self.round = self.done = 0
        self.length(0)

    def length(self, number: int) -> int:
        """Return H of a round.

        Raises:
            ValueError: the function returned no integer of at least the number of fragments.
        """
        found = self._sync_every(number) if callable(self._sync_every) else self._sync_every
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise ValueError(
                f"sync_every must be a number of inner steps, at least 1, got {found!r} for round"
                f" {number}"
            )
        if found < self.fragments:
            raise ValueError(
                f"sync_every is {found} in round {number}: {self.fragments} fragments need as many"
                " steps to take turns"
            )
        return found

    def take(self) -> list[int]:
        """Count an inner step; return the fragments whose turn it is then."""
        length = self.length(self.round)
        self.done += 1
        due = [
            k for k in range(self.fragments) if self.done == -(-(k + 1) * length // self.fragments)
        ]
        if self.done >= length:
            self.round, self.done = self.round + 1, 0
        return due


def agree_on_settings(
    comm: Communicator,
    kind: str,
    turns: Turns,
    settings: Mapping[str, object],
    named: Sequence[tuple[str, nn.Parameter]],
    timeout_s: float,
) -> None:
    """Compare over the ranks when what is exchanged, and how. Collective.

    Args:
        kind: of local steps.
        settings: what must not differ beside turns and parameters, by name.
        named: (name, parameter) of the model.

    Raises:
        PeerMismatch: names the first that differs.
        PeerLost: a rank did not call this.
    """
    lengths = [turns.length(number) for number in range(AGREED_ROUNDS)]
    values = {
        "sync_every": lengths[0] if len(set(lengths)) == 1 else lengths,
        "fragments": turns.fragments,
        **settings,
        "parameters": [(name, tuple(p.shape), p.dtype) for name, p in named],
    }
    agree_on_words(comm, values, timeout_s, "setup", called=kind)


def cut(numels: Iterable[int], fragments: int) -> list[range]:
    """Return positions of consecutive tensors, cut into fragments of about as many elements each.

    Raises:
        ValueError: more fragments than tensors.
    """
    sizes: Sequence[int] = list(numels)
    if fragments > len(sizes):
        raise ValueError(
            f"{fragments} fragments of {len(sizes)} tensors: a fragment has at least one"
        )
    total, out, start, before = sum(sizes), [], 0, 0
    for number in range(fragments):
        left = fragments - number - 1
        end = start + 1
        before += sizes[start]
        while (
            end < len(sizes) - left and before + sizes[end] / 2 <= total * (number + 1) / fragments
        ):
            before += sizes[end]
            end += 1
        end = len(sizes) if not left else end
        out.append(range(start, end))
        start = end
    return out
