"""Every promise of the design is broken on purpose, and a test must notice it.

A test that passes on broken code proves nothing. A break replaces a function by one that behaves
otherwise, in a fork of the server that has imported gradcomp; pytest runs the test there, and
ranks are forks of that fork. `make promises` runs these alone.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import _forks
import pytest
import torch
from _broken import failed_in_a_fork

from gradcomp import ddp
from gradcomp.codecs.base import Codec
from gradcomp.comm.gloo import _GlooWork
from gradcomp.engine.layouts import Layouts
from gradcomp.engine.replicas import Replicas
from gradcomp.exchange import routes
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.bucket import BucketExchange
from gradcomp.exchange.buffers import Buffers
from gradcomp.exchange.phase import Phase
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.exchange.stages import OwnerTransform, Units
from gradcomp.local import fragment
from gradcomp.local.inner import Weights
from gradcomp.memory.planes import Planes
from gradcomp.memory.saved import reshard
from gradcomp.memory.store import StateStore
from gradcomp.optim import tracking
from gradcomp.optim.placeholder import Placeholder
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.rng import STREAM_FIRST

TIMEOUT_S = 120.0  # for one break; a test that hangs has noticed, too
SOUND_TIMEOUT_S = 600.0  # for two rows of all these tests where nothing is broken


class Break(NamedTuple):
    promise: str
    apply: Callable[[], None]
    test: str


BREAKS = []


def noticed_by(test):
    """Enter a function that breaks a promise into `BREAKS`; its docstring says which and how."""

    def enter(apply):
        BREAKS.append(Break(apply.__doc__.rstrip("."), apply, test))
        return apply

    return enter


def replace_everywhere(function, new):
    """Replace a function in every module of gradcomp that has imported it."""
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "gradcomp"]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, new)


# ---- bytes --------------------------------------------------------------------------------------


@noticed_by("entry/test_averager.py::test_counted_bytes_are_the_bytes_of_the_buffers")
def second_headers_not_counted():
    """1 real bits: headers of the second phase not counted."""
    init = BucketPlan.__init__

    def without(plan, *args, **options):
        init(plan, *args, **options)
        if plan.scatters:
            plan.sent_nbytes -= (plan.world_size - 1) * len(plan.slices) * HEADER_NBYTES

    BucketPlan.__init__ = without


# ---- one function, no drift ---------------------------------------------------------------------


@noticed_by("entry/test_ddp.py::test_bucket_layout_changes_no_bit")
def draws_by_place():
    """2 one function: random numbers by place in the bucket."""
    table_of = PayloadLayout._table

    def table(layout, **options):
        found = table_of(layout, **options)
        offsets = {p.slot.index: p.slot.offset for p in layout.pieces}
        found.rows["parameter"] = [offsets[index] for index in found.rows["parameter"]]
        return found

    PayloadLayout._table = table


@noticed_by("engine/test_exchange.py::test_requantized_mean_is_unbiased")
def owner_draws_from_the_first_stream():
    """2 one function: the owner draws from the first phase's stream."""
    key = BucketExchange._key
    BucketExchange._key = lambda self, stream: key(self, STREAM_FIRST)


@noticed_by(
    "engine/test_transform.py::test_the_aggregate_is_transformed_before_it_is_encoded_again"
)
def owner_transforms_after_encoding():
    """2 one function: the owner's transform comes after the second encoding."""
    transform, encode = OwnerTransform.before_owner_encode, BucketExchange._encode_owned

    def first(self, number, owned):
        bad = encode(self, number, owned)
        for stage in self._stages:
            if isinstance(stage, OwnerTransform):
                bad |= transform(stage, self._job, number, self.shard)
        return bad

    OwnerTransform.before_owner_encode = lambda *args: False
    BucketExchange._encode_owned = first


@noticed_by("entry/test_ddp.py::test_bucket_layout_changes_no_bit[gloo-own-all_gather]")
def odd_ranks_add_in_another_order():
    """3 no drift: odd ranks add the payloads in another order."""
    payloads = Averages._payloads

    def from_the_last(self, plan, phase):
        if not plan.rank % 2:
            return payloads(self, plan, phase)
        with mock.patch.object(phase, "tensors", phase.tensors[::-1]):
            return payloads(self, plan, phase)

    Averages._payloads = from_the_last


# ---- no quiet hang, no false alarm --------------------------------------------------------------


@noticed_by("entry/test_ddp.py::test_ranks_with_other_settings_get_peer_mismatch")
def no_fingerprint():
    """4 no quiet hang: no fingerprint."""
    agree = Replicas.agree

    def only_settings_of_all_buckets(self, values, named, bucket):
        if bucket < 0:
            agree(self, values, named, bucket)

    Replicas.agree = only_settings_of_all_buckets


