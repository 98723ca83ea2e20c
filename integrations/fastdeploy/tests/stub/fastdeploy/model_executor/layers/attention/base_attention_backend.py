"""What a backend is: metadata once per step, forward once per layer."""

from dataclasses import dataclass


@dataclass
class AttentionMetadata:
    pass


class AttentionBackend:
    def init_attention_metadata(self, forward_meta):
        raise NotImplementedError

    def forward(self, q, k, v, qkv, compressed_kv, k_pe, layer, forward_meta):
        mode = getattr(self, "forward_" + forward_meta.forward_mode)
        return mode(q, k, v, qkv, compressed_kv, k_pe, layer, forward_meta)
