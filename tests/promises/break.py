"""Break each promise of the design on purpose, in a copy of the package, and see that its test fails.

A test that passes on broken code proves nothing. `python tests/promises/break.py` copies gradcomp and tests to a temporary
folder, makes sure the chosen test passes there, applies one change, and expects the same test to fail. Exit status 1 when
a broken promise goes unnoticed or a change no longer applies. `make test-long` runs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


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
        "others * self.second_nbytes\n        self.received",
        "others * (self.second_nbytes - 32)\n        self.received",
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
        "out, self._key(STREAM_SECOND), old, new)",
        "out, self._key(STREAM_FIRST), old, new)",
        "tests/test_exchange.py::test_requantized_mean_is_unbiased",
    ),
    Break(
        "3 no drift: odd ranks add the payloads in another order",
        "gradcomp/exchange/bucket.py",
        "averages = Averages(plan, self._payloads, self._dtype)",
        "averages = Averages(plan, self._payloads[:: -1 if plan.rank % 2 else 1], self._dtype)",
        "tests/test_ddp.py::test_bucket_layout_changes_no_bit[gloo-own-all_gather]",
    ),
    Break(
        "4 no quiet hang: no fingerprint",
        "gradcomp/engine/engine.py",
        "            if new is not None and self.comm.world_size > 1:\n                self._agree(new, number, Channel.SCALE)\n",
        "",
        "tests/test_ddp.py::test_ranks_with_other_settings_get_peer_mismatch",
    ),
    Break(
        "4 no quiet hang: errors do not come out of backward",
        "gradcomp/ddp.py",
        "queue_callback(self._finish)",
        "queue_callback(lambda: None)",
        "tests/test_ddp.py::test_ranks_with_other_settings_get_peer_mismatch",
    ),
    Break(
        "5 nothing lost: residuals keyed by place in the bucket",
        "gradcomp/engine/engine.py",
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
        "                    bad |= self._transform_average()\n                    bad |= self._encode_average()\n",
        "                    bad |= self._encode_average()\n                    bad |= self._transform_average()\n",
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
        "gradcomp/exchange/bucket.py",
        "            self._nonfinite |= header.nonfinite\n",
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
        "gradcomp/exchange/bucket.py",
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
        "        if nbytes < HEADER_NBYTES + self.form.code_nbytes(header.numel):",
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
        "gradcomp/codecs/onebit.py",
        'return native.Payloads(addresses, "onebit", dtype)',
        'return native.Payloads(addresses, "onebit", 0)',
        "tests/test_fused.py::test_every_codec_and_exchange[3-onebit gather]",
    ),
]


def passes(folder: Path, test: str) -> bool:
    """Run one test against the package in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "not mpich and not openmpi",
        test,
    ]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode == 0


def main() -> int:
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="gradcomp-promises-") as name:
        folder = Path(name)
        for part in ("gradcomp", "tests", "native", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        sound = {test: passes(folder, test) for test in dict.fromkeys(b.test for b in BREAKS)}
        for item in BREAKS:
            path = folder / item.file
            whole = path.read_text()
            if not sound[item.test]:
                verdict = "its test fails even unbroken"
            elif item.old not in whole:
                verdict = "the change no longer applies"
            else:
                path.write_text(whole.replace(item.old, item.new, 1))
                verdict = "" if not passes(folder, item.test) else "BROKEN AND UNNOTICED"
                path.write_text(whole)
            unnoticed += bool(verdict)
            print(f"{'noticed' if not verdict else verdict:<30} {item.promise}", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