@noticed_by("entry/test_ddp.py::test_ranks_with_other_settings_get_peer_mismatch")
def errors_stay_in_backward():
    """4 no quiet hang: errors do not come out of backward."""
    ddp.CompressionState._finish = lambda self: None


@noticed_by(
    "comm/test_torchdist.py::test_a_collective_that_ends_just_after_a_wait_did_is_no_failure"
)
def late_ends_are_failures():
    """no false alarm: a collective that ends just after a wait did taken for a failure."""

    def late(self, timeout_s):
        self._look(sys.exc_info()[1], timeout_s, ended=True, last=True)

    _GlooWork._check_result = late


# ---- nothing lost -------------------------------------------------------------------------------


@noticed_by("entry/test_ddp.py::test_nothing_is_lost_through_bucket_rebuilds")
def residuals_by_place():
    """5 nothing lost: residuals keyed by place in the bucket."""
    slots_of = Layouts._slots

    def slots(self, members):
        kept = self.store.residuals if self.comm.world_size > 1 else None
        return [
            dataclasses.replace(s, residual=s.offset if kept is not None and s.compressed else 0)
            for s in slots_of(self, members)
        ]

    Layouts._slots = slots


@noticed_by("entry/test_ddp.py::test_residuals_follow_the_loss_scale")
def residuals_keep_their_loss_scale():
    """5 nothing lost: residuals do not follow the loss scale."""
    Planes.rescale = lambda self, factor: None


@noticed_by("entry/test_conformance.py::test_a_resumed_run_is_the_uninterrupted_one[ddp-onebit]")
def owner_residuals_not_saved():
    """5 nothing lost: owner residuals not in the checkpoint."""
    state = StateStore.state
    StateStore.state = lambda self, names: {**state(self, names), "owner_residual": {}}


@noticed_by("engine/test_transform.py::test_what_is_owed_is_owed_by_the_new_ranks")
def owner_residuals_go_with_the_ranks():
    """5 nothing lost: owners' residuals go with the old number of ranks."""

    def forget(old, rank, world_size, numels, *, owns_means, place):
        if not owns_means:
            old = [{**parts, "owner_residual": {}} for parts in old]
        return reshard(old, rank, world_size, numels, owns_means=owns_means, place=place)

    replace_everywhere(reshard, forget)


# ---- one verdict --------------------------------------------------------------------------------


@noticed_by("engine/test_planes.py")
def commits_do_not_flip():
    """6 one verdict: a bad step's sums of squares stay."""
    Planes.commit = lambda self, indices: self._committed.extend(indices)


@noticed_by("engine/test_exchange.py::test_one_bad_rank_is_everyones_verdict")
def flags_of_peers_not_taken():
    """6 one verdict: a peer's flag is not taken over."""
    accept = Phase.accept
    Phase.accept = lambda self: bool(accept(self) and False)


@noticed_by(
    "engine/test_hierarchical.py::test_infinity_on_one_rank_is_nan_on_all_and_leaves_no_trace"
)
def other_nodes_not_told():
    """6 one verdict: the other nodes are not told."""
    begin = BucketExchange.begin

    def unflagged(self, buffer, step, bucket, *, flagged=False):
        return begin(self, buffer, step, bucket)

    BucketExchange.begin = unflagged


@noticed_by("engine/test_exchange.py::test_one_bad_rank_is_everyones_verdict")
def flagged_buckets_commit():
    """6 one verdict: a flagged bucket commits its residual."""
    run = routes.run_stages

    def commit(exchange, buffer, step):
        run(exchange, buffer, step)
        if exchange.flagged:
            exchange.commit()

    replace_everywhere(run, commit)


# ---- values are where their kernel set has them -------------------------------------------------

SHADOWED = "entry/test_golden.py::test_a_kernel_set_whose_values_cannot_be_read_computes_the_same"


@noticed_by(f"{SHADOWED}[ddp, precondition]")
def averages_read_by_numpy():
    """values are where their kernel set has them: units multiplied by way of NumPy."""
    write = Units._write

    def by_numpy(stage, bucket):
        bucket.numpy()
        return write(stage, bucket)

    Units._write = by_numpy


@noticed_by(f"{SHADOWED}[fsdp, bf16 residuals]")
def shards_on_the_host():
    """values are where their kernel set has them: shards in host memory."""
    init = Buffers.__init__

    def on_host(buffers, plan, *args):
        init(buffers, plan, *args)
        buffers.shard = torch.empty(buffers.shard.numel())
        for one in buffers.slices:
            one.owned.shard = buffers.shard

    Buffers.__init__ = on_host


