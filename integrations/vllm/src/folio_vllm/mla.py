"""The backend for multi-head latent attention: DeepSeek-V2 and its successors.

vLLM's common MLA code splits a step and multiplies queries and outputs with the weights. Decodes and short extensions
run absorbed (`folio.Mla`). Prompts run in their multi-head form over a context that is unpacked chunk by chunk
(`folio.MlaContext`), in place of vLLM's own prefill backends.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import folio
import torch
from folio_torch import context_of
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    split_kv_b_proj,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec

from folio_vllm.attention import FP8, FolioBackend, cache_dtype
from folio_vllm.selection import NAME

#: How the names of a draft model's layers begin.
_DRAFT_MODEL = "draft_model."


class FolioMLABackend(MLACommonBackend):
    """What Folio accepts for MLA. Sparse MLA (DeepSeek-V3.2) is refused."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    # vLLM reads the pages of fp8_e5m2 as e4m3 here, so that one is left out.
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    supports_compute_capability = FolioBackend.supports_compute_capability
    supports_combination = FolioBackend.supports_combination
    supports_kv_connector = FolioBackend.supports_kv_connector

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        from vllm.platforms import current_platform

        # GPUs have MLA for types of 16 bits.
        return super().supports_dtype(dtype) and (dtype != torch.float32 or current_platform.is_cpu())

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type["FolioMLAImpl"]:
        return FolioMLAImpl

    @staticmethod
    def get_builder_cls() -> type["FolioMLAMetadataBuilder"]:
        return FolioMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(8)]


@dataclass
class FolioMLADecodeMetadata(MLACommonDecodeMetadata):
    """The requests of a step that run absorbed; `handle` is planned for them."""

    handle: folio.Mla


@dataclass
class FolioMLAMetadata(MLACommonMetadata[FolioMLADecodeMetadata]):
    """A step; `context_handle` is planned for its prompts, if there are any."""

    context_handle: folio.MlaContext | None = None


class FolioMLAMetadataBuilder(MLACommonMetadataBuilder[FolioMLAMetadata]):
    """Plans both parts of a step, each by one call of Folio."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, FolioMLAMetadata)
        self._is_draft = all(name.startswith(_DRAFT_MODEL) for name in layer_names)
        if self._is_draft:
            # Its first step has the token that was sampled last, too. Such steps are decodes: what is known of their
            # lengths on the host is a bound.
            self.reorder_batch_threshold += 1
        self._context = context_of(device)
        self._decode = self._prefill = None
        scheduler = vllm_config.scheduler_config
        dtype = vllm_config.model_config.dtype
        self._desc: dict[str, Any] = dict(
            kv_dtype=cache_dtype(vllm_config.cache_config.cache_dtype, dtype),
            num_heads=self.num_heads,
            kv_lora_rank=self.mla_dims.kv_lora_rank,
            qk_rope_head_dim=self.mla_dims.qk_rope_head_dim,
            page_size=kv_cache_spec.block_size,
            max_batch_size=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_batched_tokens,
            max_kv_len=vllm_config.model_config.max_model_len,
        )
        self._dtype = dtype

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **lengths,
    ) -> FolioMLADecodeMetadata:
        if self._decode is None:
            graph = self.compilation_config.cudagraph_mode.has_full_cudagraphs()
            flags = [name for name, on in (("graph", graph), ("batch_invariant", envs.VLLM_BATCH_INVARIANT)) if on]
            self._decode = folio.Mla(
                self._context, flags=flags, q_dtype=self._dtype, max_qo_len=self.reorder_batch_threshold, **self._desc
            )
        self._decode.plan(qo_indptr=query_start_loc_device, kv_len=seq_lens_device, block_table=block_table_tensor)
        return FolioMLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            handle=self._decode,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FolioMLAMetadata:
        common = _of_draft(common_attn_metadata) if self._is_draft else common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)
        if metadata.num_prefills > 0:
            metadata.context_handle = self._plan_context(metadata, common)
        return metadata

    def _plan_context(self, metadata: FolioMLAMetadata, common: CommonAttentionMetadata) -> folio.MlaContext:
        if self._prefill is None:
            self._prefill = folio.MlaContext(
                self._context,
                dtype=self._dtype,
                qk_nope_head_dim=self.mla_dims.qk_nope_head_dim,
                v_head_dim=self.mla_dims.v_head_dim,
                **self._desc,
            )
        prompts = slice(metadata.num_decodes, metadata.num_reqs)
        rows = common.query_start_loc_cpu[metadata.num_decodes : metadata.num_reqs + 1]
        # The bound is exact for prompts.
        self._prefill.plan(
            qo_indptr=rows - rows[0],
            kv_len=common.seq_lens_cpu_upper_bound[prompts],
            block_table=common.block_table_tensor[prompts],
        )
        return self._prefill


def _of_draft(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """A draft model's step with right lengths: vLLM leaves the token that was sampled last out of those on the host."""
    bound = common.seq_lens_cpu_upper_bound
    missing = common.max_seq_len - int(bound[: common.num_reqs].max())
    return common.replace(seq_lens_cpu_upper_bound=bound + missing) if missing > 0 else common


