"""The attention backend for everything but MLA: what it accepts, how a step is planned, how a layer runs."""

from dataclasses import dataclass
from typing import Any, ClassVar

import folio
import torch
from folio_torch import context_of
from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.attention.backends.utils import compute_mm_prefix_range_tensor, get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
)

from folio_vllm.plans import Batch, Bounds, Planner, Problem
from folio_vllm.selection import NAME

#: Element types of Folio by vLLM's name; other names are the model's own type.
FP8 = {"fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2"}

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_LARGEST_HEAD = 512


def cache_dtype(name: str, model_dtype: torch.dtype) -> str | torch.dtype:
    """The type of a cache's elements, by the value of `kv_cache_dtype`."""
    return FP8.get(name, model_dtype)


class FolioBackend(AttentionBackend):
    """What Folio accepts. vLLM refuses other configurations with the names of these methods' subjects."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", *FP8]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type["FolioImpl"]:
        return FolioImpl

    @staticmethod
    def get_builder_cls() -> type["FolioMetadataBuilder"]:
        return FolioMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        # Pages of other sizes are slower: their rows are gathered one by one.
        return [MultipleOf(8)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= _LARGEST_HEAD

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability is None or capability.to_int() >= 80

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        # On the CPU, connectors rewrite what they received to the layout of vLLM's own backend.
        from vllm.platforms import current_platform

        return not current_platform.is_cpu()

    @classmethod
    def supports_combination(
        cls,
        head_size,
        dtype,
        kv_cache_dtype,
        block_size,
        use_mla,
        has_sink,
        use_sparse,
        use_mm_prefix,
        device_capability,
    ) -> str | None:
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return f"kv_cache_dtype {kv_cache_dtype} with queries of {dtype}; the queries' type and fp8 are accepted"
        return None


@dataclass
class FolioMetadata(AttentionMetadata):
    """A step of a KV-cache group.

    Attributes:
        planner: the group's.
        batch: lengths and page table.
        num_actual_tokens: query rows, without padding.
        mask: `mask_mode` and `causal_requests` of Folio's run.
        mm_prefix_ranges: `[batch_size, ranges, 2]` int32, or None.
        slot_mapping: replaced by the builder of cross attention.
    """

    planner: Planner
    batch: Batch
    num_actual_tokens: int
    mask: dict[str, Any]
    mm_prefix_ranges: torch.Tensor | None
    slot_mapping: torch.Tensor

    def handle(self):
        """Folio's handle, planned for the step: again, where another step of the group was planned since."""
        return self.planner.planned(self.batch)

    @property
    def sees_future(self) -> bool:
        """Whether some rows see keys behind them, so that windows have two sides."""
        return self.mask["mask_mode"] != "causal"


