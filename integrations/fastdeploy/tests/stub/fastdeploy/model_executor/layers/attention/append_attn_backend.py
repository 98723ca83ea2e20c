"""FastDeploy's append attention: the shapes of its caches, and an op under its own name."""

from fastdeploy.model_executor.ops.gpu import append_attention

from .base_attention_backend import AttentionBackend


class AppendAttentionBackend(AttentionBackend):
    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        row = self.head_dim // 2 if kv_cache_quant_type == "int4_zp" else self.head_dim
        shape = [max_num_blocks, self.kv_num_heads, self.block_size, row]
        return shape, shape

    def call(self):
        return append_attention()
