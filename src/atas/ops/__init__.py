"""Fast implementations: CUDA graphs, numeric precision, Triton kernels. Everything else works without them.

Importing this package does not import Triton; `atas.ops.triton` does.
"""
