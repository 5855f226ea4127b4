"""Lossless split of fp32 weights into bf16 tops for the model and int16 trails for the optimizer.

References: Intel Extension for PyTorch, "Split SGD". The first 16 bits of an fp32 number are a
bf16 number (the top), the last 16 are the trail.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradcomp import kernels
from gradcomp.errors import UnsupportedTensor
from gradcomp.kernels import host

ROUNDINGS = ("truncate", "nearest")
SHIFT_NBYTES, PAGE_NBYTES = 832, 4096  # see `new_state`: 13 cache lines


def check_rounding(rounding: object) -> None:
    """Raise ValueError unless `rounding` is a known name."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, got {rounding!r}")


def check_dtype(tensor: Tensor, name: str, *dtypes: torch.dtype) -> None:
    """Raise UnsupportedTensor unless the dtype is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise UnsupportedTensor(f"{name} is {tensor.dtype}; {expected} expected")


def check_dense(tensor: Tensor, name: str) -> None:
    """Raise UnsupportedTensor unless a tensor is dense: strided, without gaps, in any order."""
    kernels.check_device(tensor.device, name)
    if tensor.device.type == "mps":
        raise UnsupportedTensor(
            f"{name} is on {tensor.device}, which has no float64, and exact updates need it: keep"
            " split weights on the CPU"
        )
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(f"{name} is {tensor.layout}; split optimizers take dense tensors")
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        raise UnsupportedTensor(
            f"{name} does not fill its memory (strides {tensor.stride()}): it is a slice or a view"
            " of something larger; call .contiguous() first, of a parameter p.data ="
            " p.data.contiguous()"
        )
    if tensor.is_neg():
        raise UnsupportedTensor(
            f"{name} is a negative view (is_neg(): its memory holds the opposite): "
            "call .resolve_neg() first, of a parameter p.data = p.data.resolve_neg()"
        )


def new_state(like: Tensor, dtype: torch.dtype, number: int, value: float = 0.0) -> Tensor:
    """Return a tensor filled with `value`, in the shape and strides of `like`, for use beside it.

    It begins `number` times 832 bytes (modulo 4096) after the start of its memory. Large tensors
    otherwise begin at the same offset in a 4 KB page, and tensors a multiple of 4 KB apart collide
    in the L1 cache.
    """
    offset = (number * SHIFT_NBYTES % PAGE_NBYTES) // dtype.itemsize
    memory = torch.full((offset + like.numel(),), value, dtype=dtype, device=like.device)
    return memory.as_strided(like.shape, like.stride(), offset)


def new_trail(top: Tensor) -> Tensor:
    """Return a zero trail for `top`, int16 with its shape and strides."""
    return new_state(top, torch.int16, 1)


def split(weight: Tensor, *, rounding: str = "truncate") -> tuple[Tensor, Tensor]:
    """Split an fp32 tensor; return (top, trail).

    Args:
        weight: any shape, float32, dense, on the CPU or an accelerator with float64.
        rounding: with "truncate" the top is the first 16 bits; with "nearest" it is `weight`
            rounded to bfloat16, ties away from zero. The trail is the last 16 bits in both cases.

    Returns:
        The top, bfloat16, and the trail, int16; new tensors in the shape and strides of `weight`.

    Raises:
        UnsupportedTensor: another dtype, device or layout.
        ValueError: an unknown `rounding`.
    """
    check_rounding(rounding)
    check_dense(weight, "weight")
    check_dtype(weight, "weight", torch.float32)
    top = torch.empty_like(weight, dtype=torch.bfloat16)
    trail = torch.empty_like(weight, dtype=torch.int16)
    write_split(weight, rounding, top, trail)
    return top, trail


def write_split(weight: Tensor, rounding: str, top: Tensor, trail: Tensor) -> None:
    """Split `weight` into the tensors `top` and `trail`, without checks."""
    kernels.of_weights(weight.device).split(weight, top, trail, nearest=rounding == "nearest")


def join(top: Tensor, trail: Tensor, *, rounding: str = "truncate") -> Tensor:
    """Join a top and its trail; return the fp32 weight as a new tensor.

    The result equals the argument of `split` in every bit, except that "nearest" makes signaling
    NaNs quiet.

    Args:
        top: bfloat16, dense, on the CPU or an accelerator with float64.
        trail: int16, in the shape of `top`.
        rounding: the same as for `split`.

    Raises:
        UnsupportedTensor: another dtype, device or layout.
        ValueError: an unknown `rounding`, or a trail of another shape.
    """
    check_rounding(rounding)
    check_dense(top, "top")
    check_dtype(top, "top", torch.bfloat16)
    check_dtype(trail, "trail", torch.int16)
    if trail.shape != top.shape:
        raise ValueError(f"trail has shape {tuple(trail.shape)}, top {tuple(top.shape)}")
    if (trail.stride(), trail.device) != (top.stride(), top.device):
        trail = torch.empty_like(top, dtype=torch.int16).copy_(trail)
    weight = torch.empty_like(top, dtype=torch.float32)
    kernels.of_weights(top.device).join(top, trail, weight, nearest=rounding == "nearest")
    return weight


def checksum(top: Tensor) -> int:
    """Return the CRC-32C of a top's bytes in memory order; it shows whether a trail matches."""
    flat = top.detach().as_strided((top.numel(),), (1,))
    return host.crc32c(flat.view(torch.uint8).cpu().numpy()) if flat.numel() else 0


