"""FOLIO_ATTN and FOLIO_MLA_ATTN: attention backends in FastDeploy's interface.

FastDeploy makes one backend for all layers, calls init_attention_metadata once per step, and forward once per layer, or
twice in MLA models: for prompts with k and v, and for decodes without. Lengths stay on their device; the ops of the
layers look at no scalar of the host, so that captured steps can be replayed.
"""

from dataclasses import dataclass, field
from typing import Optional

import folio_paddle_ops
import paddle
from fastdeploy.model_executor.layers.attention import AppendAttentionBackend, MLAAttentionBackend
from fastdeploy.model_executor.layers.attention.base_attention_backend import AttentionBackend, AttentionMetadata

from . import ops

#: FastDeploy's kinds of caches of keys and values that have code, as its runner names them.
CACHES = (None, "none", "float8_e4m3fn", "cache_fp8", "int8", "int4_zp")
COMPUTE = {paddle.bfloat16: "bf16", paddle.float16: "fp16", paddle.float32: "fp32"}


@dataclass
class FolioMetadata(AttentionMetadata):
    """What a step is: the prompts and decodes in it, on the host. Stale in a replay, where nothing reads it."""

    has_prompts: bool = False
    has_decodes: bool = False
    #: Prompts over a cached context: chunked prefill, prefix caching.
    has_chunks: bool = False
    has_fresh_prompts: bool = False
    #: New tokens of all requests, and the cached contexts of prompts.
    num_keys: int = 0
    #: MLA: which requests have no cached context, [B], in steps where a prompt has one; else None.
    fresh: Optional[paddle.Tensor] = None
    #: MLA: what some of FastDeploy's models ask for before they read latents back and put them before the new ones.
    has_prefix_cache: bool = False
    #: MLA: where the keys of each request begin, [B + 1], once a model has read latents back.
    cu_seqlens_k: Optional[paddle.Tensor] = None
    #: The backends that have it.
    readers: set = field(default_factory=set)


class FolioBackend(AttentionBackend):
    """What both backends have in common."""

    __infer_dynamic_dims_fields__ = ["attention_metadata"]
    #: Newer runners put prompts and decodes apart for backends that ask for it.
    enable_ids_reorder = False

    def __init__(self, fd_config, kv_num_heads, num_heads, head_dim, encoder_block_shape_q=-1, decoder_block_shape_q=-1):
        AttentionBackend.__init__(self)
        model = fd_config.model_config
        mode = getattr(fd_config.parallel_config, "pd_disaggregation_mode", None)
        if mode not in (None, "None", ""):
            raise NotImplementedError(f"pd_disaggregation_mode is {mode}: Folio sends no signals of prefill-decode "
                                      "disaggregation, and what waits for them would hang; None is accepted")
        self.attention_metadata = None
        self.kv_num_heads, self.num_heads = kv_num_heads, num_heads
        self.head_dim = getattr(model, "head_dim", None) or head_dim
        self.group_size = num_heads // kv_num_heads
        self.block_size = fd_config.cache_config.block_size
        self.max_seq_len = getattr(model, "max_model_len", None) or fd_config.parallel_config.max_model_len
        self.causal = getattr(model, "causal", True)
        self.use_speculate = fd_config.speculative_config.method is not None
        self.max_draft_tokens = fd_config.speculative_config.num_speculative_tokens or 0
        self.encoder_block_shape_q, self.decoder_block_shape_q = encoder_block_shape_q, decoder_block_shape_q

    def init_attention_metadata(self, forward_meta):
        """Once per step. Newer runners have a backend for each layer: the first of them looks at the lengths for all."""
        step = getattr(forward_meta, "folio_step", None)
        if step is None or id(self) in step.readers:
            step = forward_meta.folio_step = self.metadata_of(forward_meta)
        step.readers.add(id(self))
        self.attention_metadata = step

    def metadata_of(self, meta):
        """
        What a step is; fills max_len_tensor_cpu, by which models decide between prompts and decodes. The lengths are copied to
        the host once, here: whoever asks for them again waits for the device again.
        """
        chunks, fresh, num_keys = folio_paddle_ops.folio_max_lengths(meta.seq_lens_encoder, meta.seq_lens_decoder,
                                                                     meta.seq_lens_this_time, meta.max_len_tensor_cpu)
        lengths = meta.max_len_tensor_cpu.numpy()
        return FolioMetadata(has_prompts=bool(lengths[1] > 0), has_decodes=bool(lengths[4] > 0), has_chunks=chunks,
                             has_fresh_prompts=fresh, num_keys=num_keys)

    def get_attntion_meta(self):
        """FastDeploy's spelling."""
        return self.attention_metadata

    get_attention_meta = get_attntion_meta

    def forward_extend(self, *args, **kwargs):
        """Every step is a mixture."""
        return self.forward_mixed(*args, **kwargs)

    forward_decode = forward_extend


