# The compiled module: cffi makes it from native/include/gradcomp.h.
# gradcomp.kernels.native is its only user.
from typing import Any

ffi: Any
lib: Any
