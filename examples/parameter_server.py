"""Train LeNet with packed gradients through a parameter server: the TernGrad step.

    # 2 workers and a server as threads of one process
    python examples/parameter_server.py --local 2
    python -m gradcomp.launch -n 3 examples/parameter_server.py  # under MPI: the last rank serves
    torchrun --nproc-per-node 3 examples/parameter_server.py

Each step the workers agree on the largest |gradient| of every layer (reduce method "max"), encode
with those scales in 2 bits a value, push the payloads, and pull their average. In the first step
the average is compared with what `gradcomp.all_reduce` makes of the same gradients: they are equal
bit for bit.
"""

import argparse
import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import rich.progress
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import gradcomp
from gradcomp.bench.data import ImageData, load
from gradcomp.bench.models import LeNet
from gradcomp.comm import Communicator, LocalCommunicator, MpiCommunicator, TorchCommunicator
from gradcomp.server import ParameterClient, serve

CODEC = gradcomp.TernGrad(clip_sigma=None, scale="shared", seed=0)
MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK")


def main() -> None:
    args = parse()
    data = load(args.data)
    torch.manual_seed(0)
    model = LeNet()  # with the same weights in every process
    if args.local:
        torch.set_num_threads(1)
        group = LocalCommunicator.group(args.local + args.servers)
        run_threads(group, lambda comm: run(comm, copy.deepcopy(model), data, args))
        return
    comm: Communicator
    if any(name in os.environ for name in MPI_VARIABLES):
        comm = MpiCommunicator()
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        torch.distributed.init_process_group("gloo")
        comm = TorchCommunicator()
    else:
        sys.exit("start it with --local N, or under mpirun or torchrun")
    try:
        run(comm, model, data, args)
    finally:
        comm.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train LeNet through a parameter server with 2-bit gradients."
    )
    parser.add_argument(
        "--local",
        type=int,
        metavar="N",
        help="N workers and the servers as threads of this process",
    )
    parser.add_argument("--servers", type=int, default=1, help="the last ranks serve")
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of MNIST's IDX files (default: scikit-learn's digits)",
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64, help="images a step over all workers")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument(
        "--compressed", action="store_true", help="pull the average in 2 bits a value as well"
    )
    return parser.parse_args()


def run(comm: Communicator, model: LeNet, data: ImageData, args: argparse.Namespace) -> None:
    """Serve, or train as one of the workers."""
    workers = comm.world_size - args.servers
    if comm.rank >= workers:
        serve(comm, args.servers)
        return
    with ParameterClient(comm, args.servers) as client:
        train(client, comm.rank, workers, model, data, args)


def train(
    client: ParameterClient,
    rank: int,
    workers: int,
    model: LeNet,
    data: ImageData,
    args: argparse.Namespace,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    step_of_terngrad = TernGradStep(client, model, rank, compressed=args.compressed)
    batches = share_of_batches(len(data.train_labels), args.batch, rank, workers)
    verdict = ""
    with rich.progress.Progress(disable=rank != 0) as bar:
        for step in bar.track(range(args.steps), description="training"):
            chosen = next(batches)
            optimizer.zero_grad()
            cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen]).backward()
            if step == 0:
                verdict = check(client, step_of_terngrad, rank, workers)
            step_of_terngrad.average(step)
            optimizer.step()
    if rank == 0:
        print(f"step 1: the server's average {verdict}")
        print(
            f"{step_of_terngrad.ratio():.1f} times fewer bytes than fp32, to the servers and back"
        )
        print(f"test accuracy {accuracy(model, data):.2f} %", flush=True)


