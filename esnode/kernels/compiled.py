"""The law in torch, compiled by torch.compile: for a GPU whose Triton cannot compile our own kernels.

The `reference` backend with its three long functions compiled; the rest is a few operations an element. The
first calls compile, which takes seconds on a GPU and up to a minute on a CPU, and every size after that is
the same code. Whether the bits are the law's is for the self-test to say: `pick` falls back to `reference`
where it fails or nothing can be compiled. May import torch and `protocol`; called through `pick`.
"""

from __future__ import annotations

import torch

from esnode.kernels import reference


class CompiledKernels(reference.ReferenceKernels):
    """See `interface.Kernels`. Threads are torch's own; `threads` is accepted and changes nothing."""

    name = "compiled"
    chunk = 1 << 22  # a launch for each operation: few large ones

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self._words = torch.compile(reference.words, dynamic=True, fullgraph=True)
        self._integers = torch.compile(reference.integers, dynamic=True, fullgraph=True)
        self._digest = torch.compile(reference.digest, dynamic=True, fullgraph=True)