class SplitParameters:
    """The parameters of a model after `split_parameters`; iterate over it, or pass it to a split
    optimizer.

    A trail waits until an optimizer adopts it: the optimizer that gets its parameter, in any list
    or group.

    Attributes:
        rounding: how tops were made, "truncate" or "nearest".
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], rounding: str) -> None:
        self.rounding = rounding
        self._named = named

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (p for _, p in self._named)

    def __len__(self) -> int:
        return len(self._named)

    def __repr__(self) -> str:
        return f"<SplitParameters: {len(self)} tensors, {len(self.waiting)} trails not adopted yet>"

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs, for parameter groups by name."""
        return iter(self._named)

    @property
    def waiting(self) -> list[str]:
        """Names of the parameters whose trails no optimizer has adopted."""
        found = [(name, waiting_trails.get(p)) for name, p in self._named]
        return [name for name, trail in found if trail is not None and trail.family is self]


class WaitingTrail(NamedTuple):
    """A trail that no optimizer has adopted, and the checksum of its top."""

    trail: Tensor
    checksum: int
    family: SplitParameters


waiting_trails: MutableMapping[nn.Parameter, WaitingTrail] = WeakIdKeyDictionary()
_owners: MutableMapping[nn.Parameter, weakref.ref[Any]] = WeakIdKeyDictionary()  # optimizers


def wait(parameter: nn.Parameter, trail: Tensor, checksum: int, rounding: str) -> None:
    """Register the trail of a released parameter for the next optimizer."""
    family = SplitParameters([("released", parameter)], rounding)
    waiting_trails[parameter] = WaitingTrail(trail, checksum, family)
    _owners.pop(parameter, None)


def adopt(optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Make an optimizer the owner of the trails of these parameters, waiting or new."""
    for parameter in parameters:
        waiting_trails.pop(parameter, None)
        if parameter.dtype == torch.bfloat16 and isinstance(parameter, nn.Parameter):
            _owners[parameter] = weakref.ref(optimizer)


def check_free(parameter: Tensor, name: str) -> None:
    """Raise ValueError if another optimizer owns a parameter's trail; warn if its owner is gone."""
    if (
        not isinstance(parameter, nn.Parameter)
        or parameter not in _owners
        or parameter in waiting_trails
    ):
        return
    if _owners[parameter]() is not None:
        raise ValueError(
            f"the trail of {name} belongs to another optimizer: call its release() first"
        )
    warnings.warn(
        f"the optimizer that had the trail of {name} is gone, and 16 bits of each weight with it:"
        " release() keeps them",
        stacklevel=4,
    )
    del _owners[parameter]


def split_parameters(
    model: nn.Module,
    *,
    predicate: Callable[[str, nn.Parameter], bool] | None = None,
    rounding: str = "truncate",
) -> SplitParameters:
    """Convert a model's fp32 parameters to bf16 in place; their last 16 bits become trails.

    Call it before you create the optimizer and DistributedDataParallel. Buffers and bf16 parameters
    are not changed; the trail of a bf16 parameter starts at zero. Tied parameters stay tied. The
    gradients of split parameters become None.

    Args:
        model: module with float32 or bfloat16 parameters, on the CPU or accelerators with float64;
            a trail is made on the device of its parameter.
        predicate: predicate(name, parameter) returns whether to split an fp32 parameter (default:
            all); the others stay fp32, for instance those of norms.
        rounding: as in `split`. Both values keep all 32 bits.

    Returns:
        All parameters, split or not, for a split optimizer.

    Raises:
        TypeError: a DistributedDataParallel model.
        UnsupportedTensor: a parameter of another dtype, device or layout; nothing is changed then.
        ValueError: an unknown `rounding`; a split parameter whose trail no optimizer has adopted.

    References:
        Split SGD (Intel Extension for PyTorch), "Stochastic Gradient Descent".
    """
    check_rounding(rounding)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "split_parameters must come before DistributedDataParallel, which fixes the dtype of"
            " its buckets"
        )
    named = list(model.named_parameters())
    for name, parameter in named:
        check_parameter(parameter, f"parameter {name!r}")
        if parameter in waiting_trails:
            raise ValueError(
                f"parameter {name!r} is split already and its trail waits for an optimizer"
            )
    family = SplitParameters(named, rounding)
    wide = [(name, p) for name, p in named if p.dtype == torch.float32]
    for parameter in [p for name, p in wide if predicate is None or predicate(name, p)]:
        trail = new_trail(parameter)
        top = torch.empty_like(parameter, dtype=torch.bfloat16, requires_grad=False)
        write_split(parameter.detach(), rounding, top, trail)
        parameter.data, parameter.grad = top, None
        waiting_trails[parameter] = WaitingTrail(trail, checksum(top), family)
    return family


