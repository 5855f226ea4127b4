# The compiled module: cffi makes it from native/gradcomp.cdef.txt. gradcomp.kernels.native is its only user.
from typing import Any

ffi: Any
lib: Any