class TernGradStep:
    """Replaces the gradients of a model by their average over all workers.

    References:
        Wen et al. 2017, TernGrad, algorithm 1 with a parameter server.
    """

    def __init__(
        self, client: ParameterClient, model: torch.nn.Module, rank: int, *, compressed: bool
    ) -> None:
        self.client, self.rank, self.compressed = client, rank, compressed
        self.parameters = list(model.parameters())
        self.steps = self.nbytes = 0
        client.init_parameter("max_abs_grad", [len(self.parameters)], "float32")
        for index, parameter in enumerate(self.parameters):
            client.init_parameter(
                f"grad {index}", [CODEC.payload_nbytes(parameter.numel())], "uint8", codec=CODEC
            )

    def pull(self, step: int, *, compressed: bool) -> list[Tensor]:
        """Return the average gradients, flat float32."""
        client, grads = self.client, [p.grad for p in self.parameters]
        client.push_parameter("max_abs_grad", torch.stack([g.abs().max() for g in grads]))
        scales = client.pull_parameter("max_abs_grad", reduce_method="max")
        calls = []
        for index, (grad, scale) in enumerate(zip(grads, scales, strict=True)):
            # each worker its own rank: its own draws
            key = gradcomp.codecs.RngKey(CODEC.seed, self.rank, step, index)
            payload = CODEC.encode(grad, scale=scale, key=key)
            # travels while the next one is encoded
            push = client.push_parameter(f"grad {index}", payload, wait=False)
            pull = client.pull_parameter(
                f"grad {index}", "decode_average", compressed=compressed, wait=False
            )
            calls.append((push, pull))
        pulled = []
        for push, pull in calls:
            push.wait()
            pulled.append(pull.wait())
        return [CODEC.decode(average) for average in pulled] if compressed else pulled

    def average(self, step: int) -> None:
        before = self.client.bytes_sent + self.client.bytes_received
        for parameter, average in zip(
            self.parameters, self.pull(step, compressed=self.compressed), strict=True
        ):
            parameter.grad.copy_(average.view_as(parameter))
        self.nbytes += self.client.bytes_sent + self.client.bytes_received - before
        self.steps += 1

    def ratio(self) -> float:
        """Return how many times fewer bytes have moved than with fp32 gradients and fp32
        averages.
        """
        return 8 * sum(p.numel() for p in self.parameters) * self.steps / self.nbytes


def check(client: ParameterClient, step: TernGradStep, rank: int, workers: int) -> str:
    """Compare the server's average of the current gradients with that of `gradcomp.all_reduce`."""
    got = step.pull(0, compressed=False)
    flat = torch.cat([p.grad.reshape(-1) for p in step.parameters])
    everyone = []
    for worker in range(workers):  # each worker's gradients to all, as a sum with zeros
        client.init_parameter(f"check {worker}", flat.shape)
        client.push_parameter(f"check {worker}", flat if worker == rank else torch.zeros_like(flat))
        everyone.append(client.pull_parameter(f"check {worker}", "sum"))
    if workers == 1:
        return "is not compared: with one rank all_reduce passes gradients through"
    numels = [p.numel() for p in step.parameters]
    wanted: list[Tensor] = []

    def reduce(comm: LocalCommunicator) -> None:
        grads = [g.clone() for g in torch.split(everyone[comm.rank], numels)]
        for index, grad in enumerate(grads):
            gradcomp.all_reduce(grad, CODEC, comm=comm, key=index, step=0)
        if comm.rank == 0:
            wanted.extend(grads)

    run_threads(LocalCommunicator.group(workers), reduce)
    if not all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(got, wanted, strict=True)
    ):
        raise SystemExit("the server's average differs from gradcomp.all_reduce")
    return "equals gradcomp.all_reduce bit for bit"


# ---- data and threads ----------------------------------------------------------------------------


def share_of_batches(count: int, batch: int, rank: int, workers: int) -> Iterator[Tensor]:
    """Yield this worker's image numbers of every step; all workers draw the same permutations."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(count, generator=generator)
        for whole in order.split(batch)[: count // batch]:
            yield whole[rank::workers]


@torch.no_grad()
def accuracy(model: LeNet, data: ImageData) -> float:
    scores = torch.cat([model(some) for some in data.test_images.split(500)])
    return 100 * float((scores.argmax(dim=1) == data.test_labels).float().mean())


def run_threads(group: list[LocalCommunicator], work: Callable[[LocalCommunicator], None]) -> None:
    """Play every rank in a thread; end with the first error, and let no rank wait for one that
    has failed.
    """
    errors: list[BaseException] = []

    def play(comm: LocalCommunicator) -> None:
        try:
            work(comm)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            errors.append(error)
            comm.abort()

    threads = [threading.Thread(target=play, args=(comm,)) for comm in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


if __name__ == "__main__":
    main()