def check_parameter(parameter: Tensor, name: str) -> None:
    """Raise UnsupportedTensor unless a split optimizer can train the parameter."""
    if parameter.dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedTensor(
            f"{name} is {parameter.dtype}; split optimizers take float32 and bfloat16 (load or keep"
            " the model in float32)"
        )
    if type(parameter.detach()) is not Tensor:
        raise UnsupportedTensor(
            f"{name} is a {type(parameter.detach()).__name__}; split optimizers take plain tensors"
        )
    check_dense(parameter.detach(), name)


def _owner_of(value: Any, optimizers: Any, name: str) -> Any:
    """Return the optimizer that has the trail of `value`, or None if that is no bf16 parameter."""
    if not isinstance(value, nn.Parameter) or value.dtype != torch.bfloat16:
        return None
    for optimizer in optimizers if isinstance(optimizers, Sequence) else [optimizers]:
        if optimizer.trail(value) is not None:
            return optimizer
    raise ValueError(
        f"{name!r} is bfloat16 and not in this optimizer: pass a list of all optimizers of the"
        " model"
    )


def fp32_state_dict(model: nn.Module, optimizer: Any) -> OrderedDict[str, Any]:
    """Return the model's state dict with every split weight joined to fp32, for a plain fp32 model.

    Joined weights are new tensors; tied weights share one tensor. All other tensors alias those of
    the model, as in ``model.state_dict()``.

    Args:
        model: the model that the optimizer trains, wrapped in DistributedDataParallel or not.
        optimizer: the split optimizer of the model, or a sequence of all its split optimizers.

    Raises:
        ValueError: a bfloat16 parameter that none of the optimizers has; a trail that belongs to
            other weights.
    """
    out: OrderedDict[str, Any] = OrderedDict()
    joined: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        owner = _owner_of(value, optimizer, name)
        if owner is None:
            out[name] = value.detach() if isinstance(value, Tensor) else value
            continue
        if id(value) not in joined:
            joined[id(value)] = owner.fp32(value)
        out[name] = joined[id(value)]
    return out


def load_fp32_state_dict(model: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load an fp32 state dict into split weights, tops and trails, without loss of a bit.

    Args:
        model: the model that the optimizer trains.
        optimizer: the split optimizer of the model, or a sequence of all its split optimizers;
            momentum and other optimizer state are not changed.
        state: the result of ``state_dict()`` of the fp32 model, or of `fp32_state_dict`.

    Raises:
        ValueError: missing or unexpected names, other shapes or dtypes, a bfloat16 parameter that
            none of the optimizers has; nothing is changed then.
    """
    own = model.state_dict(keep_vars=True)
    owners = {name: _owner_of(value, optimizer, name) for name, value in own.items()}
    missing, unexpected = own.keys() - state.keys(), state.keys() - own.keys()
    if missing or unexpected:
        what = f"misses {min(missing)!r}" if missing else f"has unexpected {min(unexpected)!r}"
        raise ValueError(f"this checkpoint {what}")
    for name, value in own.items():
        given = state[name]
        if not isinstance(value, Tensor):
            continue
        if not isinstance(given, Tensor) or given.shape != value.shape:
            shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(
                f"{name!r} has shape {shape} in this checkpoint, {tuple(value.shape)} in the model"
            )
        if given.is_floating_point() != value.is_floating_point() or given.is_complex():
            raise ValueError(
                f"{name!r} is {given.dtype} in this checkpoint, {value.dtype} in the model"
            )
    for name, owner in owners.items():
        if owner is not None:
            owner.set_fp32(own[name], state[name])
    rest = {name: state[name] for name, owner in owners.items() if owner is None}
    model.load_state_dict(rest, strict=False)
