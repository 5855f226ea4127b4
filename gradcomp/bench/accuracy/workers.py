"""N workers of data-parallel training in one process, exact to the bit of their averages.

The workers share one model, since replicas are equal; each has a minibatch, gradients and residuals
of its own. Gradients are averaged by the library's own exchange over threads (`LocalCommunicator`):
codec, both phases, residuals and random draws are those of N machines.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from gradcomp.averager import GradientAverager
from gradcomp.bench.accuracy.methods import Method
from gradcomp.comm.local import LocalCommunicator
from gradcomp.local import DiLoCo
from gradcomp.local.outer import LR, MOMENTUM
from gradcomp.memory.momentum import Momentum
from gradcomp.optim.momentum import MomentumExchange


class _Shared:
    """The optimizer of the one model, asked by one worker's averager about that worker's
    parameters.
    """

    def __init__(
        self, optimizer: MomentumExchange, shared: dict[nn.Parameter, nn.Parameter]
    ) -> None:
        self._optimizer, self._shared = optimizer, shared
        self.arrived: set[Tensor] | None = None

    def momentum_of(self, parameter: Tensor) -> tuple[Tensor, float] | None:
        found = self._optimizer.momentum_of(self._shared[parameter])  # type: ignore[index]
        self._optimizer.arrived = self._optimizer.arrived or set()
        self._optimizer.arrived.add(self._shared[parameter])  # type: ignore[index]
        return found

    def betas(self) -> list[float]:
        return self._optimizer.betas()

    def wants_gradients(self, step: int) -> bool:
        return self._optimizer.wants_gradients(step)


class Workers:
    """Averages the gradients of `count` workers that train `model`.

    Args:
        model: fp32, on the CPU. After `backward` its gradients are the averages.
        method: how gradients are averaged.
        count: number of workers.
        optimizer: of the model, if its momentum travels.

    Attributes:
        models: the one.
        sent_nbytes: bytes that one worker has sent, in both phases.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        count: int,
        optimizer: MomentumExchange | None = None,
    ) -> None:
        self.models = [model]
        self._model, self._method, self._count, self._optimizer = model, method, count, optimizer
        self.sent_nbytes = 0
        self._threads = ThreadPoolExecutor(count)
        self._named = list(model.named_parameters())
        self._own = [[nn.Parameter(p.detach()) for _, p in self._named] for _ in range(count)]
        self._averagers: list[GradientAverager] = []
        if method.codec is not None:
            for comm, own in zip(LocalCommunicator.group(count), self._own, strict=True):
                pairs = [(name, p) for (name, _), p in zip(self._named, own, strict=True)]
                options = method.options_for(self._named)
                if optimizer is not None:
                    shared = {p: shared for (_, shared), p in zip(self._named, own, strict=True)}
                    options["transform"] = Momentum(
                        _Shared(optimizer, shared),
                        optimizer.transform.options(),
                        packs_warm_up=optimizer.packs_warm_up,
                    )
                self._averagers.append(GradientAverager(pairs, method.codec, comm, **options))

    def backward(
        self, loss: Callable[[nn.Module, Any], Tensor], minibatches: Sequence[Any]
    ) -> float:
        """Replace the gradients of the model by their averages over all workers.

        Args:
            loss: of the model on one minibatch.
            minibatches: one for each worker.

        Returns:
            The mean loss.
        """
        total, buffers = 0.0, []
        self._model.train()
        for worker, minibatch in enumerate(minibatches):
            self._model.zero_grad()
            value = loss(self._model, minibatch)
            value.backward()  # type: ignore[no-untyped-call]
            total += value.item()
            for (_, shared), own in zip(self._named, self._own[worker], strict=True):
                own.grad = shared.grad
            if worker == 0:  # DDP broadcasts those of rank 0
                buffers = [b.clone() for b in self._model.buffers()]
        for buffer, first in zip(self._model.buffers(), buffers, strict=True):
            buffer.copy_(first)
        self._average()
        return total / self._count

    def end_step(self) -> None:
        """Nothing is exchanged after a step."""

    def close(self) -> None:
        """Stop the threads."""
        for averager in self._averagers:
            averager.close()
        self._threads.shutdown()

    def _average(self) -> None:
        if self._optimizer is not None:
            self._optimizer.arrived = set()
        if self._averagers:
            list(self._threads.map(GradientAverager.average, self._averagers))
            if not self._method.feedback:
                for averager in self._averagers:
                    averager.discard_step()  # residuals are zero again
            self.sent_nbytes = self._averagers[0].stats.bytes_sent
            first = self._own[0]
        else:
            first = self._average_plainly()
        for (_, shared), own in zip(self._named, first, strict=True):
            shared.grad = own.grad

    def _average_plainly(self) -> list[nn.Parameter]:
        """Average as an all_reduce of gradients cast to `Method.dtype` does: rounded before it,
        and after the sum.
        """
        first = self._own[0]
        for position, parameter in enumerate(first):
            if parameter.grad is not None:
                grads = [own[position].grad.to(self._method.dtype).float() for own in self._own]  # type: ignore[union-attr]
                parameter.grad = torch.stack(grads).mean(0).to(self._method.dtype).float()
                self.sent_nbytes += (
                    2
                    * (self._count - 1)
                    * parameter.numel()
                    * self._method.dtype.itemsize
                    // self._count
                )
        return first


