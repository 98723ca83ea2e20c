"""What computes layers: a handle for each problem, planned once per step.

A problem is what decides a layer's code and plans. It makes handles for a largest step (`make`), and says what they are
planned with for a step (`planned`). `decodes` is whether all requests of a step have few query rows, `graph` whether
runs are captured in CUDA graphs.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import folio
import torch

from folio_sglang.batches import Batch


@dataclass(frozen=True)
class Bounds:
    """The largest step that a handle is made for.

    Attributes:
        decode_len: query rows up to which a request is decoded: 1, and more for verified drafts.
    """

    batch_size: int
    num_tokens: int
    kv_len: int
    decode_len: int

    def hold(self, batch: Batch, decodes: bool) -> bool:
        return batch.batch_size <= self.batch_size and (decodes or batch.num_tokens <= self.num_tokens)


@dataclass(frozen=True)
class Paged:
    """Attention over a pool of keys and values.

    Attributes:
        keys: which of a step's lists the layer reads: those of requests, of their encoders, or of the pool for windows.
        window_left: keys before a row's own that the layer sees; None: all.
    """

    decodes: bool
    graph: bool
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    keys: str = "own"
    window_left: int | None = None

    def make(self, context: folio.Context, bounds: Bounds) -> folio.Decode | folio.Prefill:
        desc = dict(
            flags=("graph",) if self.graph else (),
            q_dtype=self.q_dtype,
            kv_dtype=self.kv_dtype,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
            page_size=self.page_size,
            max_batch_size=bounds.batch_size,
            max_kv_len=bounds.kv_len,
        )
        if self.decodes:
            return folio.Decode(context, max_qo_len=bounds.decode_len, **desc)
        return folio.Prefill(context, max_num_tokens=bounds.num_tokens, **desc)

    def planned(self, batch: Batch) -> dict[str, Any]:
        """Keys before the window are not planned for."""
        window = {} if self.window_left is None else dict(flags=("window",), window_left=self.window_left)
        return batch.planned() | window


@dataclass(frozen=True)
class Records:
    """Absorbed attention of MLA over a pool of latent records."""

    decodes: bool
    graph: bool
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int

    def make(self, context: folio.Context, bounds: Bounds) -> folio.Mla:
        rows = bounds.batch_size * bounds.decode_len if self.decodes else bounds.num_tokens
        return self._made(
            context,
            max_batch_size=bounds.batch_size,
            max_qo_len=bounds.decode_len if self.decodes else bounds.num_tokens,
            max_num_tokens=rows,
            max_kv_len=bounds.kv_len,
        )

    def _made(self, context: folio.Context, **maxima: int) -> folio.Mla:
        return folio.Mla(
            context,
            flags=("graph",) if self.graph else (),
            q_dtype=self.q_dtype,
            kv_dtype=self.kv_dtype,
            num_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            page_size=self.page_size,
            **maxima,
        )

    def planned(self, batch: Batch) -> dict[str, Any]:
        return batch.planned()


@dataclass(frozen=True)
class Tree(Records):
    """Drafts of a tree over one another: a request of one row for each draft, with pages of one slot."""

    def make(self, context: folio.Context, bounds: Bounds) -> folio.Mla:
        rows = bounds.batch_size * bounds.decode_len
        return self._made(context, max_batch_size=rows, max_kv_len=bounds.decode_len)

    def planned(self, batch: Batch) -> dict[str, Any]:
        return batch.tree


@dataclass(frozen=True)
class NewTokens:
    """New tokens over themselves, in keys and values that no pool has: MLA's prompts without a cached prefix."""

    q_dtype: torch.dtype
    num_heads: int
    head_dim_qk: int
    head_dim_vo: int
    decodes: ClassVar[bool] = False
    graph: ClassVar[bool] = False

    def make(self, context: folio.Context, bounds: Bounds) -> folio.Prefill:
        return folio.Prefill(
            context,
            q_dtype=self.q_dtype,
            kv_storage="ragged",
            num_qo_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
            max_batch_size=bounds.batch_size,
            max_num_tokens=bounds.num_tokens,
            max_kv_len=min(bounds.kv_len, bounds.num_tokens),
        )

    def planned(self, batch: Batch) -> dict[str, Any]:
        return dict(qo_indptr=batch.qo_indptr, kv_indptr=batch.qo_indptr)


Problem = Paged | Records | NewTokens


class Handles:
    """The handles of a backend.

    Args:
        context: the device.
        bounds: the largest step to expect. Where a step has more rows or requests, a larger handle takes the place.
    """

    def __init__(self, context: folio.Context, bounds: Bounds):
        self._context, self._bounds = context, bounds
        #: The largest step of graphs.
        self.graph_bounds = bounds
        self._planned: dict[Problem, _Planned] = {}

    def planned(self, problem: Problem, batch: Batch):
        """The handle of a layer's problem, planned for the step."""
        known = self._planned.get(problem)
        if known is None or not known.bounds.hold(batch, problem.decodes):
            bounds = self._larger(problem, batch, known)
            known = self._planned[problem] = _Planned(problem, bounds, problem.make(self._context, bounds))
        return known.plan(batch)

    def _larger(self, problem: Problem, batch: Batch, known: "_Planned | None") -> Bounds:
        if problem.graph:
            if not self.graph_bounds.hold(batch, problem.decodes):
                raise RuntimeError(
                    f"batch has {batch.batch_size} requests and {batch.num_tokens} rows; graphs were made for"
                    f" {self.graph_bounds.batch_size} and {self.graph_bounds.num_tokens} at most"
                )
            return self.graph_bounds
        rows = 0 if known is None else 2 * known.bounds.num_tokens
        return Bounds(
            batch_size=max(batch.batch_size, self._bounds.batch_size),
            num_tokens=max(batch.num_tokens, rows),
            kv_len=self._bounds.kv_len,
            decode_len=self._bounds.decode_len,
        )


class _Planned:
    """A handle and its batch in force."""

    def __init__(self, problem: Problem, bounds: Bounds, handle: Any):
        self.bounds, self._problem, self._handle = bounds, problem, handle
        #: The batch in force, and whether its plan is part of a capture.
        self._in_force: tuple[Batch | None, bool] = (None, False)

    def plan(self, batch: Batch):
        """The handle, planned for the batch once; and once more in a capture, whose replays plan what they compute,
        where a warm-up computed the batch before."""
        capturing = batch.kv_len.is_cuda and torch.cuda.is_current_stream_capturing()
        known, captured = self._in_force
        if known is not batch or captured != capturing:
            self._handle.plan(**self._problem.planned(batch))
            self._in_force = (batch, capturing)
        return self._handle
