"""The attention backend for multi-head latent attention: DeepSeek-V2 and its successors.

SGLang multiplies queries and outputs with the weights. Decodes, verified drafts and prompts over a cached prefix run
absorbed (`folio.Mla`). Prompts without one run in their multi-head form over their own keys and values, which SGLang
has multiplied out.

A tree of drafts is verified in two parts, which are merged: what comes before the drafts, which all of them see, and
for each draft the records of its ancestors and its own.
"""

from dataclasses import replace

import folio
import torch

from folio_sglang.backend import FolioAttnBackend, refuse
from folio_sglang.batches import Batch, Buffers, ancestors, list_tree
from folio_sglang.handles import NewTokens, Records, Tree


class FolioMLAAttnBackend(FolioAttnBackend):
    """Steps over a pool of latent records.

    Args:
        model_runner: SGLang's; of its model_config the widths of a record are read, too.
    """

    def __init__(self, model_runner):
        super().__init__(model_runner)
        self.kv_lora_rank = model_runner.model_config.kv_lora_rank
        self.qk_rope_head_dim = model_runner.model_config.qk_rope_head_dim
        self._graph_tree: Buffers | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self._graph_tree = Buffers(self.device, max_num_tokens, max_num_tokens * self.num_draft_tokens)

    def _refuse_model(self, model_runner) -> None:
        model, pool = model_runner.model_config, model_runner.token_to_kv_pool
        if hasattr(pool, "translate_loc_from_full_to_swa"):
            raise NotImplementedError("the model has a pool for layers with a window; one pool is accepted with MLA")
        width = model.kv_lora_rank + model.qk_rope_head_dim
        stored = getattr(pool, "kv_cache_dim", width)
        if stored != width:
            raise NotImplementedError(
                f"kv_cache_dim is {stored}; {width}, kv_lora_rank + qk_rope_head_dim, is accepted by the backend folio"
            )

    def _batch(self, forward_batch, graph: bool) -> Batch | None:
        batch = super()._batch(forward_batch, graph)
        mask = getattr(forward_batch.spec_info, "custom_mask", None)
        is_chain = mask is None or getattr(forward_batch.spec_info, "topk", None) == 1
        if batch is None or is_chain or not forward_batch.forward_mode.is_target_verify():
            return batch
        drafts = batch.max_qo_len
        tree = (self._graph_tree if graph else self._eager).of(batch.num_tokens, batch.num_tokens * drafts)
        seen = ancestors(mask.reshape(-1), batch.kv_len, drafts)
        batch.kv_len.sub_(drafts)
        places = batch.kv_len[:, None] + torch.arange(drafts, device=self.device)
        list_tree(seen, self.req_to_token[forward_batch.req_pool_indices[:, None], places], tree)
        return replace(batch, mask=dict(mask_mode="full"), tree=tree)

    def _mask(self, *_) -> dict[str, str]:
        """Chains of drafts are causal, and of trees this is what comes before the drafts."""
        return dict(mask_mode="causal")

    def forward_extend(
        self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, q_rope=None, k_rope=None, **kwargs
    ):
        """Attention of a layer, absorbed over the pool or over its new tokens alone.

        Args:
            q: `[num_tokens or more, num_heads * width]`: whole absorbed queries, their latent part with `q_rope`, or
                the multi-head ones.
            k: new records, as q of one head; None where the pool has them. The keys of multi-head layers.
            v: the latent part of new records, or the values of multi-head layers.
            layer: SGLang's RadixAttention: `attn_mqa` is absorbed, `attn_mha` multi-head.
            save_kv_cache: whether new records are to be written to the pool.
            q_rope, k_rope: the rotated parts, where q and k have none.
            kwargs: refused, but for None.

        Returns:
            `[num_tokens or more, num_heads * v_head_dim]`
        """
        _refuse_layer(layer, kwargs)
        if layer.v_head_dim == self.kv_lora_rank and layer.tp_k_head_num == 1:
            if k is not None and save_kv_cache:
                self._save_records(layer, forward_batch, k, v, k_rope)
            return self._absorbed(q, q_rope, layer)
        return self._over_new_tokens(q, k, v, layer, forward_batch, save_kv_cache)

    forward_decode = forward_extend

    def _save_records(self, layer, forward_batch, k, v, k_rope) -> None:
        if layer.k_scale is not None:
            k, k_rope = k / layer.k_scale, None if k_rope is None else k_rope / layer.k_scale
        pool, slots = self.token_to_kv_pool, forward_batch.out_cache_loc
        if k_rope is None:
            pool.set_kv_buffer(layer, slots, k, v)
        else:
            pool.set_mla_kv_buffer(layer, slots, k, k_rope)

    def _queries(self, q, q_rope, layer) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent and the rotated part of a layer's absorbed queries, each `[rows, heads, width]`."""
        heads, rope = layer.tp_q_head_num, self.qk_rope_head_dim
        if q_rope is None:
            return q.view(-1, heads, self.kv_lora_rank + rope).split([self.kv_lora_rank, rope], dim=-1)
        return q.view(-1, heads, self.kv_lora_rank), q_rope.view(-1, heads, rope)

    def _absorbed(self, q, q_rope, layer) -> torch.Tensor:
        q_latent, q_rope = self._queries(q, q_rope, layer)
        batch = self.forward_metadata
        pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        model = dict(
            graph=batch.graph,
            q_dtype=q.dtype,
            kv_dtype=pool.dtype,
            num_heads=layer.tp_q_head_num,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
        )
        arguments = dict(
            q_latent=q_latent,
            q_rope=q_rope if self.qk_rope_head_dim else None,
            sm_scale=layer.scaling,
            k_scale=layer.k_scale_float or 0.0,
        )

        def attend(problem, records, **mask) -> tuple[torch.Tensor, torch.Tensor | None]:
            o = q.new_empty(q_latent.shape)
            lse = None if batch.tree is None else q.new_empty(q_latent.shape[:-1], dtype=torch.float32)
            self._handles.planned(problem, batch).run(kv=records, o=o, lse=lse, **arguments, **mask)
            return o, lse

        step = Records(decodes=self._decodes(batch), page_size=batch.page_size, **model)
        o, lse = attend(step, self._paged(batch, pool).squeeze(-2), **batch.mask)
        if batch.tree is not None:
            o_tree, lse_tree = attend(Tree(decodes=True, page_size=1, **model), pool, mask_mode="full")
            folio.merge_state(self.context, v_a=o, s_a=lse, v_b=o_tree, s_b=lse_tree, v_out=o)
        return o.flatten(1)

    def _over_new_tokens(self, q, k, v, layer, forward_batch, save_kv_cache: bool) -> torch.Tensor:
        batch = self.forward_metadata
        accepted = {
            "save_kv_cache": (save_kv_cache, (False,)),
            "graph": (batch.graph, (False,)),
            "extend_prefix_lens": (max(forward_batch.extend_prefix_lens_cpu or (0,)), (0,)),
        }
        refuse(layer, accepted, {})
        heads, width = layer.tp_q_head_num, layer.qk_head_dim
        q, k, v = q.view(-1, heads, width), k.view(-1, heads, width), v.view(-1, heads, layer.v_head_dim)
        o = q.new_empty(q.shape[0], heads, layer.v_head_dim)
        problem = NewTokens(q.dtype, heads, width, layer.v_head_dim)
        self._handles.planned(problem, batch).run(q=q, k=k, v=v, o=o, sm_scale=layer.scaling)
        return o.flatten(1)


def _refuse_layer(layer, arguments) -> None:
    accepted = {
        "is_cross_attention": (layer.is_cross_attention, (False,)),
        "attn_type": (layer.attn_type.value, ("decoder",)),
        "sliding_window_size": (layer.sliding_window_size, (-1, None)),
        "logit_cap": (layer.logit_cap, (0, None)),
    }
    refuse(layer, accepted, arguments)
