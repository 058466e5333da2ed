"""KV pages on their way between workers: gathered into a tensor store, and from one into reserved pages.

Owns how pages are cut into parts: few large tensors, each of some whole layers. Staging runs beside the
pass that computes the KV: as soon as a layer's keys and values are written, a thread gathers that layer's
pages while attention and the layers after it are computed. Must not know requests' lives or who fetches.
Pages of two backends are interchangeable if their `page_layout` is the same.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Protocol

import torch

from genserve.core.errors import TensorError, TransferFailed
from genserve.core.kv.parts import KvPart
from genserve.core.models.attention.backend import AttentionBackend, AttentionRule
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.tensors.ref import TensorRef

_log = logging.getLogger(__name__)

PART_BYTES = 4 << 20
# Smaller parts are gathered at once: waking a thread takes longer.
_INLINE_BYTES = 128 << 10
# Pages are copied as words: of bytes, torch's kernels are several times slower.
_WORD = 8
# From here on one copy a page is faster than the kernel for many rows.
_LARGE_ROW_BYTES = 64 << 10


class _Draft(Protocol):
    tensor: torch.Tensor

    def seal(self) -> TensorRef: ...

    def abandon(self) -> None: ...


class _Fetch(Protocol):
    def wait(self, timeout_s: float | None = None) -> torch.Tensor: ...

    def cancel(self) -> None: ...


class Store(Protocol):
    """What is used of `core.tensors.store.TensorStore`."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, holders: Sequence[str]) -> _Draft: ...

    def get(self, ref: TensorRef) -> _Fetch: ...

    def is_near(self, ref: TensorRef) -> bool: ...

    def check(self, ref: TensorRef) -> None: ...

    def release(self, ref: TensorRef, holder: str) -> None: ...


class KvTransfer:
    """Moves pages of `backend` through `store`, `num_layers` layers in all.

    `stage` belongs to the thread that runs passes; `fetch` and `release` may run on another at the same
    time, as long as no pass uses the pages that are fetched into.
    """

    def __init__(
        self,
        store: Store,
        backend: AttentionBackend,
        num_layers: int,
        part_bytes: int = PART_BYTES,
        timeout_s: float = 30.0,
    ) -> None:
        self._store = store
        self._backend = backend
        self._num_layers = num_layers
        self._part_bytes = part_bytes
        self._timeout_s = timeout_s
        self._rows = [
            [_rows(tensor) for tensor in backend.page_tensors(layer)] for layer in range(num_layers)
        ]
        self._page_bytes = [sum([_WORD * rows.shape[1] for rows in tensors]) for tensors in self._rows]
        self._layouts = [backend.page_layout(layer) for layer in range(num_layers)]
        self._gatherer = ThreadPoolExecutor(1, thread_name_prefix="genserve-staging")

    def stage(self, pages_of: Mapping[str, Sequence[int]]) -> Staging:
        """Keep these pages, by holder, as the coming pass leaves them. Run the pass over `Staging.backend`."""
        return Staging(self, self._backend, pages_of)

    def fetch(self, pages: Sequence[int], parts: Sequence[KvPart]) -> None:
        """Copy `parts` into `pages`. Blocks; raises `TensorError`, and what is in the pages then is nobody's."""
        end = 0
        for part in parts:
            if part.first_layer != end:
                raise TensorError(f"parts: layer {end} is missing")
            end = part.end_layer
            if part.layout != (layout := self._layout(part.first_layer, end)):
                raise TensorError(
                    f"parts: layers {part.first_layer} to {end} have the page layout {part.layout!r}, here {layout!r}"
                )
            wanted = len(pages) * sum(self._page_bytes[part.first_layer : end])
            if part.ref.nbytes != wanted:
                raise TensorError(
                    f"parts: {part.ref.nbytes} bytes for {len(pages)} pages of layers {part.first_layer} to "
                    f"{end}, which here take {wanted}"
                )
        if end != self._num_layers:
            raise TensorError(f"parts: {end} layers of {self._num_layers}")
        under_way: deque[_Fetch] = deque()
        try:
            for at, part in enumerate(parts):
                # One part ahead: the next comes over the network while this one is copied.
                under_way.extend(self._store.get(each.ref) for each in parts[at + len(under_way) : at + 2])
                self._copy(pages, part.first_layer, part.end_layer, self._arrived(under_way[0]), out=False)
                # Near parts were read in place, and may have been given up meanwhile.
                if self._store.is_near(part.ref):
                    self._store.check(part.ref)
                under_way.popleft()
        finally:
            for fetch in under_way:
                fetch.cancel()

    def _arrived(self, fetch: _Fetch) -> torch.Tensor:
        try:
            return fetch.wait(self._timeout_s)
        except TimeoutError as error:
            raise TransferFailed(f"nothing came for {self._timeout_s:g} s") from error

    def release(self, holder: str, parts: Sequence[KvPart]) -> None:
        """`holder`'s parts, staged here, are fetched or no longer wanted."""
        for part in parts:
            self._store.release(part.ref, holder)

    def _layout(self, first_layer: int, end_layer: int) -> str:
        runs = groupby(self._layouts[first_layer:end_layer])
        return "; ".join([f"{len(list(run))} x {layout}" for layout, run in runs])

    def _copy(
        self, pages: Sequence[int], first_layer: int, end_layer: int, flat: torch.Tensor, *, out: bool
    ) -> None:
        """Between pages and their gathered bytes: into `flat`, or out of it into the pages."""
        words = flat.view(torch.int64)
        at = 0
        for layer in range(first_layer, end_layer):
            for rows in self._rows[layer]:
                width = rows.shape[1]
                gathered = words[at : at + len(pages) * width].view(len(pages), width)
                at += gathered.numel()
                if out and rows.is_cpu:
                    torch.index_select(rows, 0, torch.as_tensor(pages), out=gathered)
                elif out:
                    gathered.copy_(rows.index_select(0, torch.as_tensor(pages, device=rows.device)))
                elif rows.is_cpu and width * _WORD >= _LARGE_ROW_BYTES:
                    for page, row in zip(pages, gathered.unbind(0), strict=True):
                        rows[page].copy_(row)
                else:
                    ids = torch.as_tensor(pages, device=rows.device)
                    rows.index_copy_(0, ids, gathered.to(rows.device))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """`[num_pages, words]`, sharing memory. A page of 16 tokens is whole words whatever its type."""
    return tensor.view(len(tensor), -1).view(torch.int64)


