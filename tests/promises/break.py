"""Break each promise of the design on purpose, in a copy of the package, and see that its test fails.

A test that passes on broken code proves nothing. `python tests/promises/break.py` copies gradcomp and tests to temporary
folders, makes sure the chosen tests pass there, applies one change a folder, and expects that one's test to fail. Exit status
1 when a broken promise goes unnoticed or a change no longer applies. `make promises` and CI run it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch  # noqa: F401 - loaded once, for every fork

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0  # for one test
WORKERS = 4  # most of it is waiting for what hangs


class Break(NamedTuple):
    promise: str
    file: str
    old: str
    new: str
    test: str


BREAKS = [
    Break(
        "1 real bits: second-phase padding and headers not counted",
        "gradcomp/exchange/sizing.py",
        "others * one.second_nbytes\n                self.received",
        "others * (one.second_nbytes - 32)\n                self.received",
        "tests/test_averager.py::test_counted_bytes_are_the_bytes_of_the_buffers",
    ),
    Break(
        "2 one function: random numbers by place in the bucket",
        "gradcomp/payload/layout.py",
        "                        piece.slot.index,\n",
        "                        piece.slot.offset,\n",
        "tests/test_ddp.py::test_bucket_layout_changes_no_bit",
    ),
    Break(
        "2 one function: the owner draws from the first phase's stream",
        "gradcomp/exchange/bucket.py",
        "second.owned, self._key(STREAM_SECOND), residuals)",
        "second.owned, self._key(STREAM_FIRST), residuals)",
        "tests/test_exchange.py::test_requantized_mean_is_unbiased",
    ),
    Break(
        "3 no drift: odd ranks add the payloads in another order",
        "gradcomp/exchange/averages.py",
        "sources, tables = inbox.tensors, (inbox",
        "sources, tables = inbox.tensors[:: -1 if plan.rank % 2 else 1], (inbox",
        "tests/test_ddp.py::test_bucket_layout_changes_no_bit[gloo-own-all_gather]",
    ),
    Break(
        "4 no quiet hang: no fingerprint",
        "gradcomp/engine/step.py",
        "            if compared and self.comm.world_size > 1:\n",
        "            if False:\n",
        "tests/test_ddp.py::test_ranks_with_other_settings_get_peer_mismatch",
    ),
    Break(
        "4 no quiet hang: errors do not come out of backward",
        "gradcomp/ddp.py",
        "after_backward(self._finish)",
        "after_backward(lambda: None)",
        "tests/test_ddp.py::test_ranks_with_other_settings_get_peer_mismatch",
    ),
    Break(
        "5 nothing lost: residuals keyed by place in the bucket",
        "gradcomp/engine/layouts.py",
        "residual = feedback.offset(index) if",
        "residual = offset if",
        "tests/test_ddp.py::test_nothing_is_lost_through_bucket_rebuilds",
    ),
    Break(
        "5 nothing lost: residuals do not follow the loss scale",
        "gradcomp/memory/parts.py",
        "            self.feedback.rescale(new / old)",
        "            pass",
        "tests/test_ddp.py::test_residuals_follow_the_loss_scale",
    ),
    Break(
        "5 nothing lost: owner residuals not in the checkpoint",
        "gradcomp/memory/parts.py",
        "return dict(zip(PARTS, planes, strict=True))",
        "return dict(zip(PARTS, [planes[0], {}, planes[2]], strict=True))",
        "tests/test_ddp.py::test_resumed_run_equals_the_uninterrupted_one[gloo-onebit]",
    ),
    Break(
        "5 nothing lost: owners' residuals go with the old number of ranks",
        "gradcomp/memory/reshard.py",
        "            residual[name] = residual[name] + tensor if name in residual else tensor\n",
        "            pass\n",
        "tests/test_transform.py::test_what_is_owed_is_owed_by_the_new_ranks",
    ),
    Break(
        "2 one function: the owner's transform comes after the second encoding",
        "gradcomp/exchange/bucket.py",
        "                if self._owner_transform is not None:  # goes with whole second phases\n"
        "                    self._own_bad |= self._owner_transform.run(self.shard, self._owned_spans)\n"
        "                self._own_bad |= self._encode_owned(number, here.second)\n",
        "                self._own_bad |= self._encode_owned(number, here.second)\n"
        "                if self._owner_transform is not None:\n"
        "                    self._own_bad |= self._owner_transform.run(self.shard, self._owned_spans)\n",
        "tests/test_transform.py::test_the_aggregate_is_transformed_before_it_is_encoded_again",
    ),
    Break(
        "6 one verdict: a bad step's sums of squares stay",
        "gradcomp/memory/planes.py",
        "        for index in indices:\n            self._current[index] ^= 1\n            self._committed.append(index)\n",
        "        for index in indices:\n            self._committed.append(index)\n",
        "tests/test_feedback.py",
    ),
    Break(
        "6 one verdict: a peer's flag is not taken over",
        "gradcomp/exchange/receive.py",
        "            nonfinite |= header.nonfinite\n",
        "",
        "tests/test_exchange.py::test_one_bad_rank_is_everyones_verdict",
    ),
    Break(
        "6 one verdict: the other nodes are not told",
        "gradcomp/exchange/routes.py",
        "flagged=self._inside.flagged)",
        "flagged=False)",
        "tests/test_hierarchical.py::test_infinity_on_one_rank_is_nan_on_all_and_leaves_no_trace",
    ),
    Break(
        "6 one verdict: a flagged bucket commits its residual",
        "gradcomp/exchange/interface.py",
        "    if not exchange.flagged:\n        exchange.commit()",
        "    exchange.commit()",
        "tests/test_exchange.py::test_one_bad_rank_is_everyones_verdict",
    ),
    Break(
        "7 hostile bytes: no checksum",
        "gradcomp/payload/wire.py",
        "    if stored != computed:",
        "    if False:",
        "tests/test_wire.py::test_every_flipped_bit_is_refused",
    ),
    Break(
        "7 hostile bytes: lengths are believed",
        "gradcomp/codecs/base.py",
        "        if nbytes < HEADER_NBYTES + self.form.code_nbytes(0, header.numel):",
        "        if False:",
        "tests/test_wire.py::test_lying_headers_with_a_right_checksum",
    ),
    Break(
        "9 quiet import: a thread at import",
        "gradcomp/exchange/pipeline.py",
        'logger = logging.getLogger("gradcomp")\n',
        'logger = logging.getLogger("gradcomp")\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n',
        "tests/test_house.py::test_import_is_quiet",
    ),
    Break(
        "9 quiet import: an environment variable",
        "gradcomp/version.py",
        "from importlib.metadata",
        "import os\n\nos.environ['OMP_WAIT_POLICY'] = 'passive'\nfrom importlib.metadata",
        "tests/test_house.py::test_import_is_quiet",
    ),
    Break(
        "split weights: local gradients stay where averages are packed",
        "gradcomp/optim/fused.py",
        "    p.grad = placeholder\n    return placeholder",
        "    return placeholder",
        "tests/test_fused.py::test_placeholders_cannot_be_used",
    ),
    Break(
        "split weights: trails of other weights",
        "gradcomp/optim/tracking.py",
        "if checksum(p) != wanted:",
        "if False:",
        "tests/test_optim.py::test_tops_that_changed_after_the_split_stop_the_first_step",
    ),
    Break(
        "split weights: replicas that differ in trails alone",
        "gradcomp/ddp.py",
        "engine.replicated = lambda: replicated(optimizer, engine)",
        "engine.replicated = list",
        "tests/test_fused.py::test_check_replicas_sees_trails",
    ),
    Break(
        "split weights: averages applied without rounding to the bucket's dtype",
        "gradcomp/codecs/base.py",
        "return Payloads(tensors, self.form.kernel, dtype)",
        "return Payloads(tensors, self.form.kernel, torch.float32)",
        "tests/test_fused.py::test_every_codec_and_exchange[3-onebit gather]",
    ),
    Break(
        "no false alarm: a collective that ends just after a wait did taken for a failure",
        "gradcomp/comm/gloo.py",
        "                    self._settle()\n                    return\n",
        "                    self._look(error, ended=True, last=True)\n",
        "tests/test_channels.py::test_a_collective_that_ends_just_after_a_wait_did_is_no_failure",
    ),
    Break(
        "local steps: weights that are not finite committed",
        "gradcomp/local/fragment.py",
        "if not all(grad is not None and",
        "if not all(grad is not None or",
        "tests/test_local.py::test_weights_that_are_not_finite_are_committed_nowhere",
    ),
    Break(
        "local steps: weights of a split optimizer read without their lower halves",
        "gradcomp/local/inner.py",
        "parameter.detach() if keeper is None else",
        "parameter.detach() if True else",
        "tests/test_local.py::test_split_weights_keep_their_lower_halves",
    ),
]


class Outcomes:
    """A pytest plugin that keeps the names of tests that did not pass, as they were asked for."""

    def __init__(self) -> None:
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.failed or report.skipped:  # type: ignore[attr-defined]
            self.failed.add(report.nodeid)  # type: ignore[attr-defined]


def copy_to(folder: Path) -> Path:
    """Copy what the tests of a promise need to a folder; return it."""
    for part in ("gradcomp", "tests", "native", "docs", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    return folder


def start(folder: Path, tests: list[str], *more: str) -> int:
    """Run tests against the package in `folder`, in a fork of this process, which has loaded torch; return its id.

    What did not pass stands in `folder`/failed, one a line.
    """
    child = os.fork()
    if child:
        return child
    os.setsid()
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path.insert(0, str(folder))
    with open(folder / "output", "w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        outcomes = Outcomes()
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not mpich and not openmpi", *more]
        status = pytest.main([*options, *tests], plugins=[outcomes])
        (folder / "failed").write_text("\n".join(sorted(outcomes.failed)) if status in (0, 1) else "\n".join(tests))
    os._exit(0)


def finish(child: int, folder: Path) -> list[str]:
    """Wait for a fork, for so long and no longer; return what did not pass, everything if it hung or died."""
    deadline = time.monotonic() + TIMEOUT_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.05)
    path = folder / "failed"
    return path.read_text().splitlines() if path.exists() else ["it hung, or died"]


def verdict(item: Break, folder: Path) -> str:
    """Break one promise in a copy of its own; return what is wrong with its test, "" where that fails as it should."""
    path = copy_to(folder) / item.file
    whole = path.read_text()
    if item.old not in whole:
        return "the change no longer applies"
    path.write_text(whole.replace(item.old, item.new, 1))
    return "" if finish(start(folder, [item.test], "-x"), folder) else "BROKEN AND UNNOTICED"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="gradcomp-promises-") as name, ThreadPoolExecutor(WORKERS) as workers:
        folders = [Path(name, str(number)) for number in range(len(BREAKS) + 1)]
        for folder in folders:
            folder.mkdir()
        tests = list(dict.fromkeys(item.test for item in BREAKS))
        sound = workers.submit(lambda: finish(start(copy_to(folders[-1]), tests), folders[-1]))
        verdicts = list(workers.map(verdict, BREAKS, folders))
        unsound = sound.result()
        if unsound:
            print((folders[-1] / "output").read_text()[-4000:])
    for item, wrong in zip(BREAKS, verdicts, strict=True):
        if any(test.startswith(item.test) or not test.startswith("tests/") for test in unsound):
            wrong = "its test fails even unbroken"
        print(f"{wrong or 'noticed':<30} {item.promise}", flush=True)
    return 1 if unsound or any(verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
