"""FastDeploy's append attention: the shapes of its caches, and an op behind a function of FastDeploy's."""

from fastdeploy.model_executor.layers.attention.ops import append_attention

from .base_attention_backend import AttentionBackend


class AppendAttentionBackend(AttentionBackend):
    def init_attention_metadata(self, forward_meta):
        pass

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        row = self.head_dim // 2 if kv_cache_quant_type == "int4_zp" else self.head_dim
        shape = [max_num_blocks, self.kv_num_heads, self.block_size, row]
        return shape, shape

    def forward_mixed(self, *args):
        return append_attention(*args)