class Apart:
    """Workers that train models of their own and exchange now and then what they have changed
    (`gradcomp.DiLoCo`).

    Args:
        model: fp32, on the CPU; that of the first worker. The others get copies.
        method: with `Method.local`.
        count: number of workers.
        optimizers: makes those of a model.

    Attributes:
        models, optimizers: of all workers.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        count: int,
        optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]],
    ) -> None:
        assert method.codec is not None
        self.models = [model, *(copy.deepcopy(model) for _ in range(count - 1))]
        made = [optimizers(one) for one in self.models]
        self.optimizers = [optimizer for each in made for optimizer in each]
        chosen = dict(method.local)
        rates = {
            "lr": chosen.pop("outer_lr", LR),
            "momentum": chosen.pop("outer_momentum", MOMENTUM),
        }
        options: dict[str, Any] = {
            **method.options_for(list(model.named_parameters())),
            "sync_every": chosen.pop("every"),
            "outer_optimizer": lambda anchors: torch.optim.SGD(
                anchors, **rates, nesterov=rates["momentum"] > 0
            ),
            **chosen,
        }
        self._threads = ThreadPoolExecutor(count)

        def join(comm: LocalCommunicator) -> DiLoCo:
            return DiLoCo(self.models[comm.rank], made[comm.rank], method.codec, comm, **options)  # type: ignore[arg-type]

        self._local = list(self._threads.map(join, LocalCommunicator.group(count)))

    @property
    def sent_nbytes(self) -> int:
        """Bytes that one worker has sent, those of averaged gradients at the start included."""
        first = self._local[0]
        return first.stats.bytes_sent + first.start_stats.bytes_sent

    def backward(
        self, loss: Callable[[nn.Module, Any], Tensor], minibatches: Sequence[Any]
    ) -> float:
        """Give every model the gradients of its minibatch, averaged before `start_step`; return
        the mean loss.
        """
        total = 0.0
        for model, minibatch in zip(self.models, minibatches, strict=True):
            model.train()
            model.zero_grad()
            value = loss(model, minibatch)
            value.backward()  # type: ignore[no-untyped-call]
            total += value.item()
        list(self._threads.map(DiLoCo.average_gradients, self._local))
        return total / len(self.models)

    def end_step(self) -> None:
        """Count a step, and exchange if it is time."""
        list(self._threads.map(DiLoCo.step, self._local))

    def close(self) -> None:
        """Bring all models to what was agreed on last; stop the threads."""
        list(self._threads.map(DiLoCo.restore, self._local))
        for local in self._local:
            local.close()
        self._threads.shutdown()
