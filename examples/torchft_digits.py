"""Train LeNet in replica groups that come and go: torchft says who takes part in a step, gradcomp
averages compressed. No group starts again because another one is lost.

    torchft_lighthouse --min_replicas 1 --bind '[::]:29510' &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    for group in 0 1 2; do python examples/torchft_digits.py --group $group & done

End one of them with kill -9, and start it again: it gets weights, optimizer and second moments from
one of the others and takes part in the next step.
"""

import argparse
import datetime

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torchft import Manager, Optimizer, ProcessGroupGloo

from gradcomp.bench.data import load_digits
from gradcomp.bench.models import LeNet
from gradcomp.integrations.torchft import ManagedAverager

BATCH = 60  # of all groups, so that any number up to six can share it
TIMEOUT = datetime.timedelta(seconds=20)  # of every wait


def main() -> None:
    parser = argparse.ArgumentParser(description="Train LeNet in groups that come and go.")
    parser.add_argument("--group", type=int, required=True, help="number of this replica group")
    parser.add_argument("--codec", default="ternary", help="ternary, onebit, block4 ... (ternary)")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0, help="of weights and minibatches")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def load_state_dict(state: dict) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=1,  # fewest groups that a step needs
        replica_id=f"group_{args.group}",
        store_addr="localhost",  # torchrun has these four in the environment
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
    )
    averager = ManagedAverager(manager, model, args.codec, optimizer=optimizer)
    managed = Optimizer(manager, optimizer)
    data = load_digits()
    while (step := manager.current_step()) < args.steps:
        managed.zero_grad()  # asks who is there
        rank, groups = manager.participating_rank() or 0, max(1, manager.num_participants())
        draw = torch.Generator().manual_seed(1000 * args.seed + manager.current_step())
        chosen = torch.randint(len(data.train_labels), (BATCH,), generator=draw)[rank::groups]
        cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen]).backward()
        averager.average()
        managed.step()  # if the step counts
        if manager.current_step() > step:
            scheduler.step()
            print(f"group {args.group}: step {step} with {groups} groups", flush=True)
    with torch.no_grad():
        scores = model.eval()(data.test_images)
    right = (scores.argmax(dim=1) == data.test_labels).float().mean()
    print(f"group {args.group}: test accuracy {100 * right:.2f} %", flush=True)
    averager.close()
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