class FolioAttentionBackend(FolioBackend):
    """FOLIO_ATTN: grouped-query attention over caches of keys and values."""

    def __init__(self, fd_config, *args, **kwargs):
        super().__init__(fd_config, *args, **kwargs)
        model = fd_config.model_config
        self.rope_3d = rotates_by_three_axes(fd_config)
        self.window_size = getattr(model, "window_size", 0)
        for name in ("sink_size", "head_wise_swa_ratio"):
            if getattr(model, name, 0):
                raise NotImplementedError(f"{name} is {getattr(model, name)}; windows of single heads have no code, 0 is accepted")

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        """Those of FastDeploy's append attention, whose rows of int4 have half as many bytes as elements."""
        if kv_cache_quant_type not in CACHES:
            raise NotImplementedError(f"kv_cache_quant_type is {kv_cache_quant_type}; accepted are {', '.join(map(str, CACHES))}")
        return AppendAttentionBackend.get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type)

    def forward_mixed(self, q, k, v, qkv, compressed_kv, k_pe, layer, forward_meta):
        """qkv [T, (Hq + 2 Hkv) d] to [T, Hq d]: bias, RoPE, norms, cache write, attention."""
        meta, quant = forward_meta, getattr(layer, "cache_quant_type_str", "none")
        rotary_embs = None if getattr(meta, "rope_already_applied", False) else meta.rotary_embs
        after_rope = not getattr(layer, "qk_norm_before_rope", False)
        window = self.window_size if self.window_size > 0 else getattr(layer, "sliding_window", 0) or 0
        unread = meta.max_len_tensor_cpu  # in the places of tile lists, which FastDeploy's own kernels take
        scales = [getattr(layer, name, None) for name in ("cache_k_scale", "cache_v_scale", "cache_k_out_scale", "cache_v_out_scale")]
        if quant == "none":
            scales = [None] * 4
        return ops.op("append_attention")(
            qkv, meta.caches[2 * layer.layer_id], meta.caches[2 * layer.layer_id + 1], meta.seq_lens_encoder,
            meta.seq_lens_decoder, meta.seq_lens_this_time, meta.batch_id_per_token, meta.cu_seqlens_q, meta.block_tables,
            *[unread] * 10, rotary_embs, meta.attn_mask, getattr(layer, "qkv_bias", None), getattr(layer, "qkv_scale", None),
            *scales,
            getattr(layer, "cache_k_zp", None), getattr(layer, "cache_v_zp", None), getattr(layer, "linear_shift", None),
            getattr(layer, "linear_smooth", None), meta.attn_mask_offsets, None,
            getattr(layer, "q_norm_weight", None) if after_rope else None,
            getattr(layer, "k_norm_weight", None) if after_rope else None, getattr(layer, "sinks", None),
            getattr(layer, "rms_norm_eps", 1e-6), COMPUTE[qkv.dtype], quant, getattr(layer, "use_neox_rotary_style", False),
            self.rope_3d, self.max_seq_len, 0.0, 0.0, getattr(layer, "out_scale", -1.0), self.encoder_block_shape_q,
            self.decoder_block_shape_q, 32768, self.max_seq_len, self.max_draft_tokens + 1, self.causal,
            self.use_speculate, window, 0)


