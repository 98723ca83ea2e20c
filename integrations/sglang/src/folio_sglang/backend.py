"""The attention backend for everything but MLA: SGLang's interface over Folio's handles."""

from dataclasses import replace
from typing import Any

import torch
from folio_torch import context_of
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from folio_sglang.batches import Batch, Buffers, equal_lengths, lists_of_pages, offsets, with_prefixes
from folio_sglang.handles import Bounds, Handles, Paged


class FolioAttnBackend(AttentionBackend):
    """Decode, extend, mixed, verify and draft-extend steps over a pool of token slots.

    A step is planned once for all layers of a shape and window, at the first of them. Layers bring their own cap, sinks
    and scales. Layers of cross attention see the keys of an encoder, which come before a request's own in its row of
    req_to_token.

    Args:
        model_runner: SGLang's. Its device, pools, page size and longest context are read.
    """

    # Lengths are read where they are.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner):
        super().__init__()
        self._refuse_model(model_runner)
        model = model_runner.model_config
        self.device = torch.device(model_runner.device)
        self.context = context_of(self.device)
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        #: Whether layers with a window have slots of their own.
        self.has_window_pool = hasattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa")
        self.has_encoder = getattr(model, "is_encoder_decoder", False)
        # Where an encoder's keys end, a request's own begin, wherever that is in a page.
        self.page_size = 1 if self.has_encoder else model_runner.page_size
        self.max_context_len = model.context_len
        self.num_draft_tokens = model_runner.server_args.speculative_num_draft_tokens or 1
        longest = self.req_to_token.shape[1] if self.has_encoder else self.max_context_len
        self._longest = max(longest, self.max_context_len) + self.num_draft_tokens
        self.forward_metadata: Batch | None = None
        self._eager = Buffers(self.device)
        self._graph: Buffers | None = None
        self._graph_encoder: Buffers | None = None
        self._graph_window: torch.Tensor | None = None
        self._graph_mask: torch.Tensor | None = None
        max_bs = model_runner.req_to_token_pool.size
        self._handles = Handles(self.context, Bounds(max_bs, 0, self._longest, self.num_draft_tokens))

    # --- A step ---------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch) -> None:
        """Takes over a step."""
        self.forward_metadata = self._batch(forward_batch, graph=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes what the steps of graphs have in common: buffers that stay where they are."""
        self.bound_graphs(max_bs, max_num_tokens)
        max_pages = max_bs * -(-self._longest // self.page_size)
        self._graph = Buffers(self.device, max_bs, max_pages)
        if self.has_encoder:
            self._graph_encoder = Buffers(self.device, max_bs, max_pages)
        if self.has_window_pool:
            self._graph_window = torch.zeros(max_pages, dtype=torch.int32, device=self.device)
        self._graph_mask = torch.zeros(max_num_tokens * self._longest, dtype=torch.uint8, device=self.device)

    def bound_graphs(self, max_bs: int, max_num_tokens: int) -> None:
        """States the requests and rows of the largest step of graphs."""
        self._handles.graph_bounds = Bounds(max_bs, max_num_tokens, self._longest, self.num_draft_tokens)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Writes a step into the buffers of graphs: before a capture, and before each replay.

        The plan is a part of the graph. It reads the lengths on the device.
        """
        self.forward_metadata = self._batch(forward_batch, graph=True)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _batch(self, forward_batch, graph: bool) -> Batch | None:
        mode, spec = forward_batch.forward_mode, forward_batch.spec_info
        if mode.is_idle():
            return None
        if mode.is_dllm_extend():
            raise NotImplementedError(
                "forward_mode is DLLM_EXTEND; decode, extend, mixed, verify and draft-extend are accepted"
            )
        if mode.is_decode() and getattr(spec, "kv_indptr", None) is not None:
            return self._draft_step(spec, graph)
        drafts = self._verified(spec) if mode.is_target_verify() else 0
        mask = self._mask(spec, forward_batch.seq_lens + drafts, drafts, graph) if drafts else dict(mask_mode="causal")
        batch_size, num_pages = forward_batch.batch_size, self._pages(forward_batch, drafts)
        tensors = (self._graph if graph else self._eager).of(batch_size, num_pages)
        torch.add(forward_batch.seq_lens, drafts, out=tensors["kv_len"])
        rows = self._rows(forward_batch, 1 if mode.is_decode() else drafts, tensors["qo_indptr"])
        self._list(forward_batch, tensors, first=forward_batch.encoder_lens)
        batch = Batch(batch_size, *rows, self.page_size, mask=mask, graph=graph, **tensors)
        if forward_batch.encoder_lens is not None:
            batch = replace(batch, encoder=self._encoder(forward_batch, batch))
        if self.has_window_pool:
            batch = replace(batch, window=self._window(batch, num_pages))
        return batch

    def _rows(self, forward_batch, qo_len: int, qo_indptr: torch.Tensor) -> tuple[int, int]:
        """Writes the offsets of query rows: `qo_len` of each request, or those that it is extended by where that is 0.

        Returns:
            All rows, and those of the longest request or more.
        """
        if qo_len:
            equal_lengths(qo_indptr, qo_len)
            return forward_batch.batch_size * qo_len, qo_len
        offsets(qo_indptr, forward_batch.extend_seq_lens)
        lengths = forward_batch.extend_seq_lens_cpu
        return forward_batch.extend_num_tokens, forward_batch.extend_num_tokens if lengths is None else max(lengths)

    def _list(self, forward_batch, tensors: dict[str, torch.Tensor], first: torch.Tensor | None = None) -> None:
        """Lists the pages of `kv_len` tokens of each request, from token `first` on."""
        rows = forward_batch.req_pool_indices
        lists_of_pages(self.context, self.req_to_token, rows, self.page_size, tensors, first)

    def _encoder(self, forward_batch, batch: Batch) -> Batch:
        """The rows of a step over the keys of an encoder."""
        # Of a replay SGLang states neither a mask nor lengths on the host.
        if getattr(forward_batch, "cross_attention_custom_mask", None) is not None:
            raise NotImplementedError("cross_attention_custom_mask is a tensor; None is accepted by the backend folio")
        buffers = self._graph_encoder if batch.graph else self._eager
        lens = getattr(forward_batch, "encoder_lens_cpu", None)
        total = batch.batch_size * self.req_to_token.shape[1] if lens is None else sum(lens)
        tensors = buffers.of(batch.batch_size, total) | dict(qo_indptr=batch.qo_indptr)
        tensors["kv_len"].copy_(forward_batch.encoder_lens)
        self._list(forward_batch, tensors)
        return replace(batch, mask=dict(mask_mode="full"), **tensors)

    def _window(self, batch: Batch, num_pages: int) -> Batch:
        """A step over the slots of a pool for layers with a window. Those of tokens that are before all windows may be
        anywhere: they are not read."""
        pages = batch.kv_indices[:num_pages]
        slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(pages.long() * batch.page_size)
        into = self._graph_window if batch.graph else torch.empty_like(pages)
        into[:num_pages] = slots // batch.page_size
        return replace(batch, kv_indices=into)

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

    def _mask(self, spec, kv_len: torch.Tensor, drafts: int, graph: bool) -> dict[str, Any]:
        """The mask of a tree of drafts: a byte per row and key, of which those of the prefix are not read."""
        mask = getattr(spec, "custom_mask", None)
        if mask is None:
            return dict(mask_mode="causal")
        mask = mask.reshape(-1).view(torch.uint8)
        if not graph and mask.shape[0] == kv_len.shape[0] * drafts * drafts:
            mask = with_prefixes(mask.view(-1, drafts), kv_len)
        if graph:
            self._graph_mask[: mask.shape[0]] = mask
            mask = self._graph_mask
        return dict(mask_mode="custom_bytes", custom_mask=mask, flags=("mask_skip_prefix",))

    def _pages(self, forward_batch, drafts: int) -> int:
        """Pages that a step needs at most, without a look at the device."""
        batch_size, total = forward_batch.batch_size, forward_batch.seq_lens_sum
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
        _refuse_layer(layer, kwargs)
        batch = self._step_of(layer)
        if k is not None:
            self._save(layer, forward_batch, k, v, save_kv_cache)
        k_pool = self._paged(batch, self.token_to_kv_pool.get_key_buffer(layer.layer_id))
        v_pool = self._paged(batch, self.token_to_kv_pool.get_value_buffer(layer.layer_id))
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        o = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        window_left = _window_left(layer)
        problem = Paged(
            decodes=self._decodes(batch),
            graph=batch.graph,
            page_size=batch.page_size,
            q_dtype=q.dtype,
            kv_dtype=k_pool.dtype,
            num_qo_heads=q.shape[1],
            num_kv_heads=k_pool.shape[-2],
            head_dim_qk=q.shape[2],
            head_dim_vo=v_pool.shape[-1],
            keys=self._keys_of(layer),
            window_left=window_left,
        )
        arguments = dict(batch.mask)
        if window_left is not None:
            arguments["flags"] = (*arguments.get("flags", ()), "window")
            arguments |= dict(window_left=window_left, window_right=-1)
        if layer.attn_type.value == "encoder_only":
            arguments["mask_mode"] = "full"
        self._handles.planned(problem, batch).run(
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

    def _keys_of(self, layer) -> str:
        """Which keys a layer sees: requests' own, an encoder's, or their own in a pool for layers with a window."""
        if layer.is_cross_attention:
            return "encoder"
        in_window_pool = self.has_window_pool and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
        return "window" if in_window_pool else "own"

    def _step_of(self, layer) -> Batch:
        """The step over the keys that a layer sees."""
        keys = self._keys_of(layer)
        batch = self.forward_metadata if keys == "own" else getattr(self.forward_metadata, keys)
        if batch is None:
            raise NotImplementedError(
                f"layer {layer.layer_id} has is_cross_attention; encoder_lens are accepted with it"
            )
        return batch

    def _save(self, layer, forward_batch, k, v, save_kv_cache: bool) -> None:
        """Writes new keys and values to the pool."""
        if not save_kv_cache:
            raise NotImplementedError(
                "save_kv_cache is False with new keys; True is accepted, or keys in the pool alone"
            )
        slots = forward_batch.encoder_out_cache_loc if layer.is_cross_attention else forward_batch.out_cache_loc
        if self._keys_of(layer) == "window":
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc

            # In the layer, so that a graph reads the slots of its replay.
            window_slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
            slots = KVWriteLoc.for_batch(forward_batch, swa_loc=window_slots)
        self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)

    def _decodes(self, batch: Batch) -> bool:
        return batch.max_qo_len <= self.num_draft_tokens

    def _paged(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """A buffer of `[slots, heads, dim]` as pages of the step's page size."""
        return pool.unflatten(0, (pool.shape[0] // batch.page_size, batch.page_size))

    def _refuse_model(self, model_runner) -> None:
        """Refuses what no layer of a model could be computed for."""
        pool = model_runner.token_to_kv_pool
        refused = {
            "swa_req_ring_size": getattr(pool, "swa_req_ring_size", None) is not None,
            "request_window": getattr(pool, "request_window", None) is not None,
            "swa_uses_full_indices": getattr(pool, "swa_uses_full_indices", False),
        }
        for what, is_there in refused.items():
            if is_there:
                raise NotImplementedError(
                    f"the pool for layers with a window has {what}; pools of pages are accepted by the backend folio"
                )


def _window_left(layer) -> int | None:
    """Keys before a row's own that a layer sees; None: all. SGLang's size does not count the row's own key."""
    size = layer.sliding_window_size
    return None if layer.is_cross_attention or size is None or size < 0 else size


def _refuse_layer(layer, arguments: dict[str, Any]) -> None:
    accepted = {
        "attn_type": (layer.attn_type.value, ("decoder", "encoder_only")),
        "xai_temperature_len": (layer.xai_temperature_len, (-1, 0)),
        "use_irope": (layer.use_irope, (False,)),
        "pos_encoding_mode": (layer.pos_encoding_mode, ("NONE",)),
        "logit_capping_method": (layer.logit_capping_method if layer.logit_cap else "tanh", ("tanh",)),
    }
    refuse(layer, accepted, arguments)


def refuse(layer, accepted: dict[str, tuple[Any, tuple]], arguments: dict[str, Any]) -> None:
    """Refuses a layer where a value is none of the accepted ones, and arguments of a call that are not None."""
    for name, (value, values) in (accepted | {name: (value, (None,)) for name, value in arguments.items()}).items():
        if value not in values:
            said = f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise NotImplementedError(
                f"{name} is {said} in layer {layer.layer_id}; {' or '.join(map(repr, values))} is accepted by the"
                " backend folio"
            )
