"""FastDeploy's MLA: the shapes of its caches, an op under another name, and Paddle's ragged attention."""

from fastdeploy.model_executor.ops.gpu import multi_head_latent_attention as multi_head_latent_attention_cuda
from paddle.nn.functional.flash_attention import flash_attention_v3_varlen, flash_attn_unpadded

from .base_attention_backend import AttentionBackend


class MLAAttentionBackend(AttentionBackend):
    def init_attention_metadata(self, forward_meta):
        pass

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        return [max_num_blocks, 1, self.block_size, self.kv_lora_rank + self.qk_rope_head_dim], []
