"""What a backend is: metadata once per step, forward once per layer, which goes to a method by the step's mode."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass
class AttentionMetadata(ABC):
    pass


class AttentionBackend(ABC):
    @abstractmethod
    def init_attention_metadata(self, forward_meta):
        raise NotImplementedError

    def forward(self, q, k, v, qkv, compressed_kv, k_pe, layer, forward_meta):
        mode = forward_meta.forward_mode
        if mode.is_mixed():
            return self.forward_mixed(q, k, v, qkv, compressed_kv, k_pe, layer, forward_meta)
        if mode.is_decode():
            return self.forward_decode(q, k, v, qkv, compressed_kv, k_pe, layer, forward_meta)
        return self.forward_extend(q, k, v, qkv, compressed_kv, k_pe, layer, forward_meta)