class FolioMLAAttentionBackend(FolioBackend, MLAAttentionBackend):
    """
    FOLIO_MLA_ATTN: multi-head latent attention over caches of latent records. FastDeploy's runner computes positions for
    instances of its own MLA backend, so this is one; nothing but the caches' shape is taken from there.
    """

    def __init__(self, fd_config, *args, **kwargs):
        super().__init__(fd_config, *args, **kwargs)
        model = fd_config.model_config
        self.kv_lora_rank, self.qk_rope_head_dim = model.kv_lora_rank, model.qk_rope_head_dim
        self.awaited = None  # the layer whose call with k=None has to come
        self.k_has_contexts = False  # in this step's last call with k
        ops.replace_merge()
        # The scale of the heads before absorption, with YaRN's factor where the model has it.
        self.softmax_scale = (model.qk_nope_head_dim + model.qk_rope_head_dim) ** -0.5 * yarn_mscale(
            getattr(model, "rope_scaling", None)) ** 2

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        """Those of FastDeploy's MLA backend: one shape, or two, as its version has it."""
        if kv_cache_quant_type not in (None, "none"):
            raise NotImplementedError(f"kv_cache_quant_type is {kv_cache_quant_type}; None is accepted")
        return MLAAttentionBackend.get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type)

    def init_attention_metadata(self, forward_meta):
        """As every backend's; a call that the last step has left out is found here."""
        self.require_absorbed_call()
        self.k_has_contexts = False
        super().init_attention_metadata(forward_meta)

    def metadata_of(self, meta):
        """
        Prompts with a cached context (chunked prefill, prefix caching) are attended in the absorbed form, as decodes are,
        where k and v of a step hold its new tokens only: the cache holds the latents of all of them.
        """
        step = super().metadata_of(meta)
        if step.has_chunks:
            if meta.step_use_cudagraph:
                raise NotImplementedError("a prompt of a step that is replayed from a graph has a cached context; graphs of "
                                          "prompts must be off for chunked prefill and prefix caching")
            step.fresh = meta.seq_lens_decoder.flatten() <= 0
        return step

    def require_absorbed_call(self):
        """A layer whose absorbed call did not come has left out the prompts with a cached context."""
        layer, self.awaited = self.awaited, None
        if layer is not None:
            raise RuntimeError(f"layer {layer} has prompts over a cached context, and its model did not call with k=None for "
                               "them; chunked prefill and prefix caching must be off for this model")

    def forward_mixed(self, q, k, v, qkv, compressed_kv, k_pe, layer, forward_meta):
        """
        With k and v: prompts, [T, H, v's width]. Without: decodes, [T, H kv_lora_rank]. Prompts over a cached context are
        attended with k and v where the model has put their context there, and without else. Other rows are 0: models merge
        the two, or add them under a mask that is true for all prompts.
        """
        meta = forward_meta
        cache = meta.caches[layer.layer_id]
        if k is not None:
            self.require_absorbed_call()
            self.k_has_contexts = self.has_contexts(k, q)
            ops.op("prefill_mla_write_cache", "_v2")(
                compressed_kv, k_pe, cache, meta.seq_lens_encoder, meta.seq_lens_decoder, meta.batch_id_per_token,
                meta.cu_seqlens_q, meta.block_tables, None, "none", self.max_seq_len)
            return self.prompts(q, k, v, layer, meta)
        self.awaited = None
        ops.op("decode_mla_write_cache")(
            compressed_kv, k_pe, cache, meta.seq_lens_decoder, meta.seq_lens_encoder, meta.batch_id_per_token,
            meta.cu_seqlens_q, meta.block_tables, "none", self.use_speculate)
        return self.absorbed(q, cache, meta)

    def has_contexts(self, k, q):
        """Whether k has the cached contexts of prompts before their new tokens. Newer models read them back."""
        step = self.attention_metadata
        if k.shape[0] == q.shape[0]:
            return False
        if not step.has_chunks or k.shape[0] != step.num_keys:
            raise NotImplementedError(f"k has {k.shape[0]} rows and q {q.shape[0]}; accepted are as many as q has, or "
                                      f"{step.num_keys}: those of this step and the cached contexts of its prompts")
        return True

    def starts_of_keys(self, meta):
        """cu_seqlens_k with the contexts. Not all versions of FastDeploy that read them back count them there."""
        step = self.attention_metadata
        if step.cu_seqlens_k is None:
            this_time, context = meta.seq_lens_this_time.flatten(), meta.seq_lens_decoder.flatten()
            keys = this_time + paddle.where(meta.seq_lens_encoder.flatten() > 0, context, paddle.zeros_like(context))
            step.cu_seqlens_k = paddle.concat([paddle.zeros([1], dtype="int32"), keys.cumsum(dtype="int32")])
        return step.cu_seqlens_k

    def prompts(self, q, k, v, layer, meta):
        """Attention of prompts over k; in steps with contexts that are not there, 0 for the requests that have one."""
        step = self.attention_metadata
        cu_seqlens_k = self.starts_of_keys(meta) if self.k_has_contexts else meta.cu_seqlens_q
        fresh = None if self.k_has_contexts else step.fresh
        if fresh is not None:
            self.awaited = layer.layer_id
            if not step.has_fresh_prompts:
                return paddle.zeros([q.shape[0], *v.shape[1:]], dtype=q.dtype)
        out = ops.flash_attention_v3_varlen(q, k, v, meta.cu_seqlens_q, cu_seqlens_k, None, None, causal=self.causal,
                                            softmax_scale=self.softmax_scale)[0]
        if fresh is None:
            return out
        token = paddle.arange(q.shape[0], dtype="int32")
        request = paddle.searchsorted(meta.cu_seqlens_q[1:], token, right=True)
        rows = paddle.concat([fresh, paddle.zeros([1], dtype="bool")])[request]
        return paddle.where(rows[:, None, None], out, paddle.zeros_like(out))

    def absorbed(self, q, cache, meta):
        """
        Attention over latents: of decodes, and of prompts whose context was not in k. A model that has set cache_seqlens gives
        one row for each request, the first of its new tokens.
        """
        all_with_context = ops.prompts_were_decoded = not self.k_has_contexts
        prompts, context, this_time = meta.seq_lens_encoder, meta.seq_lens_decoder, meta.seq_lens_this_time
        cu_seqlens_q = meta.cu_seqlens_q
        if getattr(meta, "cache_seqlens", None) is not None:
            if self.use_speculate or all_with_context and self.attention_metadata.has_chunks:
                raise NotImplementedError("the model gives one row for each request, and drafts or prompts over a cached context "
                                          "have more; without USE_FLASH_MLA models give all rows on Hopper")
            this_time = this_time.clip(max=1)
            cu_seqlens_q = paddle.arange(q.shape[0] + 1, dtype="int32")
        # The signature that says which requests are prompts, so that no list of tiles is read: any tensor stands for them.
        return ops.op("multi_head_latent_attention", "_v1")(
            q, cache, cache, paddle.zeros_like(prompts) if all_with_context else prompts, context, this_time,
            cu_seqlens_q, meta.batch_id_per_token, meta.block_tables, *[meta.max_len_tensor_cpu] * 14, *[None] * 11,
            COMPUTE[q.dtype], "none", self.kv_lora_rank, self.max_seq_len, self.softmax_scale, 0.0, 0.0, 0.0,
            self.max_draft_tokens, True, self.use_speculate)


def rotates_by_three_axes(fd_config):
    """Newer configurations say whether it is so in this run, older ones whether the model can. Draft models never do."""
    model = fd_config.model_config
    if getattr(fd_config.speculative_config, "model_type", "main") != "main":
        return False
    in_force = getattr(fd_config, "enable_rope_3d_runtime", None)
    return bool(getattr(model, "rope_3d", False) or getattr(model, "use_3d_rope", False) if in_force is None else in_force)


def yarn_mscale(rope_scaling):
    """0.1 mscale_all_dim ln(factor) + 1; 1 without YaRN. DeepSeek-V3: 1.36889."""
    import math

    if not rope_scaling or rope_scaling.get("factor", 1) <= 1:
        return 1.0
    return 0.1 * float(rope_scaling.get("mscale_all_dim", 0)) * math.log(rope_scaling["factor"]) + 1.0
