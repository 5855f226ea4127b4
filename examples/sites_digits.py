"""Train LeNet at sites that come and go, with local steps: no site starts again because another one
is lost.

    python -m gradcomp.local --sites 3 &
    for site in paris tokyo lima; do python examples/sites_digits.py --site $site & done

End one of the sites with kill -9, and start it again: the others go on without it, and it takes the
newest weights from one of them.
"""

import argparse
import math
import zlib

import torch
from torch.nn.functional import cross_entropy

from gradcomp.bench.data import load_digits
from gradcomp.bench.models import LeNet
from gradcomp.local import ElasticDiLoCo

BATCH, LR = 20, 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description="Train LeNet at sites that come and go.")
    parser.add_argument("--site", required=True, help="name of this site")
    parser.add_argument(
        "--coordinator",
        default="localhost:29400",
        help="address of python -m gradcomp.local (%(default)s)",
    )
    parser.add_argument(
        "--codec",
        default="terngrad",
        help="terngrad, ternary, bf16 ...; terngrad needs a smaller learning rate than the others"
        " if gradients are averaged every step (%(default)s)",
    )
    parser.add_argument("--syncs", type=int, default=60, help="syncs of the run (60)")
    parser.add_argument("--every", type=int, default=10, help="inner steps between syncs (10)")
    parser.add_argument("--late", default="add", help="add or drop a late change (add)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and minibatches")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)
    data = load_digits()
    draw = torch.Generator().manual_seed(zlib.crc32(f"{args.site} {args.seed}".encode()))
    with ElasticDiLoCo(
        model,
        optimizer,
        args.codec,
        coordinator=args.coordinator,
        sync_every=args.every,
        outer_optimizer=lambda anchors: torch.optim.SGD(anchors, lr=1.0),  # the mean of the weights
        name=args.site,
        late=args.late,
    ) as local:
        print(f"{args.site}: begins after sync {local.syncs}", flush=True)
        while (syncs := local.syncs) < args.syncs:
            for group in optimizer.param_groups:  # a site that comes late has the others' rate
                group["lr"] = LR * (1 + math.cos(math.pi * syncs / args.syncs)) / 2
            chosen = torch.randint(len(data.train_labels), (BATCH,), generator=draw)
            optimizer.zero_grad()
            cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen]).backward()
            optimizer.step()
            if local.syncs > syncs:
                print(f"{args.site}: sync {local.syncs} of {', '.join(local.members)}", flush=True)
    with torch.no_grad():
        scores = model.eval()(data.test_images)
    right = (scores.argmax(dim=1) == data.test_labels).float().mean()
    print(f"{args.site}: test accuracy {100 * right:.2f} %", flush=True)


if __name__ == "__main__":
    main()
