"""Residual planes: commit, discard, rescale, checkpoints."""

import pytest
import torch

from gradcomp import Feedback

NAMES = {3: "a", 8: "b"}


def write(feedback, indices, value):
    """Do what an encoding does: write the plane that is not current."""
    old, new = feedback.tensors(indices)
    assert old is not new
    side = 1 - feedback._current[indices[0]]
    assert feedback._planes[side] is new
    for index in indices:
        feedback._view(side, index).fill_(value)


def test_only_commit_makes_a_new_residual_current():
    feedback = Feedback({3: 10, 8: 20})
    write(feedback, [3, 8], 1.0)
    assert feedback.residual(3).sum() == 0
    feedback.commit([3])
    assert feedback.residual(3).tolist() == [1.0] * 10
    assert feedback.residual(8).sum() == 0


def test_tensors_on_different_planes_meet_in_one_bucket():
    """After a flagged bucket and a rebuild, one tensor's residual stands on each plane."""
    feedback = Feedback({3: 10, 8: 20})
    write(feedback, [3], 5.0)
    feedback.commit([3])
    write(feedback, [8], 7.0)
    feedback.commit([8])
    write(feedback, [8], 9.0)
    feedback.commit([8])
    feedback.tensors([3, 8])
    assert feedback.residual(3).tolist() == [5.0] * 10
    assert feedback.residual(8).tolist() == [9.0] * 20
    assert feedback._current[3] == feedback._current[8]


def test_discard_undoes_the_step_and_nothing_before_it():
    feedback = Feedback({3: 4})
    for value in (1.0, 2.0):
        feedback.begin_step()
        write(feedback, [3], value)
        feedback.commit([3])
    feedback.discard()
    assert feedback.residual(3).tolist() == [1.0] * 4
    feedback.discard()
    assert feedback.residual(3).tolist() == [1.0] * 4


def test_discard_does_not_bring_back_what_has_moved_to_another_plane():
    """After a rebuild a tensor may be moved, with its committed value; what is written next does
    not count until then.
    """
    feedback = Feedback({3: 10, 8: 20})
    write(feedback, [3, 8], 5.0)
    feedback.commit([3, 8])
    feedback.begin_step()
    write(feedback, [8], 7.0)
    feedback.commit([8])
    write(feedback, [3, 8], 9.0)
    feedback.discard()
    assert feedback.residual(8).tolist() == [7.0] * 20
    assert feedback.residual(3).tolist() == [5.0] * 10


def test_the_owner_s_residuals_are_discarded_with_the_others():
    feedback = Feedback({3: 10})
    owner = feedback.owned(lambda numel: numel // 2)
    for value in (1.0, 2.0):
        feedback.begin_step()
        for part in (feedback, owner):
            write(part, [3], value)
            part.commit([3])
    feedback.discard()
    assert owner.residual(3).tolist() == [1.0] * 5
    assert feedback.residual(3).tolist() == [1.0] * 10


def test_rescale_and_state():
    feedback = Feedback({3: 4, 8: 2})
    assert feedback.state(NAMES) == {}
    write(feedback, [3, 8], 3.0)
    feedback.commit([3, 8])
    feedback.rescale(0.5)
    state = feedback.state(NAMES)
    assert state["a"].tolist() == [1.5] * 4
    other = Feedback({3: 4, 8: 2})
    other.load(state, NAMES)
    assert torch.equal(other.residual(8), state["b"])


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
    feedback = Feedback({3: 4, 8: 2})
    write(feedback, [3, 8], 3.0)
    feedback.commit([3, 8])
    with pytest.raises(ValueError):
        feedback.load(state, NAMES)
    assert feedback.residual(3).tolist() == [3.0] * 4
