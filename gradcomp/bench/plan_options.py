"""The options of the planner's command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradcomp.arguments import Parser
from gradcomp.plan.accuracy import TOLERANCES
from gradcomp.plan.costs import METHODS

DESCRIPTION = """\
Seconds of a training step over node counts for fp32, bf16, ternary and 1-bit gradients, and
whether to compress.

Times are written like 0.1ms or 50us, rates like 100mbit or 10gbit; named links have a latency of
their own (wan, 1gbe, 10gbe, 25gbe, 100gbe, infiniband).
"""
EXAMPLES = """\
examples:
  VGG-16 on machines that compute 10 TFLOP/s, 1 Gbit/s Ethernet:
    python -m gradcomp.plan --model vgg16 --link 1gbit --latency 0.1ms --nodes 1:64

  the same with a measured 12 ms a sample and 30 ms an update (time your own training step on one
  node for these):
    python -m gradcomp.plan --model vgg16 --link 1gbe --nodes 1:64 --frame-time 12ms \\
      --update-time 30ms

  one's own model, from [[name, [dimensions]], ...]; a tenth of the nodes twice as slow, 5 % of
  jitter:
    python -m gradcomp.plan --shapes shapes.json --link 10gbe --nodes 2,4,8 --jitter 0.05 \\
      --stragglers 0.1:2

  only 1-bit against fp32, exchanged in halves as Seide et al. did, with a picture:
    python -m gradcomp.plan --model bert --link 10gbe --nodes 1:256 --codec fp32,onebit \\
      --double-buffering --plot plan.png

  recommended is only what keeps within 0.02 nats of fp32 under AdamW, as far as that was measured:
    python -m gradcomp.plan --model gpt2 --link 1gbe --nodes 1:16 --optimizer adamw

  nodes of 8 ranks that share a link of 25 Gbit/s: is averaging inside nodes first worth it?
    python -m gradcomp.plan --model bert --link 25gbe --nodes 1:16 --ranks-per-node 8 \\
      --inside 100gbit

  machines in different buildings: 30 local steps, then an exchange that may be 5 steps late
    python -m gradcomp.plan --model gpt2 --link 100mbit --latency 10ms --nodes 2:8 \\
      --codec fp32,terngrad --every 30 --delay 5

  what this machine can do, with 2 ranks that measure at once; and how far predictions are off:
    python -m gradcomp.plan --measure --ranks 2
    python -m gradcomp.plan --validate
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of the planner."""
    parser = Parser(
        prog="python -m gradcomp.plan",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "--model",
        metavar="NAME",
        help=(
            "name of a published model: LeNet, ResNet-50, VGG-16, BERT-base or GPT-2 small "
            "(default: resnet50)"
        ),
    )
    what.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE.json",
        help=(
            "file with the shapes of your own model, in place of --model: [[name, "
            "[dimensions]], ...]"
        ),
    )
    what.add_argument(
        "--minibatch",
        type=float,
        metavar="N",
        help="samples of a step over all nodes (default: 256)",
    )
    what.add_argument(
        "--weak",
        action="store_true",
        help="take --minibatch as the samples of each rank (weak scaling)",
    )
    what.add_argument(
        "--frame-time",
        metavar="TIME",
        help=(
            "time of forward and backward of one sample on one rank, such as 12ms (default: "
            "computed from --flops)"
        ),
    )
    what.add_argument(
        "--flops",
        type=float,
        metavar="F",
        help=(
            "floating-point operations per second that a rank sustains, in place of "
            "--frame-time (default: 1e13)"
        ),
    )
    what.add_argument(
        "--update-time",
        metavar="TIME",
        help="time of one optimizer step, such as 30ms (default: 0.2 ns per value of the model)",
    )
    what.add_argument(
        "--post-time",
        metavar="TIME",
        help="time of work on gradients that ranks share, such as AdaGrad (default: 0)",
    )
    what.add_argument(
        "--optimizer",
        metavar="NAME",
        help=(
            "optimizer of the training, such as adamw, sgd or lamb, or other: codecs that lost "
            "accuracy under it, or were not measured under it, are not recommended (default: "
            "none; only codecs that are safe for every optimizer are recommended)"
        ),
    )
    what.add_argument(
        "--by-seconds",
        action="store_true",
        help=(
            "without --optimizer, recommend the fastest codec, whatever accuracy it loses; "
            "--codec does the same for the codecs that it names"
        ),
    )
    what.add_argument(
        "--tolerance",
        type=float,
        metavar="NATS",
        help=(
            "largest loss over fp32 that is accepted, in nats, with --optimizer (default: "
            f"{TOLERANCES['nats']})"
        ),
    )
    what.add_argument(
        "--tolerance-points",
        type=float,
        metavar="POINTS",
        help=(
            "largest loss of test accuracy that is accepted, in points, where accuracy was "
            f"measured, as under SGD (default: {TOLERANCES['points']})"
        ),
    )
    what.add_argument(
        "--bucket-cap-mb",
        type=float,
        metavar="MIB",
        help=(
            "bucket size of DDP, in MiB (default: that of DDP, 1 for the first bucket and 25 "
            "for the others)"
        ),
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--link",
        metavar="RATE",
        help=(
            "rate of the link of every node, such as 100mbit or 10gbit, or the name of a link: "
            "wan, 1gbe, 10gbe, 25gbe, 100gbe, infiniband (default: 1gbe)"
        ),
    )
    where.add_argument(
        "--latency",
        metavar="TIME",
        help=(
            "time that a message takes, whatever its size, such as 0.1ms (default: that of a "
            "named link, else 0)"
        ),
    )
    where.add_argument(
        "--ranks-per-node",
        type=int,
        default=1,
        metavar="L",
        help=(
            "ranks that share the link of a node; above 1 hierarchical exchanges are compared, "
            "too (default: 1)"
        ),
    )
    where.add_argument(
        "--inside",
        metavar="RATE",
        help="rate between ranks of one node, such as 100gbit (default: infinite)",
    )
    where.add_argument(
        "--nodes",
        metavar="A:B",
        help=(
            "numbers of nodes to compare: A:B doubles from A to B, A:B:STEP adds STEP, 2,4,6 is "
            "a list (default: 1:64)"
        ),
    )
    where.add_argument(
        "--cores",
        type=float,
        help=(
            "cores of a rank; with fewer than 2, codecs take time from the backward pass "
            "(default: 2, or as measured)"
        ),
    )
    where.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        metavar="SIGMA",
        help="standard deviation of the logarithm of the computing time of a node (default: 0)",
    )
    where.add_argument(
        "--stragglers",
        metavar="SHARE:FACTOR",
        help=(
            "share of slow nodes and how much longer they compute: 0.1:2 is a tenth of the "
            "nodes at half speed (default: none)"
        ),
    )
    where.add_argument("--seed", help=argparse.SUPPRESS)  # refused by name
    how = parser.add_argument_group("how gradients are exchanged")
    how.add_argument(
        "--codec",
        metavar="A,B",
        help=(
            "codecs to compare, out of "
            f"{', '.join(dict.fromkeys(m.name.split()[0] for m in METHODS))}; one of them may "
            "then be recommended although it loses accuracy (default: all)"
        ),
    )
    how.add_argument(
        "--every",
        type=int,
        metavar="H",
        help=(
            "compare exchanges after H local steps, too (gradcomp.DiLoCo); a step is then one "
            "H-th of H steps and one exchange (default: exchange at every step)"
        ),
    )
    how.add_argument(
        "--fragments",
        type=int,
        default=1,
        metavar="K",
        help="with --every, number of parts of the model that are exchanged in turn (default: 1)",
    )
    how.add_argument(
        "--delay",
        type=int,
        default=0,
        metavar="D",
        help="with --every, steps that go on while a part is exchanged (default: 0)",
    )
    how.add_argument(
        "--exchange",
        metavar="A,B",
        help=(
            "exchanges to compare, out of all_reduce, all_gather, reduce_scatter and "
            "hierarchical (default: all)"
        ),
    )
    how.add_argument(
        "--double-buffering",
        action="store_true",
        help="exchange one half of a minibatch while the other half is computed",
    )
    how.add_argument(
        "--rates",
        type=Path,
        metavar="FILE",
        help=(
            "file with the CPU seconds of the codecs, written by --json (default: measured "
            "here, three times)"
        ),
    )
    out = parser.add_argument_group("what is written")
    out.add_argument("--json", type=Path, metavar="FILE", help="write every number to this file")
    out.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw seconds per step against nodes into this file (PNG, SVG or PDF)",
    )
    cluster = parser.add_argument_group("on the cluster at hand")
    cluster.add_argument(
        "--measure",
        action="store_true",
        help="measure computing, codecs and links on the ranks at hand, and use these figures",
    )
    cluster.add_argument(
        "--adagrad",
        action="store_true",
        help=(
            "with --measure, take the measured time of AdaGrad on averaged gradients as --post-time"
        ),
    )
    cluster.add_argument(
        "--validate",
        action="store_true",
        help="compare predicted with measured steps on this machine",
    )
    cluster.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="with --measure, start N ranks on this machine (default: use those of the launcher)",
    )
    return parser
