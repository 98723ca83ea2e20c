"""Drafts of several steps and branches."""

from dataclasses import dataclass

import folio
import torch

from folio_sglang.batches import Batch
from folio_sglang.selection import create


class FolioMultiStepDraftBackend:
    """The steps of a draft with `topk` branches: a backend per step, whose slots are listed for all steps at once.

    Args:
        model_runner: the draft model's.
        topk: branches of each request.
        speculative_num_steps: tokens of each branch.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner, topk: int, speculative_num_steps: int):
        if hasattr(model_runner.token_to_kv_pool, "translate_loc_from_full_to_swa"):
            raise NotImplementedError("the draft has a pool for layers with a window; one pool is accepted for drafts")
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.attn_backends = [create(model_runner) for _ in range(speculative_num_steps - 1)]
        first = self.attn_backends[0]
        self.device, self.context, self.req_to_token = first.device, first.context, first.req_to_token
        self.page_size, self.max_context_len = first.page_size, first.max_context_len
        self._graph: tuple[torch.Tensor, torch.Tensor] | None = None

    def init_forward_metadata(self, forward_batch) -> None:
        """Takes over a draft: lists the slots of all steps."""
        rows = forward_batch.batch_size * self.topk
        total = forward_batch.seq_lens_sum
        if total is None:
            total = forward_batch.batch_size * self.max_context_len
        self._steps(forward_batch, *self._lists(rows, total * self.topk + rows * self.speculative_num_steps))
        for backend, step in zip(self.attn_backends, self._listed):
            backend.forward_metadata = backend._draft_step(step, graph=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes lists for the drafts of graphs that stay where they are."""
        rows = max_bs * self.topk
        self._graph = self._lists(rows, rows * (self.max_context_len + self.speculative_num_steps))
        self._graph_lengths = [
            torch.zeros(rows, dtype=torch.int32, device=self.device) for _ in range(self.speculative_num_steps - 1)
        ]
        self._graph_indptr = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        for backend in self.attn_backends:
            backend.bound_graphs(rows, rows)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Lists the slots of all steps where graphs read them: before a capture, and before each replay."""
        rows = forward_batch.batch_size * self.topk
        self._steps(forward_batch, *self._graph)
        for backend, step, lengths in zip(self.attn_backends, self._listed, self._graph_lengths):
            kv_indptr = step.kv_indptr[: rows + 1]
            torch.sub(kv_indptr[1:], kv_indptr[:-1], out=lengths[:rows])
            backend.forward_metadata = Batch(
                rows, rows, 1, 1, self._graph_indptr[: rows + 1], lengths[:rows], kv_indptr, step.kv_indices, graph=True
            )

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        """Nothing: graphs read lists that were written before their replay."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _lists(self, rows: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        steps = self.speculative_num_steps - 1
        options = dict(dtype=torch.int32, device=self.device)
        return torch.zeros(steps, rows + 1, **options), torch.zeros(steps, num_slots, **options)

    def _steps(self, forward_batch, kv_indptr: torch.Tensor, kv_indices: torch.Tensor) -> None:
        own_pages = self.page_size > 1 and self.topk > 1
        folio.draft_kv_indices(
            self.context,
            req_to_token=self.req_to_token,
            row_ids=forward_batch.req_pool_indices,
            kv_len=forward_batch.seq_lens,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            topk=self.topk,
            num_steps=self.speculative_num_steps,
            page_size=self.page_size if own_pages else 0,
            slot_layout="paged" if own_pages else "branch_major",
        )
        self._listed = [_Step(*lists) for lists in zip(kv_indptr, kv_indices)]


@dataclass(frozen=True)
class _Step:
    """The slots of a draft's step."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
