"""Steps as SGLang states them, turned into Folio's batches: lengths, and lists of pages or slots.

Keys and values of new tokens are in the pool before attention reads it, so every mode is one form: the last `qo_len` of
a request's `kv_len` tokens are its queries. Nothing loops over requests, and nothing waits for a device.
"""

from dataclasses import dataclass, field
from typing import Any

import folio
import torch


@dataclass(frozen=True, eq=False)
class Batch:
    """A step.

    Attributes:
        batch_size, num_tokens: requests, and query rows.
        max_qo_len: query rows of the longest request.
        qo_indptr: `[batch_size + 1]` int32
        kv_len: `[batch_size]` int32, new tokens included.
        kv_indptr, kv_indices: pages of `page_size` slots, listed by request; int32.
        mask: arguments of the runs that say which keys a row sees.
        graph: whether the tensors stay where they are, for graphs that are replayed.
        encoder: the same rows over the keys of an encoder, where the model has one.
        window: the same step over the pool of layers with a window, where they have one of their own.
        tree: drafts of a tree over one another, where the step itself is over what comes before them. As `planned`,
            with a request for each draft: one row, which sees the slots of its ancestors and its own.
    """

    batch_size: int
    num_tokens: int
    max_qo_len: int
    page_size: int
    qo_indptr: torch.Tensor
    kv_len: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    mask: dict[str, Any] = field(default_factory=lambda: dict(mask_mode="causal"))
    graph: bool = False
    encoder: "Batch | None" = None
    window: "Batch | None" = None
    tree: dict[str, torch.Tensor] | None = None

    def planned(self) -> dict[str, torch.Tensor]:
        """The arguments of a handle's plan."""
        return dict(qo_indptr=self.qo_indptr, kv_len=self.kv_len, kv_indptr=self.kv_indptr, kv_indices=self.kv_indices)


class Buffers:
    """Memory for the lengths and lists of steps: fresh for each step, or the same for all steps of graphs."""

    def __init__(self, device: torch.device, max_batch_size: int = 0, max_pages: int | None = None):
        self._device = device
        self._fixed = max_pages is not None
        if self._fixed:
            self._qo_indptr, self._kv_indptr = (self._new(max_batch_size + 1) for _ in range(2))
            self._kv_len, self._kv_indices = self._new(max_batch_size), self._new(max_pages)

    def _new(self, extent: int) -> torch.Tensor:
        return torch.zeros(extent, dtype=torch.int32, device=self._device)

    def of(self, batch_size: int, num_pages: int) -> dict[str, torch.Tensor]:
        """`qo_indptr`, `kv_len`, `kv_indptr` and `kv_indices` with room for a step."""
        if not self._fixed:
            room = dict(qo_indptr=batch_size + 1, kv_len=batch_size, kv_indptr=batch_size + 1, kv_indices=num_pages)
            return {name: self._new(extent) for name, extent in room.items()}
        return dict(
            qo_indptr=self._qo_indptr[: batch_size + 1],
            kv_len=self._kv_len[:batch_size],
            kv_indptr=self._kv_indptr[: batch_size + 1],
            kv_indices=self._kv_indices,
        )


def lists_of_pages(
    context: folio.Context,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    page_size: int,
    tensors: dict[str, torch.Tensor],
    first: torch.Tensor | None = None,
) -> None:
    """Writes `kv_indptr` and `kv_indices` of requests whose slots are in `rows` of `req_to_token`: of `kv_len` tokens
    from `first` on."""
    folio.kv_indices(
        context,
        block_table=req_to_token,
        row_ids=rows,
        kv_len=tensors["kv_len"] if first is None else tensors["kv_len"] + first,
        kv_start=first,
        kv_indptr=tensors["kv_indptr"],
        kv_indices=tensors["kv_indices"],
        page_size=1,
        indices_page_size=page_size,
    )


def equal_lengths(qo_indptr: torch.Tensor, qo_len: int) -> None:
    """Writes the offsets of requests of `qo_len` rows each."""
    torch.arange(0, qo_indptr.shape[0] * qo_len, qo_len, dtype=torch.int32, out=qo_indptr)


def offsets(qo_indptr: torch.Tensor, qo_len: torch.Tensor) -> None:
    """Writes the offsets of requests of these many rows."""
    qo_indptr[:1] = 0
    torch.cumsum(qo_len, dim=0, dtype=torch.int32, out=qo_indptr[1:])


def ancestors(mask: torch.Tensor, kv_len: torch.Tensor, drafts: int) -> torch.Tensor:
    """Which drafts of its request a row sees: `[rows, drafts]` of a mask with a byte per row and key, or per row and
    draft.

    Args:
        mask: as SGLang states it. A capture's may be shorter than its rows have keys: it means nothing there.
        kv_len: `[batch_size]`, drafts included.
    """
    rows = kv_len.shape[0] * drafts
    if mask.shape[0] == rows * drafts:
        return mask.view(rows, drafts) != 0
    return mask[_of_drafts(kv_len, drafts).clamp(max=mask.shape[0] - 1)] != 0


def _of_drafts(kv_len: torch.Tensor, drafts: int) -> torch.Tensor:
    """Where a mask with a byte per row and key has the columns of drafts, the last of each row: `[rows, drafts]`."""
    ends = kv_len.repeat_interleave(drafts).cumsum(0)
    return ends[:, None] - drafts + torch.arange(drafts, device=kv_len.device)


def list_tree(seen: torch.Tensor, slots: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    """Lists for each draft the slots of the drafts that it sees.

    Args:
        seen: `[rows, drafts]`
        slots: `[batch_size, drafts]`, those of the drafts.
        tensors: of `Buffers`, for `rows` requests of `drafts` pages of one slot.
    """
    rows, drafts = seen.shape
    equal_lengths(tensors["qo_indptr"], 1)
    equal_lengths(tensors["kv_indptr"], drafts)
    torch.sum(seen, dim=1, dtype=torch.int32, out=tensors["kv_len"])
    order = seen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    of_rows = slots.repeat_interleave(drafts, dim=0)
    tensors["kv_indices"][: rows * drafts] = of_rows.gather(1, order).flatten()


def with_prefixes(mask: torch.Tensor, kv_len: torch.Tensor) -> torch.Tensor:
    """A mask of drafts over drafts, `[rows, drafts]`, with room for each request's prefix before them.

    SGLang leaves prefixes out on the CPU. This waits for the device.
    """
    elements = _of_drafts(kv_len, mask.shape[1])
    whole = torch.ones(int(elements[-1, -1]) + 1, dtype=mask.dtype, device=mask.device)
    whole[elements] = mask
    return whole
