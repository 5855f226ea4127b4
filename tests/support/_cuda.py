"""CUDA for ranks that share a GPU, which NCCL does not let them."""

from _device_group import register_group

register_group(__name__, "cuda")
