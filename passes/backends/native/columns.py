"""Columns: what is read of the tensors of a group of parameters all at once, without a loop in Python for each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Columns:
    """Numbers of the tensors of a group, in the order of slots, one parameter after another."""

    def __init__(self, tensors: Sequence[Tensor], shared: Sequence[int], block: int) -> None:
        """`shared` has for each slot 1 if it has one word for each block of `block` elements of a row, else 0."""
        self.slots = len(shared)
        self.addresses = [*map(Tensor.data_ptr, tensors)]
        self.sizes = [*map(Tensor.numel, tensors)]
        self.dtypes = [t.dtype for t in tensors]
        self._shared = shared
        self._are_contiguous = all(map(Tensor.is_contiguous, tensors))
        first = shared.index(0)
        self.elements = self.sizes[first :: self.slots]
        """Elements of each parameter."""
        self.lengths, self.words = self.elements, self.elements
        """The lengths of the rows of each parameter, where blocks end; its blocks."""
        if block:
            shapes = [t.shape for t in tensors[first :: self.slots]]
            rows = [shape[-1] if shape else 1 for shape in shapes]
            self.words = [-(-n // block) * (size // max(n, 1)) for n, size in zip(rows, self.elements, strict=True)]
            # Rows of whole blocks are like one row.
            self.lengths = [n if n % block else size for n, size in zip(rows, self.elements, strict=True)]

    @property
    def are_alike(self) -> bool:
        """Returns True if all are contiguous, of one size, and those in each slot of one dtype."""
        return (
            self._are_contiguous
            and self.are_of_one_size
            and all(len({*self.dtypes[i :: self.slots]}) == 1 for i in range(self.slots if self.elements else 0))
        )

    @property
    def are_of_one_size(self) -> bool:
        """Returns True if the tensors of a parameter fit one another: a word for each element, or for each block."""
        return all(
            self.sizes[i :: self.slots] == (self.words if shared else self.elements)
            for i, shared in enumerate(self._shared)
        )