def _done(gather: Callable[[], None]) -> Future[None]:
    """`gather`, called at once."""
    future: Future[None] = Future()
    try:
        gather()
        future.set_result(None)
    except Exception as error:
        future.set_exception(error)
    return future


class _Part:
    """One part being filled."""

    __slots__ = ("draft", "end_layer", "filled", "first_layer")

    def __init__(self, first_layer: int, end_layer: int, draft: _Draft) -> None:
        self.first_layer, self.end_layer, self.draft = first_layer, end_layer, draft
        self.filled: Future[None] | None = None


class Staging:
    """The parts of one pass. Then for each holder either `take` or `drop`."""

    def __init__(
        self, transfer: KvTransfer, backend: AttentionBackend, pages_of: Mapping[str, Sequence[int]]
    ) -> None:
        self._transfer = transfer
        self._pages_of = pages_of
        self._parts: dict[str, list[_Part]] = {}
        self._ending: dict[int, list[tuple[str, _Part]]] = {}
        for holder in pages_of:
            self._allocate(holder)
        self.backend: AttentionBackend = _Watched(backend, self._layer_written)

    def _allocate(self, holder: str) -> None:
        transfer, num_pages = self._transfer, len(self._pages_of[holder])
        parts = self._parts[holder] = []
        first, size = 0, 0
        for layer, page_bytes in enumerate(transfer._page_bytes):
            size += num_pages * page_bytes
            if size < transfer._part_bytes and layer + 1 < transfer._num_layers:
                continue
            try:
                draft = transfer._store.allocate((size,), torch.uint8, (holder,))
            except TensorError as error:
                _log.warning("KV of %s is not staged: %s", holder, error)
                self.drop(holder)
                return
            parts.append(_Part(first, layer + 1, draft))
            first, size = layer + 1, 0
        for part in parts:
            self._ending.setdefault(part.end_layer, []).append((holder, part))

    def _layer_written(self, layer: int) -> None:
        for holder, part in self._ending.pop(layer + 1, ()):
            tensor = part.draft.tensor
            gather = partial(
                self._transfer._copy,
                self._pages_of[holder],
                part.first_layer,
                part.end_layer,
                tensor,
                out=True,
            )
            part.filled = (
                _done(gather) if tensor.nbytes < _INLINE_BYTES else self._transfer._gatherer.submit(gather)
            )

    def take(self, holder: str) -> tuple[KvPart, ...] | None:
        """The holder's parts once the pass has ended, or None if they could not be kept."""
        parts = self._parts.get(holder)
        if parts is None:
            return None
        transfer = self._transfer
        taken: list[KvPart] = []
        filled = [part.filled for part in parts if part.filled is not None]
        assert len(filled) == len(parts), "the pass did not write every layer"
        try:
            for part, gathered in zip(parts, filled, strict=True):
                gathered.result()
                first, end = part.first_layer, part.end_layer
                taken.append(KvPart(first, end, part.draft.seal(), transfer._layout(first, end)))
        except Exception as error:  # the request goes on without its KV, and nobody else is concerned
            _log.warning("KV of %s is not staged: %s", holder, error, exc_info=error)
            self.drop(holder)
            transfer.release(holder, taken)
            return None
        del self._parts[holder]
        return tuple(taken)

    def drop(self, holder: str) -> None:
        """Give up what is staged for `holder`."""
        for part in self._parts.pop(holder, ()):
            if part.filled is not None:
                part.filled.exception()  # it must not write any longer
            part.draft.abandon()

    def close(self) -> None:
        """Give up whatever was not taken."""
        for holder in list(self._parts):
            self.drop(holder)


class _Watched:
    """A backend that tells when a layer's keys and values have been written."""

    def __init__(self, backend: AttentionBackend, written: _LayerWritten) -> None:
        self._backend = backend
        self._written = written

    @property
    def num_bytes(self) -> int:
        return self._backend.num_bytes

    def page_tensors(self, layer: int) -> Sequence[torch.Tensor]:
        return self._backend.page_tensors(layer)

    def page_layout(self, layer: int) -> str:
        return self._backend.page_layout(layer)

    def write(self, layer: int, key_THD: torch.Tensor, value_THD: torch.Tensor, batch: PagedBatch) -> None:
        self._backend.write(layer, key_THD, value_THD, batch)
        self._written(layer)

    def attend(
        self, layer: int, query_THD: torch.Tensor, batch: PagedBatch, rule: AttentionRule
    ) -> torch.Tensor:
        return self._backend.attend(layer, query_THD, batch, rule)


class _LayerWritten(Protocol):
    def __call__(self, layer: int) -> None: ...
