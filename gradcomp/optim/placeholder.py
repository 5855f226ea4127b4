"""`Placeholder`: the tensor in `p.grad` while the averaged gradient is still packed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

# A signaling NaN for each dtype. Arithmetic never returns one, so other bits show that the gradient
# was changed in place.
_NAN = {
    torch.float32: (torch.int32, 0x7FA00000),
    torch.bfloat16: (torch.int16, 0x7FA0),
    torch.float16: (torch.int16, 0x7D00),
}
# Functions that write one value to every element.
_FILLS = {Tensor.zero_, torch.zero_, Tensor.fill_, torch.fill_, torch._foreach_zero_}


class Placeholder(Tensor):
    """A gradient that is NaN in every element; all elements share the memory of one.

    Its norm is NaN, and torch refuses to write to it in place, with two exceptions. Filling it with
    zeros, also through a view of the whole tensor (`.data`, `detach()`), replaces the parameter's
    `grad` by real zeros. Filling it with another value, or filling a part of it (a row, a mask),
    changes every element, and `intact` becomes False.
    """

    _parameter: weakref.ref[Tensor]

    @classmethod
    def stand_for(cls, parameter: Tensor) -> Placeholder:
        """Replace `parameter.grad` by a placeholder, and return it."""
        assert parameter.grad is not None
        integers, bits = _NAN[parameter.grad.dtype]
        nan = torch.full((), bits, dtype=integers, device=parameter.device)
        nan = nan.view(parameter.grad.dtype)
        placeholder = nan.expand(parameter.shape).as_subclass(cls)
        placeholder._parameter = weakref.ref(parameter)
        parameter.grad = placeholder
        return placeholder

    @property
    def intact(self) -> bool:
        """Whether no code has written to this placeholder."""
        with torch._C.DisableTorchFunctionSubclass():
            integers, bits = _NAN[self.dtype]
            return not self._version and self.as_strided((), ()).view(integers).item() == bits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`; its results are plain tensors, except for views of a whole placeholder."""
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            first = args[0] if args else None
            if func in _FILLS:
                for filled in first if isinstance(first, (list, tuple)) else [first]:
                    if isinstance(filled, cls):
                        filled._zero_gradient()
            elif isinstance(first, cls) and type(out) is Tensor and first._is_whole(out):
                out = out.as_subclass(cls)
                out._parameter = first._parameter
            return out

    def _is_whole(self, view: Tensor) -> bool:
        """Return whether `view` is a view of this whole tensor, in any shape."""
        if (view.layout, view.device, view.dtype) != (self.layout, self.device, self.dtype):
            return False
        same_size = view.numel() == self.numel()
        return same_size and view.as_strided((), ()).is_set_to(self.as_strided((), ()))

    def _zero_gradient(self) -> None:
        """Replace the parameter's `grad` by real zeros if this was filled with zeros."""
        parameter = self._parameter()
        if parameter is None or not isinstance(parameter.grad, Placeholder):
            return
        if self.as_strided((), ()).item() == 0:
            parameter.grad = torch.zeros_like(parameter, dtype=self.dtype, requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
