"""Deferred inputs as unmodified modules meet them: sequences and tensors that are fetched where they are used
(LegoDiffusion §4.3.2).

Owns the two stand-ins; must not know where their content comes from: whoever makes one hands it a function that
blocks until the tensor is there. A transformer indexes its ControlNet's residuals at the block that adds them, so
the blocks before run while the ControlNet still does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import torch


class LazyTensors(Sequence[Any]):
    """`length` tensors, each fetched by `fetch(index)` when first indexed, and kept from then on."""

    def __init__(self, length: int, fetch: Callable[[int], torch.Tensor]) -> None:
        self._length = length
        self._fetch = fetch
        self._fetched: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> LazyTensors: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | LazyTensors:
        if isinstance(index, slice):
            chosen = range(self._length)[index]
            return LazyTensors(len(chosen), lambda position: self[chosen[position]])
        if not -self._length <= index < self._length:
            raise IndexError(f"tensor {index} of {self._length}")
        index %= self._length
        if index not in self._fetched:
            self._fetched[index] = self._fetch(index)
        return self._fetched[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[index] for index in range(self._length))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensors:
        """The same, changed tensor by tensor when they are fetched."""
        return LazyTensors(self._length, lambda index: change(self[index]))


class LazyTensor:
    """One tensor, fetched by the first operation on it, whichever that is: `sample + lazy`, `lazy.shape`."""

    def __init__(self, fetch: Callable[[], torch.Tensor]) -> None:
        self._fetch = fetch
        self._fetched: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self._fetched is None:
            self._fetched = self._fetch()
        return self._fetched

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_real(args), **{name: _real(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)

    def __add__(self, other: Any) -> Any:
        return self.get() + other

    def __radd__(self, other: Any) -> Any:
        return other + self.get()

    def __sub__(self, other: Any) -> Any:
        return self.get() - other

    def __mul__(self, other: Any) -> Any:
        return self.get() * other

    def __rmul__(self, other: Any) -> Any:
        return other * self.get()

    def __truediv__(self, other: Any) -> Any:
        return self.get() / other

    def __matmul__(self, other: Any) -> Any:
        return self.get() @ other

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.get()[index]

    def __len__(self) -> int:
        return len(self.get())


def _real(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.get()
    if isinstance(value, (tuple, list)):
        return type(value)(_real(item) for item in value)
    return value


def map_tensors(
    values: Sequence[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
) -> Sequence[torch.Tensor]:
    """`change` of each tensor: of lazy ones when they are fetched."""
    return values.map(change) if isinstance(values, LazyTensors) else [change(value) for value in values]
