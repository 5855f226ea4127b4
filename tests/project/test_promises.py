"""Every promise of the design is broken on purpose, and a test must notice it.

A test that passes on broken code proves nothing. A break replaces a function by one that behaves
otherwise, in a fork of the server that has imported gradcomp; pytest runs the test there, and
ranks are forks of that fork. `make promises` runs these alone.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import _forks
import pytest
from _ranks import Pool, cpu_s

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0  # for one break; a test that hangs has noticed, too
SOUND_TIMEOUT_S = 600.0  # for two rows of all these tests where nothing is broken


def swap(owner, name, make):
    """Replace a function of a class or module by what `make` returns for it."""
    setattr(owner, name, make(getattr(owner, name)))


def swap_everywhere(function, make):
    """Replace a function in every module of gradcomp that has imported it."""
    new = make(function)
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "gradcomp"]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, new)


# ---- bytes --------------------------------------------------------------------------------------


def second_headers_not_counted():
    from gradcomp.exchange.sizing import BucketPlan
    from gradcomp.payload.form import HEADER_NBYTES

    def make(init):
        def without(plan, *args, **options):
            init(plan, *args, **options)
            if plan.scatters:
                plan.sent_nbytes -= (plan.world_size - 1) * len(plan.slices) * HEADER_NBYTES

        return without

    swap(BucketPlan, "__init__", make)


# ---- one function, no drift ---------------------------------------------------------------------


def draws_by_place():
    from gradcomp.payload.layout import PayloadLayout

    def make(table_of):
        def table(layout, **options):
            found, offsets = (
                table_of(layout, **options),
                {p.slot.index: p.slot.offset for p in layout.pieces},
            )
            found.rows["parameter"] = [offsets[index] for index in found.rows["parameter"]]
            return found

        return table

    swap(PayloadLayout, "_table", make)


def owner_draws_from_the_first_stream():
    from gradcomp.exchange.bucket import BucketExchange
    from gradcomp.payload.rng import STREAM_FIRST

    swap(BucketExchange, "_key", lambda key: lambda self, stream: key(self, STREAM_FIRST))


def odd_ranks_add_in_another_order():
    from gradcomp.exchange.averages import Averages

    def make(payloads):
        def from_the_last(self, plan, phase):
            if not plan.rank % 2:
                return payloads(self, plan, phase)
            with mock.patch.object(phase, "tensors", phase.tensors[::-1]):
                return payloads(self, plan, phase)

        return from_the_last

    swap(Averages, "_payloads", make)


def owner_transforms_after_encoding():
    from gradcomp.exchange.bucket import BucketExchange
    from gradcomp.exchange.stages import OwnerTransform

    transform = OwnerTransform.before_owner_encode
    swap(OwnerTransform, "before_owner_encode", lambda _: lambda *args: False)

    def make(encode):
        def first(self, number, owned):
            bad = encode(self, number, owned)
            for stage in self._stages:
                if isinstance(stage, OwnerTransform):
                    bad |= transform(stage, self._job, number, self.shard)
            return bad

        return first

    swap(BucketExchange, "_encode_owned", make)


# ---- no quiet hang, no false alarm --------------------------------------------------------------


def no_fingerprint():
    from gradcomp.engine.step import Engine

    def make(agree):
        def only_settings_of_all_buckets(self, values, named, bucket=-1):
            if bucket < 0:
                agree(self, values, named, bucket)

        return only_settings_of_all_buckets

    swap(Engine, "agree", make)


def errors_stay_in_backward():
    from gradcomp.ddp import CompressionState

    swap(CompressionState, "_finish", lambda finish: lambda self: None)


def late_ends_are_failures():
    from gradcomp.comm.gloo import _GlooWork

    def late(self, timeout_s):
        self._look(sys.exc_info()[1], timeout_s, ended=True, last=True)

    swap(_GlooWork, "_settle", lambda settle: late)


# ---- nothing lost -------------------------------------------------------------------------------


def residuals_by_place():
    from gradcomp.engine.layouts import Layouts

    def make(slots_of):
        def slots(self, members):
            kept = self.store.residuals if self.comm.world_size > 1 else None
            found = slots_of(self, members)
            return [
                dataclasses.replace(
                    s, residual=s.offset if kept is not None and s.compressed else 0
                )
                for s in found
            ]

        return slots

    swap(Layouts, "_slots", make)


def residuals_keep_their_loss_scale():
    from gradcomp.memory.planes import Planes

    swap(Planes, "rescale", lambda rescale: lambda self, factor: None)


def owner_residuals_not_saved():
    from gradcomp.memory.store import StateStore

    swap(
        StateStore,
        "state",
        lambda state: lambda self, names: {**state(self, names), "owner_residual": {}},
    )


def owner_residuals_go_with_the_ranks():
    from gradcomp.memory.saved import reshard

    def make(change):
        def forget(old, rank, world_size, numels, *, owns_means, place):
            if not owns_means:
                old = [{**parts, "owner_residual": {}} for parts in old]
            return change(old, rank, world_size, numels, owns_means=owns_means, place=place)

        return forget

    swap_everywhere(reshard, make)


# ---- one verdict --------------------------------------------------------------------------------


def commits_do_not_flip():
    from gradcomp.memory.planes import Planes

    swap(Planes, "commit", lambda commit: lambda self, indices: self._committed.extend(indices))


def flags_of_peers_not_taken():
    from gradcomp.exchange.phase import Phase

    swap(Phase, "accept", lambda accept: lambda self: bool(accept(self) and False))


def other_nodes_not_told():
    from gradcomp.exchange.bucket import BucketExchange

    swap(
        BucketExchange,
        "begin",
        lambda begin: (
            lambda self, buffer, step, bucket, *, flagged=False: begin(self, buffer, step, bucket)
        ),
    )


def flagged_buckets_commit():
    from gradcomp.exchange import routes

    def make(run):
        def commit(exchange, buffer, step):
            run(exchange, buffer, step)
            if exchange.flagged:
                exchange.commit()

        return commit

    swap_everywhere(routes.run_stages, make)


# ---- values are where their kernel set has them -------------------------------------------------


def averages_read_by_numpy():
    from gradcomp.exchange.units import Units

    def make(write):
        def by_numpy(stage, bucket):
            bucket.numpy()
            return write(stage, bucket)

        return by_numpy

    swap(Units, "_write", make)


def shards_on_the_host():
    import torch

    from gradcomp.exchange.buffers import Buffers

    def make(init):
        def on_host(buffers, plan, *args):
            init(buffers, plan, *args)
            buffers.shard = torch.empty(buffers.shard.numel())
            for one in buffers.slices:
                one.owned.shard = buffers.shard

        return on_host

    swap(Buffers, "__init__", make)


# ---- hostile bytes ------------------------------------------------------------------------------


def checksums_always_fit():
    from gradcomp.payload import wire

    swap(
        wire, "_crc", lambda crc: lambda payload: int.from_bytes(payload[28:32].tobytes(), "little")
    )


def lengths_are_believed():
    from gradcomp.codecs.base import Codec

    swap(
        Codec,
        "_layout_of",
        lambda layout_of: lambda self, header, nbytes: layout_of(self, header, 2**62),
    )


# ---- quiet import -------------------------------------------------------------------------------


def at_import(statement):
    """Have programs that this process starts run a statement when they import gradcomp."""

    def apply():
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

    return apply


# ---- split weights, local steps -----------------------------------------------------------------


def local_gradients_stay():
    from gradcomp.optim.placeholder import Placeholder

    def make(stand_for):
        def beside(parameter):
            kept = parameter.grad
            placeholder = stand_for(parameter)
            parameter.grad = kept
            return placeholder

        return beside

    swap(Placeholder, "stand_for", make)


def zeroed_gradients_come_back():
    from gradcomp.optim.placeholder import Placeholder

    swap(Placeholder, "_zero_gradient", lambda zero: lambda self: None)


def trails_of_other_weights():
    from gradcomp.optim import tracking

    swap(tracking, "checksum", lambda checksum: lambda p: mock.ANY)


def optimizers_not_compared():
    from gradcomp import ddp

    swap(ddp, "replicated", lambda replicated: lambda optimizer, engine: [])


def averages_not_rounded():
    import torch

    from gradcomp.exchange.averages import Averages

    def make(update):
        def unrounded(self, targets, rules):
            exact = {
                phase: SimpleNamespace(
                    parts=[(dataclasses.replace(p, dtype=torch.float32), t) for p, t in one.parts]
                )
                for phase, one in self._parts.items()
            }
            with mock.patch.object(self, "_parts", exact):
                update(self, targets, rules)

        return unrounded

    swap(Averages, "update", make)


def everything_is_finite():
    from gradcomp.local import fragment

    blind = type("Blind", (), {"are_finite": lambda self, x: True})()
    swap(fragment, "of", lambda of: lambda device: blind)


def lower_halves_not_read():
    import torch

    from gradcomp.local.inner import Weights

    swap(
        Weights,
        "read",
        lambda read: lambda self, parameter: parameter.detach().to("cpu", torch.float32),
    )


class Break(NamedTuple):
    promise: str
    apply: Callable[[], None]
    test: str


BREAKS = [
    Break(
        "1 real bits: headers of the second phase not counted",
        second_headers_not_counted,
        "entry/test_averager.py::test_counted_bytes_are_the_bytes_of_the_buffers",
    ),
    Break(
        "2 one function: random numbers by place in the bucket",
        draws_by_place,
        "entry/test_ddp.py::test_bucket_layout_changes_no_bit",
    ),
    Break(
        "2 one function: the owner draws from the first phase's stream",
        owner_draws_from_the_first_stream,
        "engine/test_exchange.py::test_requantized_mean_is_unbiased",
    ),
    Break(
        "2 one function: the owner's transform comes after the second encoding",
        owner_transforms_after_encoding,
        "engine/test_transform.py::test_the_aggregate_is_transformed_before_it_is_encoded_again",
    ),
    Break(
        "3 no drift: odd ranks add the payloads in another order",
        odd_ranks_add_in_another_order,
        "entry/test_ddp.py::test_bucket_layout_changes_no_bit[gloo-own-all_gather]",
    ),
    Break(
        "4 no quiet hang: no fingerprint",
        no_fingerprint,
        "entry/test_ddp.py::test_ranks_with_other_settings_get_peer_mismatch",
    ),
    Break(
        "4 no quiet hang: errors do not come out of backward",
        errors_stay_in_backward,
        "entry/test_ddp.py::test_ranks_with_other_settings_get_peer_mismatch",
    ),
    Break(
        "no false alarm: a collective that ends just after a wait did taken for a failure",
        late_ends_are_failures,
        "comm/test_torchdist.py::test_a_collective_that_ends_just_after_a_wait_did_is_no_failure",
    ),
    Break(
        "5 nothing lost: residuals keyed by place in the bucket",
        residuals_by_place,
        "entry/test_ddp.py::test_nothing_is_lost_through_bucket_rebuilds",
    ),
    Break(
        "5 nothing lost: residuals do not follow the loss scale",
        residuals_keep_their_loss_scale,
        "entry/test_ddp.py::test_residuals_follow_the_loss_scale",
    ),
    Break(
        "5 nothing lost: owner residuals not in the checkpoint",
        owner_residuals_not_saved,
        "entry/test_conformance.py::test_a_resumed_run_is_the_uninterrupted_one[ddp-onebit]",
    ),
    Break(
        "5 nothing lost: owners' residuals go with the old number of ranks",
        owner_residuals_go_with_the_ranks,
        "engine/test_transform.py::test_what_is_owed_is_owed_by_the_new_ranks",
    ),
    Break(
        "6 one verdict: a bad step's sums of squares stay",
        commits_do_not_flip,
        "engine/test_planes.py",
    ),
    Break(
        "6 one verdict: a peer's flag is not taken over",
        flags_of_peers_not_taken,
        "engine/test_exchange.py::test_one_bad_rank_is_everyones_verdict",
    ),
    Break(
        "6 one verdict: the other nodes are not told",
        other_nodes_not_told,
        "engine/test_hierarchical.py::test_infinity_on_one_rank_is_nan_on_all_and_leaves_no_trace",
    ),
    Break(
        "6 one verdict: a flagged bucket commits its residual",
        flagged_buckets_commit,
        "engine/test_exchange.py::test_one_bad_rank_is_everyones_verdict",
    ),
    Break(
        "values are where their kernel set has them: units multiplied by way of NumPy",
        averages_read_by_numpy,
        "entry/test_golden.py::test_a_kernel_set_whose_values_cannot_be_read_computes_the_same[ddp,"
        " precondition]",
    ),
    Break(
        "values are where their kernel set has them: shards in host memory",
        shards_on_the_host,
        "entry/test_golden.py::test_a_kernel_set_whose_values_cannot_be_read_computes_the_same[fsdp,"
        " bf16 residuals]",
    ),
    Break(
        "7 hostile bytes: no checksum",
        checksums_always_fit,
        "codecs/test_codec_conformance.py::test_every_flipped_bit_is_refused",
    ),
    Break(
        "7 hostile bytes: lengths are believed",
        lengths_are_believed,
        "codecs/test_wire.py::test_lying_numel_allocates_nothing",
    ),
    Break(
        "9 quiet import: a thread at import",
        at_import(
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
        ),
        "project/test_house.py::test_import_is_quiet",
    ),
    Break(
        "9 quiet import: an environment variable",
        at_import("import os; os.environ['OMP_WAIT_POLICY'] = 'passive'"),
        "project/test_house.py::test_import_is_quiet",
    ),
    Break(
        "split weights: local gradients stay where averages are packed",
        local_gradients_stay,
        "optim/test_fused.py::test_placeholders_cannot_be_used",
    ),
    Break(
        "split weights: zeroed gradients come back",
        zeroed_gradients_come_back,
        "optim/test_fused.py::test_zeroed_gradients_do_not_come_back",
    ),
    Break(
        "split weights: trails of other weights",
        trails_of_other_weights,
        "optim/test_optim.py::test_weights_that_trails_do_not_belong_to_stop_a_step",
    ),
    Break(
        "split weights: replicas that differ in trails alone",
        optimizers_not_compared,
        "optim/test_fused.py::test_check_replicas_sees_trails",
    ),
    Break(
        "split weights: averages applied without rounding to the bucket's dtype",
        averages_not_rounded,
        "optim/test_fused.py::test_fused_runs_equal_unfused_ones[3-onebit gather]",
    ),
    Break(
        "local steps: weights that are not finite committed",
        everything_is_finite,
        "entry/test_local.py::test_weights_that_are_not_finite_are_committed_nowhere",
    ),
    Break(
        "local steps: weights of a split optimizer read without their lower halves",
        lower_halves_not_read,
        "entry/test_local.py::test_split_weights_keep_their_lower_halves",
    ),
]


class Outcomes:
    """A pytest plugin that counts tests that ran, and keeps the names of those that failed.

    Only the first `rows` rows of a table run.
    """

    def __init__(self, rows=None):
        self.count, self.failed, self.rows = 0, [], rows

    def pytest_collection_modifyitems(self, items):
        tables = {}
        for item in items:
            tables.setdefault(item.function, []).append(item)
        items[:] = [item for rows in tables.values() for item in rows[: self.rows]]

    def pytest_runtest_logreport(self, report):
        self.count += report.when == "call"
        if report.failed or report.skipped:
            self.failed.append(f"failed {report.nodeid}")


def run_tests(number, tests, folder):
    """Be a fork in which a promise, or none, is broken; run tests, write `folder`/failed."""
    os.setsid()
    with open(Path(folder, "output"), "w", buffering=1) as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            del os.environ[name]
        _forks.from_here = True
        if number is not None:
            BREAKS[number].apply()
        outcomes = Outcomes(2 if number is None else None)
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-k",
            "not mpich and not openmpi",
            f"--rootdir={ROOT}",
        ]
        status = pytest.main(
            [*options, *(["-x"] if number is not None else []), *tests], plugins=[outcomes]
        )
        Path(folder, "cpu_s").write_text(str(cpu_s() + Pool.cpu_s))
        assert status in (0, 1) and outcomes.count, f"pytest ended with {status}"
        Path(folder, "failed").write_text("\n".join(outcomes.failed))


def failed_in_a_fork(number, tests, folder):
    """Return what did not pass, "hangs" if there was no end to it."""
    child = _forks.start(
        run_tests, number, [str(ROOT / "tests" / test) for test in tests], str(folder)
    )
    deadline = time.monotonic() + (SOUND_TIMEOUT_S if number is None else TIMEOUT_S)
    while _forks.is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    hangs = _forks.is_alive(child)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its ranks, too
    if hangs:
        return ["hangs"]
    assert (folder / "failed").exists(), (folder / "output").read_text()[-4000:]
    Pool.cpu_s += float((folder / "cpu_s").read_text())
    return (folder / "failed").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BREAKS)), ids=[item.promise for item in BREAKS])
def test_a_broken_promise_is_noticed(number, tmp_path):
    assert failed_in_a_fork(number, [BREAKS[number].test], tmp_path), "broken, and unnoticed"


@pytest.mark.slow
@pytest.mark.timeout(SOUND_TIMEOUT_S + 60)
def test_nothing_fails_where_nothing_is_broken(tmp_path):
    found = failed_in_a_fork(None, list(dict.fromkeys(item.test for item in BREAKS)), tmp_path)
    assert not found, (tmp_path / "output").read_text()[-4000:]
