"""What a step gives to a backend. Newer versions have None for every other attribute, older ones nothing."""

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_mixed(self):
        return self == ForwardMode.MIXED


@dataclass
class ForwardMeta:
    ids_remove_padding: Any
    rotary_embs: Any = None
    step_use_cudagraph: bool = False
    attn_backend: Any = None
    forward_mode: ForwardMode = ForwardMode.MIXED
    attn_mask: Any = None
    attn_mask_offsets: Any = None
    max_len_tensor_cpu: Any = None
    seq_lens_encoder: Any = None
    seq_lens_decoder: Any = None
    seq_lens_this_time: Any = None
    batch_id_per_token: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    block_tables: Any = None
    caches: Any = None