class FolioMetadataBuilder(AttentionMetadataBuilder[FolioMetadata]):
    """Plans a step: one call of Folio, whatever the number of requests."""

    # Batches of equal query lengths always take the decode handle, so a graph finds the handle that it captured.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if kv_cache_spec.tokens_per_state != 1:
            raise NotImplementedError(f"tokens_per_state is {kv_cache_spec.tokens_per_state}; 1 is accepted by FOLIO")
        model = vllm_config.model_config
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        impls = [layer.impl for layer in layers]
        problem = Problem(
            q_dtype=model.dtype,
            kv_dtype=cache_dtype(impls[0].kv_cache_dtype, model.dtype),
            num_qo_heads=get_num_attention_heads_from_layers(vllm_config, layer_names),
            num_kv_heads=kv_cache_spec.num_kv_heads,
            head_dim_qk=kv_cache_spec.head_size,
            head_dim_vo=kv_cache_spec.head_size_v,
            page_size=kv_cache_spec.block_size,
            graph=vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
            and not isinstance(kv_cache_spec, ChunkedLocalAttentionSpec),
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        self._cached = not isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        windows = [impl.window_left for impl in impls]
        self._window_left = max(windows) if min(windows) >= 0 else None
        self._prefixes_in_window = all(_clamps_prefixes(layer) for layer in layers)
        self._planner = Planner(
            context_of(device),
            problem,
            _bounds(vllm_config, kv_cache_spec),
            max_decode_len=max_decode_query_len(vllm_config),
            share_prefixes=device.type == "cpu"
            and isinstance(kv_cache_spec, FullAttentionSpec)
            and not problem.batch_invariant
            and all(impl.sees_all_keys for impl in impls),
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FolioMetadata:
        common = common_attn_metadata
        ranges = compute_mm_prefix_range_tensor(common.mm_req_doc_ranges, common.num_reqs, self.device)
        batch = Batch(
            size=Bounds(common.num_reqs, common.num_actual_tokens, common.max_seq_len),
            max_qo_len=common.max_query_len,
            qo_indptr=common.query_start_loc[: common.num_reqs + 1],
            kv_len=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor[: common.num_reqs] if self._cached else None,
            # Tokens of a multimodal prefix see each other beyond the window.
            window_left=self._window_left if ranges is None or self._prefixes_in_window else None,
        )
        self._planner.planned(batch)
        return FolioMetadata(
            planner=self._planner,
            batch=batch,
            num_actual_tokens=common.num_actual_tokens,
            mask=_mask(common.causal),
            mm_prefix_ranges=ranges,
            slot_mapping=common.slot_mapping,
        )


def _bounds(vllm_config: VllmConfig, spec: AttentionSpec) -> Bounds:
    """The largest step of a configuration."""
    scheduler = vllm_config.scheduler_config
    num_tokens, batch_size = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    if isinstance(spec, ChunkedLocalAttentionSpec):
        # vLLM makes a request of each chunk that a request's new tokens touch.
        batch_size = min(num_tokens, 2 * batch_size + num_tokens // spec.attention_chunk_size)
    kv_len = vllm_config.model_config.max_model_len
    if isinstance(spec, CrossAttentionSpec):
        kv_len = max(kv_len, vllm_config.scheduler_config.max_num_encoder_input_tokens)
    return Bounds(batch_size, num_tokens, kv_len)


def _clamps_prefixes(layer: AttentionLayer) -> bool:
    """Whether tokens of a multimodal prefix see each other within the layer's window only."""
    return getattr(layer, "mm_prefix_clamp_sliding_window", False)


def _mask(causal: bool | torch.Tensor) -> dict[str, Any]:
    """The mask of a step's runs; a tensor says it request by request."""
    if isinstance(causal, torch.Tensor):
        return dict(mask_mode="causal_by_request", causal_requests=causal)
    return dict(mask_mode="causal" if causal else "full")


class FolioImpl(AttentionImpl[FolioMetadata]):
    """A layer: its window, cap, slopes and sinks are arguments of its runs."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.attn_type = attn_type
        self.sliding_window = sliding_window
        # A window of w keys counts the row's own.
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"sinks have the shape {tuple(sinks.shape)}; ({num_heads},) is accepted")
        self.sinks = sinks
        #: Whether rows see keys at all distances alike: then requests can share the work of a prefix.
        self.sees_all_keys = sliding_window is None and alibi_slopes is None
        flags = []
        self._arguments: dict[str, Any] = dict(flags=flags, sm_scale=self.scale, logits_soft_cap=logits_soft_cap or 0.0)
        if sliding_window is not None:
            flags.append("window")
            self._arguments |= dict(window_left=self.window_left, window_right=-1)
        if alibi_slopes is not None:
            self._arguments["alibi_slopes"] = torch.tensor(alibi_slopes, dtype=torch.float32)
        if use_alibi_sqrt:
            flags.append("alibi_sqrt")
        self._caches: tuple[torch.Tensor, folio.Tensor, folio.Tensor] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is not None:
            self._arguments["sinks"] = self.sinks.detach().to(torch.float32)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FolioMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a layer over the cache, or over `key` and `value` for encoders.

        Args:
            layer: has the scales of fp8 caches.
            query: `[num_tokens or more, num_heads, head_size]`
            key, value: `[num_tokens or more, num_kv_heads, head_size]`
            kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_size]` with any strides: keys, then values.
            attn_metadata: the step's plan; None in profiling runs, whose output is 0.
            output: `[num_tokens or more, num_heads, head_size]`
            output_scale, output_block_scale: refused; `fused_output_quant_supported` says so beforehand.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale and output_block_scale are given; None is accepted by FOLIO")
        if attn_metadata is None:
            return output.fill_(0)
        if self.attn_type in _ENCODERS:
            k, v, scales = key, value, {}
        else:
            (k, v), scales = self._key_and_value_cache(kv_cache), self._scales(layer)
        arguments = self._arguments | attn_metadata.mask
        if self.sliding_window is not None and attn_metadata.sees_future:
            arguments["window_right"] = self.window_left
        if attn_metadata.mm_prefix_ranges is not None:
            arguments["mm_prefix_ranges"] = attn_metadata.mm_prefix_ranges
            if _clamps_prefixes(layer):
                arguments["flags"] = [*arguments["flags"], "mm_prefix_in_window"]
        attn_metadata.handle().run(q=query, k=k, v=v, o=output, **scales, **arguments)
        return output

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes new tokens to the cache; encoders keep none."""
        if self.attn_type in _ENCODERS:
            return
        k_cache, v_cache = self._key_and_value_cache(kv_cache)
        folio.kv_append(
            context_of(key.device),
            key=key,
            value=value,
            k_cache=k_cache,
            v_cache=v_cache,
            slot_mapping=slot_mapping,
            kv_layout="hnd",
            **self._scales(layer),
        )

    def _key_and_value_cache(self, kv_cache: torch.Tensor) -> tuple[folio.Tensor, folio.Tensor]:
        """The two caches in `kv_cache`, described once: a layer's cache stays where it is."""
        if self._caches is None or self._caches[0] is not kv_cache:
            k, v = kv_cache.split([self.head_size, kv_cache.shape[-1] - self.head_size], dim=-1)
            dtype = FP8.get(self.kv_cache_dtype)
            self._caches = (kv_cache, folio.Tensor(k, dtype=dtype), folio.Tensor(v, dtype=dtype))
        return self._caches[1:]

    def _scales(self, layer: AttentionLayer) -> dict[str, torch.Tensor]:
        """What an fp8 cache's numbers are multiplied by: one factor, or one per head."""
        if self.kv_cache_dtype not in FP8:
            return {}
        return dict(k_scales=layer._k_scale.view(-1), v_scales=layer._v_scale.view(-1))
