"""A step's plan: which of Folio's handles computes a batch, and its batch in force.

A KV-cache group has one `Planner`, whose handles serve all steps and layers of the group. A step is planned once; its
layers run that plan.
"""

from dataclasses import dataclass, replace
from typing import Any

import folio
import torch


@dataclass(frozen=True)
class Problem:
    """What decides the code of a group's layers.

    Attributes:
        graph: whether runs are captured in CUDA graphs. Only decodes are.
        batch_invariant: whether a request's bits may not depend on the batch.
    """

    q_dtype: torch.dtype
    kv_dtype: str | torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    graph: bool = False
    batch_invariant: bool = False

    def desc(self, graph: bool = False) -> dict[str, Any]:
        """What the descs of all paged handles have in common."""
        flags = dict(graph=graph, batch_invariant=self.batch_invariant)
        return dict(
            flags=[name for name, is_set in flags.items() if is_set],
            q_dtype=self.q_dtype,
            kv_dtype=self.kv_dtype,
            kv_layout="hnd",
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
            page_size=self.page_size,
        )


@dataclass(frozen=True)
class Bounds:
    """The largest batch that a handle was made for."""

    batch_size: int
    num_tokens: int
    kv_len: int

    def grown(self, other: "Bounds") -> "Bounds":
        """Bounds that hold both; where one grows, to a power of two at least."""
        larger = {
            name: 1 << (wanted - 1).bit_length() for name, wanted in vars(other).items() if wanted > getattr(self, name)
        }
        return replace(self, **larger)

    def hold(self, other: "Bounds") -> bool:
        return self.grown(other) == self


@dataclass(frozen=True, eq=False)
class Batch:
    """A step as vLLM states it. Lengths and page ids are together on the host, or together on the device.

    Attributes:
        size: bounds of this batch, known on the host.
        max_qo_len: query rows of the longest request.
        qo_indptr: `[batch_size + 1]` int32.
        kv_len: `[batch_size]` int32, new tokens included.
        block_table: `[batch_size, pages]` int32; None where keys are not cached (encoders).
        window_left: no layer sees a key more than so many before a row's own; None: some see all.
    """

    size: Bounds
    max_qo_len: int
    qo_indptr: torch.Tensor
    kv_len: torch.Tensor
    block_table: torch.Tensor | None
    window_left: int | None = None

    def window(self) -> dict[str, Any]:
        """What keeps keys before the layers' windows out of a plan."""
        return {} if self.window_left is None else dict(flags=("window",), window_left=self.window_left)

    def paged(self) -> dict[str, torch.Tensor]:
        return dict(qo_indptr=self.qo_indptr, kv_len=self.kv_len, block_table=self.block_table)


class Planner:
    """The handles of a KV-cache group.

    Args:
        context: the device.
        problem: what the layers of the group have in common.
        bounds: the largest batch to expect. Larger ones get new handles, unless graphs hold the old ones.
        max_decode_len: query rows up to which a request is decoded: 1, and more for verified drafts.
        share_prefixes: whether keys that neighbouring requests share are read once. Only for layers that see all keys,
            and where the page table is on the host.
    """

    #: Fewer shared keys than these are not worth another handle: the bound that vLLM's cascades have.
    SHORTEST_PREFIX = 256

    def __init__(
        self,
        context: folio.Context,
        problem: Problem,
        bounds: Bounds,
        max_decode_len: int = 1,
        share_prefixes: bool = False,
    ):
        self._context, self._problem, self._bounds = context, problem, bounds
        self._max_decode_len = max_decode_len
        self._share_prefixes = share_prefixes
        self._handles: dict[str, Any] = {}
        self._in_force: tuple[Batch | None, Any] = (None, None)

    def planned(self, batch: Batch):
        """The handle that computes the batch, planned for it unless that was the last plan."""
        if self._in_force[0] is not batch:
            self._in_force = (batch, self._plan(batch))
        return self._in_force[1]

    def _plan(self, batch: Batch):
        self._grow(batch.size)
        if batch.block_table is None:
            handle = self._handle("ragged")
            handle.plan(qo_indptr=batch.qo_indptr, kv_indptr=batch.qo_indptr, **batch.window())
            return handle
        if self._share_prefixes and batch.size.batch_size > 1:
            cascade = self._cascade(batch)
            if cascade is not None:
                return cascade
        handle = self._handle("decode" if batch.max_qo_len <= self._max_decode_len else "prefill")
        handle.plan(**batch.paged(), **batch.window())
        return handle

    def _cascade(self, batch: Batch):
        """A cascade planned for the batch, if requests share keys and that pays."""
        capacity = batch.size.batch_size - 1
        begin, end, kv_len = (torch.empty(capacity, dtype=torch.int32) for _ in range(3))
        found = folio.find_shared_prefixes(
            page_size=self._problem.page_size,
            batch=batch.paged(),
            request_begin=begin,
            request_end=end,
            kv_len=kv_len,
        )
        if found == 0 or int(kv_len[:found].max()) < self.SHORTEST_PREFIX:
            return None
        handle = self._handle("cascade")
        handle.plan(
            **batch.paged(),
            prefixes=dict(request_begin=begin[:found], request_end=end[:found], kv_len=kv_len[:found]),
        )
        return handle if handle.shares() else None

    def _grow(self, size: Bounds) -> None:
        if self._bounds.hold(size):
            return
        if self._problem.graph:
            raise RuntimeError(f"batch is {size}; graphs were captured for {self._bounds} at most")
        self._bounds = self._bounds.grown(size)
        self._handles.clear()

    def _handle(self, kind: str):
        if kind not in self._handles:
            self._handles[kind] = getattr(self, f"_make_{kind}")()
        return self._handles[kind]

    def _make_decode(self) -> folio.Decode:
        return folio.Decode(
            self._context,
            **self._problem.desc(self._problem.graph),
            max_batch_size=self._bounds.batch_size,
            max_qo_len=self._max_decode_len,
            max_kv_len=self._bounds.kv_len,
        )

    def _make_prefill(self) -> folio.Prefill:
        return folio.Prefill(
            self._context,
            **self._problem.desc(),
            max_batch_size=self._bounds.batch_size,
            max_num_tokens=self._bounds.num_tokens,
            max_kv_len=self._bounds.kv_len,
        )

    def _make_cascade(self) -> folio.Cascade:
        return folio.Cascade(
            self._context,
            **self._problem.desc(),
            max_batch_size=self._bounds.batch_size,
            max_num_tokens=self._bounds.num_tokens,
            max_kv_len=self._bounds.kv_len,
            max_shared_levels=4,
        )

    def _make_ragged(self) -> folio.Prefill:
        desc = self._problem.desc() | dict(
            kv_layout=0, page_size=0, kv_dtype=self._problem.q_dtype, kv_storage="ragged"
        )
        return folio.Prefill(
            self._context,
            **desc,
            max_batch_size=self._bounds.batch_size,
            max_num_tokens=self._bounds.num_tokens,
            max_kv_len=min(self._bounds.kv_len, self._bounds.num_tokens),
        )
