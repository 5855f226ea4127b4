"""Planes and stores of them: commit, discard, rescale, checkpoints."""

import pytest
import torch

from gradcomp.allreduce import Feedback
from gradcomp.memory.planes import Planes
from gradcomp.memory.store import StateStore
from gradcomp.memory.transform import Transforming
from gradcomp.onebit_sgd import AggregateAdagrad

NAMES = {3: "a", 8: "b"}


def write(planes, indices, value):
    """Do what an encoding does: write the plane that is not current."""
    planes.tensors(indices)
    for index in indices:
        planes.pair(index)[1].fill_(value)


def write_and_commit(planes, indices, value):
    """Write values, and make them current."""
    write(planes, indices, value)
    planes.commit(indices)


def test_only_commit_makes_a_new_residual_current():
    planes = Planes({3: 10, 8: 20})
    write(planes, [3, 8], 1.0)
    assert planes.current(3).sum() == 0
    planes.commit([3])
    assert planes.current(3).tolist() == [1.0] * 10
    assert planes.current(8).sum() == 0


def test_tensors_on_different_planes_meet_in_one_bucket():
    """After a flagged bucket and a rebuild, one tensor's residual stands on each plane."""
    planes = Planes({3: 10, 8: 20})
    write_and_commit(planes, [3], 5.0)
    write_and_commit(planes, [8], 7.0)
    write_and_commit(planes, [8], 9.0)
    planes.tensors([3, 8])
    assert planes.current(3).tolist() == [5.0] * 10
    assert planes.current(8).tolist() == [9.0] * 20
    assert planes.tensors([3])[0] is planes.tensors([8])[0]


def test_discard_undoes_the_step_and_nothing_before_it():
    planes = Planes({3: 4})
    for value in (1.0, 2.0):
        planes.begin_step()
        write_and_commit(planes, [3], value)
    planes.discard()
    assert planes.current(3).tolist() == [1.0] * 4
    planes.discard()
    assert planes.current(3).tolist() == [1.0] * 4


def test_discard_does_not_bring_back_what_has_moved_to_another_plane():
    """After a rebuild a tensor may be moved, with its committed value; what is written next does
    not count until then.
    """
    planes = Planes({3: 10, 8: 20})
    write_and_commit(planes, [3, 8], 5.0)
    planes.begin_step()
    write_and_commit(planes, [8], 7.0)
    write(planes, [3, 8], 9.0)
    planes.discard()
    assert planes.current(8).tolist() == [7.0] * 20
    assert planes.current(3).tolist() == [5.0] * 10


def test_the_owner_s_residuals_are_discarded_and_rescaled_with_the_others():
    feedback = Feedback({3: 10})
    residuals, owner = feedback.residuals, feedback.owned(1, 2)
    for value in (1.0, 2.0):
        feedback.begin_step()
        for part in (residuals, owner):
            write_and_commit(part, [3], value)
    feedback.discard()
    assert owner.current(3).tolist() == [1.0] * 10
    assert feedback.residual(3).tolist() == [1.0] * 10
    feedback.rescale(3.0)
    assert feedback.residual(3).tolist() == [3.0] * 10 and owner.current(3).tolist() == [3.0] * 10


def test_rescale_and_state():
    planes = Planes({3: 4, 8: 2})
    assert planes.state(NAMES) == {}
    write_and_commit(planes, [3, 8], 3.0)
    planes.rescale(0.5)
    state = planes.state(NAMES)
    assert state["a"].tolist() == [1.5] * 4
    other = Planes({3: 4, 8: 2})
    other.load(state, NAMES)
    assert torch.equal(other.current(8), state["b"])


def test_a_residual_that_a_larger_loss_scale_would_make_inf_stays_finite():
    planes = Planes({0: 3})
    planes.replace({0: torch.tensor([3e38, -3e38, 1e38])})
    planes.rescale(2.0)
    largest = torch.finfo(torch.float32).max
    assert planes.current(0).tolist() == [largest, -largest, 2 * torch.tensor(1e38).item()]
    planes.rescale(0.5)
    assert planes.current(0).isfinite().all()


@pytest.mark.parametrize(
    "state",
    [
        {"a": torch.zeros(4)},
        {"a": torch.zeros(4), "b": torch.zeros(3)},
        {"a": torch.zeros(4), "b": torch.zeros(2, dtype=torch.float64)},
        {"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(1)},
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state):
    planes = Planes({3: 4, 8: 2})
    write_and_commit(planes, [3, 8], 3.0)
    with pytest.raises(ValueError):
        planes.check(state, NAMES)
    assert planes.current(3).tolist() == [3.0] * 4


def test_every_plane_forgets_what_was_committed_before_a_step():
    store = StateStore(transform=Transforming(AggregateAdagrad(), {3: 4}))
    write_and_commit(store.transform.planes, [3], 1.0)
    store.begin_step()
    store.discard()
    assert store.state(NAMES)["transform_state"]["a"].tolist() == [1.0] * 4