# ---- hostile bytes ------------------------------------------------------------------------------


@noticed_by("codecs/test_codec_conformance.py::test_every_flipped_bit_is_refused")
def checksums_always_fit():
    """7 hostile bytes: no checksum."""
    wire._crc = lambda payload: int.from_bytes(payload[28:32].tobytes(), "little")


@noticed_by("codecs/test_wire.py::test_lying_numel_allocates_nothing")
def lengths_are_believed():
    """7 hostile bytes: lengths are believed."""
    layout_of = Codec._layout_of
    Codec._layout_of = lambda self, header, nbytes: layout_of(self, header, 2**62)


# ---- quiet import -------------------------------------------------------------------------------


def at_import(statement):
    """Have programs that this process starts run a statement when they import gradcomp."""
    folder = Path(os.environ[_forks.VARIABLE], f"import{os.getpid()}")
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'gradcomp.version':\n"
        f"            {statement}\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    )


@noticed_by("project/test_house.py::test_import_is_quiet")
def a_thread_at_import():
    """9 quiet import: a thread at import."""
    at_import(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )


@noticed_by("project/test_house.py::test_import_is_quiet")
def a_variable_at_import():
    """9 quiet import: an environment variable."""
    at_import("import os; os.environ['OMP_WAIT_POLICY'] = 'passive'")


# ---- split weights, local steps -----------------------------------------------------------------


@noticed_by("optim/test_fused.py::test_placeholders_cannot_be_used")
def local_gradients_stay():
    """split weights: local gradients stay where averages are packed."""
    stand_for = Placeholder.stand_for

    def beside(parameter):
        kept = parameter.grad
        placeholder = stand_for(parameter)
        parameter.grad = kept
        return placeholder

    Placeholder.stand_for = beside


@noticed_by("optim/test_fused.py::test_zeroed_gradients_do_not_come_back")
def zeroed_gradients_come_back():
    """split weights: zeroed gradients come back."""
    Placeholder._zero_gradient = lambda self: None


@noticed_by("optim/test_optim.py::test_weights_that_trails_do_not_belong_to_stop_a_step")
def trails_of_other_weights():
    """split weights: trails of other weights."""
    tracking.checksum = lambda p: mock.ANY


@noticed_by("optim/test_fused.py::test_check_replicas_sees_trails")
def optimizers_not_compared():
    """split weights: replicas that differ in trails alone."""
    ddp.replicated = lambda optimizer, engine: []


@noticed_by("optim/test_fused.py::test_fused_runs_equal_unfused_ones[3-onebit gather]")
def averages_not_rounded():
    """split weights: averages applied without rounding to the bucket's dtype."""
    update = Averages.update

    def unrounded(self, targets, rules):
        exact = {
            phase: SimpleNamespace(
                parts=[(dataclasses.replace(p, dtype=torch.float32), t) for p, t in one.parts]
            )
            for phase, one in self._parts.items()
        }
        with mock.patch.object(self, "_parts", exact):
            update(self, targets, rules)

    Averages.update = unrounded


@noticed_by("entry/test_local.py::test_weights_that_are_not_finite_are_committed_nowhere")
def everything_is_finite():
    """local steps: weights that are not finite committed."""
    fragment.of = lambda device: SimpleNamespace(are_finite=lambda values: True)


@noticed_by("entry/test_local.py::test_split_weights_keep_their_lower_halves")
def lower_halves_not_read():
    """local steps: weights of a split optimizer read without their lower halves."""
    Weights.read = lambda self, parameter: parameter.detach().to("cpu", torch.float32)


def apply(number):
    if number is not None:
        BREAKS[number].apply()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BREAKS)), ids=[item.promise for item in BREAKS])
def test_a_broken_promise_is_noticed(number, tmp_path):
    broken = functools.partial(apply, number)
    found = failed_in_a_fork(broken, [BREAKS[number].test], tmp_path, TIMEOUT_S, "-x")
    assert found, "broken, and unnoticed"


@pytest.mark.slow
@pytest.mark.timeout(SOUND_TIMEOUT_S + 60)
def test_nothing_fails_where_nothing_is_broken(tmp_path):
    tests = list(dict.fromkeys(item.test for item in BREAKS))
    sound = functools.partial(apply, None)
    found = failed_in_a_fork(sound, tests, tmp_path, SOUND_TIMEOUT_S, rows=2)
    assert not found, (tmp_path / "output").read_text()[-4000:]
