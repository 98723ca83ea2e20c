"""The attention backend: SGLang's interface over Folio's handles."""

from dataclasses import dataclass
from typing import Any

import folio
import torch
from folio_torch import context_of
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from folio_sglang.batches import Batch, Buffers, equal_lengths, lists_of_pages, offsets


@dataclass(frozen=True)
class Problem:
    """What decides the code of a layer's handle."""

    decodes: bool
    graph: bool
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int


class FolioAttnBackend(AttentionBackend):
    """Decode, extend, mixed, verify and draft-extend steps over a pool of token slots.

    A step is planned once for all layers of a shape, at the first of them. Layers bring their own window, cap, sinks
    and scales.

    Args:
        model_runner: SGLang's. Its device, pools, page size and longest context are read.
    """

    # Lengths are read where they are.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner):
        super().__init__()
        _refuse_models(model_runner)
        self.device = torch.device(model_runner.device)
        self.context = context_of(self.device)
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size = model_runner.page_size
        self.max_context_len = model_runner.model_config.context_len
        self.max_bs = model_runner.req_to_token_pool.size
        self.num_draft_tokens = model_runner.server_args.speculative_num_draft_tokens or 1
        self.forward_metadata: Batch | None = None
        self._eager = Buffers(self.device, self.max_bs)
        self._graph: Buffers | None = None
        self._graph_mask: torch.Tensor | None = None
        #: Requests and rows of the largest step of graphs.
        self.graph_bounds = (0, 0)
        self._handles: dict[Problem, _Planned] = {}

    # --- A step ---------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch) -> None:
        """Takes over a step."""
        self.forward_metadata = self._batch(forward_batch, self._eager, graph=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes what the steps of graphs have in common: buffers that stay where they are."""
        self.graph_bounds = (max_bs, max_num_tokens)
        longest = self.max_context_len + self.num_draft_tokens
        self._graph = Buffers(self.device, max_bs, max_bs * -(-longest // self.page_size))
        self._graph_mask = torch.zeros(max_num_tokens * longest, dtype=torch.uint8, device=self.device)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Writes a step into the buffers of graphs: before a capture, and before each replay.

        The plan is a part of the graph. It reads the lengths on the device.
        """
        self.forward_metadata = self._batch(forward_batch, self._graph, graph=True)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _batch(self, forward_batch, buffers: Buffers, graph: bool) -> Batch | None:
        mode, spec = forward_batch.forward_mode, forward_batch.spec_info
        if mode.is_idle():
            return None
        if mode.is_dllm_extend():
            raise NotImplementedError(
                "forward_mode is DLLM_EXTEND; decode, extend, mixed, verify and draft-extend are accepted"
            )
        if mode.is_decode() and getattr(spec, "kv_indptr", None) is not None:
            return self._draft_step(spec, graph)
        batch_size, seq_lens = forward_batch.batch_size, forward_batch.seq_lens
        mask: dict[str, Any] = dict(mask_mode="causal")
        if mode.is_decode():
            qo_len, drafts = 1, 0
        elif mode.is_target_verify():
            qo_len = drafts = self._verified(spec)
            mask = self._mask(spec, graph)
        else:
            qo_len, drafts = None, 0
        tensors = buffers.of(batch_size, self._pages(forward_batch, batch_size, drafts))
        torch.add(seq_lens, drafts, out=tensors["kv_len"])
        if qo_len is not None:
            equal_lengths(tensors["qo_indptr"], qo_len)
            num_tokens, max_qo_len = batch_size * qo_len, qo_len
        else:
            offsets(tensors["qo_indptr"], forward_batch.extend_seq_lens)
            num_tokens = forward_batch.extend_num_tokens
            lengths = forward_batch.extend_seq_lens_cpu
            max_qo_len = num_tokens if lengths is None else max(lengths)
        lists_of_pages(self.context, self.req_to_token, forward_batch.req_pool_indices, self.page_size, tensors)
        return Batch(batch_size, num_tokens, max_qo_len, self.page_size, mask=mask, graph=graph, **tensors)

    def _draft_step(self, spec, graph: bool) -> Batch:
        """A step of a draft, whose slots FolioMultiStepDraftBackend has listed."""
        rows = spec.kv_indptr.shape[0] - 1
        qo_indptr = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        kv_len = (spec.kv_indptr[1:] - spec.kv_indptr[:-1]).to(torch.int32)
        return Batch(rows, rows, 1, 1, qo_indptr, kv_len, spec.kv_indptr, spec.kv_indices, graph=graph)

    def _verified(self, spec) -> int:
        """Tokens per request that a step verifies."""
        stated = getattr(spec, "num_tokens_per_req", -1)
        return stated if stated > 0 else self.num_draft_tokens

    def _mask(self, spec, graph: bool) -> dict[str, Any]:
        """The mask of a tree of drafts: a byte per row and key, of which those of the prefix are not read."""
        mask = getattr(spec, "custom_mask", None)
        if mask is None:
            return dict(mask_mode="causal")
        mask = mask.reshape(-1).view(torch.uint8)
        if graph:
            self._graph_mask[: mask.shape[0]] = mask
            mask = self._graph_mask
        return dict(mask_mode="custom_bytes", custom_mask=mask, flags=("mask_skip_prefix",))

    def _pages(self, forward_batch, batch_size: int, drafts: int) -> int:
        """Pages that a step needs at most, without a look at the device."""
        total = forward_batch.seq_lens_sum
        if total is None:
            total = batch_size * self.max_context_len
        # Each request may begin a page of its own.
        return (total + batch_size * drafts) // self.page_size + batch_size

    # --- A layer --------------------------------------------------------------------------------

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, sinks=None, **kwargs):
        """Attention of a layer over the pool, new tokens included.

        Args:
            q: `[num_tokens or more, num_heads * head_dim]`
            k, v: keys and values of new tokens; None where the pool has them.
            layer: SGLang's RadixAttention.
            save_kv_cache: whether k and v are to be written to the pool.
            sinks: `[num_heads]`, or None.
            kwargs: refused, but for None.

        Returns:
            `[num_tokens or more, num_heads * v_head_dim]`
        """
        _refuse_layers(layer, kwargs)
        if k is not None and save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        elif k is not None:
            raise NotImplementedError("save_kv_cache is False with new keys; keys that are in the pool are accepted")
        k_pool = self._paged(self.token_to_kv_pool.get_key_buffer(layer.layer_id))
        v_pool = self._paged(self.token_to_kv_pool.get_value_buffer(layer.layer_id))
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        o = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        batch = self.forward_metadata
        handle = self._planned(batch, q, k_pool, v_pool)
        arguments = dict(batch.mask)
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            # SGLang's size does not count the row's own key.
            arguments["flags"] = (*arguments.get("flags", ()), "window")
            arguments |= dict(window_left=layer.sliding_window_size, window_right=-1)
        if layer.attn_type.value == "encoder_only":
            arguments["mask_mode"] = "full"
        handle.run(
            q=q,
            k=k_pool,
            v=v_pool,
            o=o,
            sm_scale=layer.scaling,
            k_scale=layer.k_scale_float or 0.0,
            v_scale=layer.v_scale_float or 0.0,
            logits_soft_cap=layer.logit_cap or 0.0,
            sinks=None if sinks is None else sinks.to(torch.float32),
            **arguments,
        )
        return o.view(q.shape[0], -1)

    # A step's rows are all in its plan, whatever its mode.
    forward_decode = forward_extend

    def support_triton(self) -> bool:
        return self.device.type == "cuda"

    def _paged(self, pool: torch.Tensor) -> torch.Tensor:
        """A buffer of `[slots, heads, dim]` as pages of the step's page size."""
        page_size = self.forward_metadata.page_size
        return pool.unflatten(0, (pool.shape[0] // page_size, page_size))

    def _planned(self, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """The handle of a layer's shape, planned for the step."""
        problem = Problem(
            decodes=batch.max_qo_len <= self.num_draft_tokens,
            graph=batch.graph,
            page_size=batch.page_size,
            q_dtype=q.dtype,
            kv_dtype=k.dtype,
            num_qo_heads=q.shape[1],
            num_kv_heads=k.shape[-2],
            head_dim_qk=q.shape[2],
            head_dim_vo=v.shape[-1],
        )
        planned = self._handles.get(problem)
        if planned is None or not planned.holds(batch):
            planned = self._handles[problem] = _Planned(self, problem, batch, planned)
        return planned.plan(batch)


class _Planned:
    """A handle, the largest batch it was made for, and the batch in force."""

    def __init__(self, backend: FolioAttnBackend, problem: Problem, batch: Batch, smaller: "_Planned | None"):
        batch_size, num_tokens = batch.batch_size, batch.num_tokens
        if smaller is not None:
            if problem.graph:
                raise RuntimeError(
                    f"batch has {batch_size} requests and {num_tokens} rows, more than graphs were made for"
                )
            batch_size, num_tokens = max(batch_size, smaller.batch_size), max(num_tokens, 2 * smaller.num_tokens)
        elif problem.graph:
            batch_size, num_tokens = backend.graph_bounds
        else:
            batch_size = max(batch_size, backend.max_bs)
        self.batch_size, self.num_tokens = batch_size, num_tokens
        #: The batch in force, and whether its plan is part of a capture.
        self._in_force: tuple[Batch | None, bool] = (None, False)
        desc = dict(
            flags=("graph",) if problem.graph else (),
            q_dtype=problem.q_dtype,
            kv_dtype=problem.kv_dtype,
            num_qo_heads=problem.num_qo_heads,
            num_kv_heads=problem.num_kv_heads,
            head_dim_qk=problem.head_dim_qk,
            head_dim_vo=problem.head_dim_vo,
            page_size=problem.page_size,
            max_batch_size=batch_size,
            max_kv_len=backend.max_context_len + backend.num_draft_tokens,
        )
        if problem.decodes:
            self._handle = folio.Decode(backend.context, max_qo_len=backend.num_draft_tokens, **desc)
        else:
            self._handle = folio.Prefill(backend.context, max_num_tokens=num_tokens, **desc)
        self._decodes = problem.decodes

    def holds(self, batch: Batch) -> bool:
        return batch.batch_size <= self.batch_size and (self._decodes or batch.num_tokens <= self.num_tokens)

    def plan(self, batch: Batch):
        """The handle, planned for the batch once; and once more in a capture, whose replays plan what they compute,
        where a warm-up computed the batch before."""
        capturing = batch.kv_len.is_cuda and torch.cuda.is_current_stream_capturing()
        known, captured = self._in_force
        if known is not batch or captured != capturing:
            self._handle.plan(**batch.planned())
            self._in_force = (batch, capturing)
        return self._handle


class FolioMultiStepDraftBackend:
    """The steps of a draft with `topk` branches: a backend per step, whose slots are listed for all steps at once.

    Args:
        model_runner: the draft model's.
        topk: branches of each request.
        speculative_num_steps: tokens of each branch.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner, topk: int, speculative_num_steps: int):
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.attn_backends = [FolioAttnBackend(model_runner) for _ in range(speculative_num_steps - 1)]
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
            backend.graph_bounds = (rows, rows)

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


def _refuse_models(model_runner) -> None:
    """Refuses what no layer of a model could be computed for."""
    refused = {
        "multi-head latent attention": getattr(model_runner, "use_mla_backend", False),
        "encoders with decoders": getattr(model_runner.model_config, "is_encoder_decoder", False),
        # Such pools have slots of their own for layers with a window.
        "a pool of its own for layers with a window": hasattr(
            model_runner.token_to_kv_pool, "translate_loc_from_full_to_swa"
        ),
    }
    for what, is_there in refused.items():
        if is_there:
            raise NotImplementedError(f"the model has {what}, which the backend folio does not support")


def _refuse_layers(layer, arguments: dict[str, Any]) -> None:
    refused = {
        "is_cross_attention": layer.is_cross_attention,
        "attn_type decoder_bidirectional": layer.attn_type.value == "decoder_bidirectional",
        "xai_temperature_len": layer.xai_temperature_len > 0,
        "use_irope": layer.use_irope,
        "pos_encoding_mode": layer.pos_encoding_mode != "NONE",
        "logit_capping_method": bool(layer.logit_cap) and layer.logit_capping_method != "tanh",
        **{name: value is not None for name, value in arguments.items()},
    }
    for what, is_there in refused.items():
        if is_there:
            raise NotImplementedError(f"layer {layer.layer_id} has {what}, which the backend folio does not support")