class FolioMLAImpl(MLACommonImpl[FolioMLAMetadata]):
    """A layer of MLA."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_arguments,
    ) -> None:
        refused = dict(alibi_slopes=alibi_slopes, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap)
        for name, value in refused.items():
            if value:
                raise NotImplementedError(f"{name} is {value} in a layer of MLA; none is accepted by FOLIO")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type is {attn_type} in a layer of MLA; decoder is accepted by FOLIO")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_arguments,
        )
        self.supports_quant_query_input = False
        self._k_scale: float | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        w_uk, w_uv = split_kv_b_proj(
            self.kv_b_proj, act_dtype, self.kv_lora_rank, self.num_heads, self.qk_nope_head_dim, self.v_head_dim
        )
        # Where kv_b_proj is not quantised, these are parts of it.
        self._w_uk, self._w_uv = w_uk.permute(1, 2, 0), w_uv.transpose(0, 1)

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer) -> tuple[torch.Tensor, None]:
        q_latent, q_rope = q if isinstance(q, tuple) else q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        o = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
        attn_metadata.decode.handle.run(
            q_latent=q_latent,
            q_rope=q_rope if self.qk_rope_head_dim else None,
            kv=kv_c_and_k_pe_cache,
            o=o,
            sm_scale=self.scale,
            k_scale=self._scale_of(layer._k_scale),
            mask_mode="causal" if attn_metadata.causal else "full",
        )
        return o, None

    def forward_mha(
        self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None
    ) -> None:
        if output_scale is not None:
            raise NotImplementedError("output_scale is not supported by FOLIO; None is accepted")
        kv_nope = self.kv_b_proj(kv_c_normed)[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k_nope, v = kv_nope.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        attn_metadata.context_handle.run(
            q=q,
            k_nope=k_nope,
            k_rope=k_pe,
            v=v,
            kv=kv_c_and_k_pe_cache,
            w_uk=self._w_uk,
            w_uv=self._w_uv,
            o=output.view(-1, self.num_heads, self.v_head_dim),
            sm_scale=self.scale,
            k_scale=self._scale_of(k_scale),
        )

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale) -> None:
        if kv_cache.numel() == 0:
            return
        folio.mla_append(
            context_of(kv_cache.device),
            latent=kv_c_normed,
            rope=k_pe,
            kv=kv_cache,
            slot_mapping=slot_mapping.flatten(),
            kv_dtype=FP8.get(kv_cache_dtype),
            k_scale=self._scale_of(k_scale),
        )

    def _scale_of(self, k_scale: torch.Tensor) -> float:
        """The cache's scale on the host: read once, at the first step, since it is fixed when weights are loaded."""
        if self.kv_cache_dtype not in FP8:
            return 1.0
        if self._k_scale is None:
            self._k_scale = float(k_scale)
        return self._k_scale
