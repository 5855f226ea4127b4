"""The only door to compiled code: tables that kernels walk, and the kernel sets."""
