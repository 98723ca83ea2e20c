"""The backends' names, and the platform that has a class for each."""

import enum

_Backend = enum.Enum("_Backend", ["NATIVE_ATTN", "APPEND_ATTN", "MLA_ATTN", "FLASH_ATTN", "TRITON_MLA_ATTN",
                                 "DECODE_UNIFIED_ATTN"])


class current_platform:
    @classmethod
    def get_attention_backend_cls(cls, selected):
        module = "fastdeploy.model_executor.layers.attention."
        if selected not in (_Backend.APPEND_ATTN, _Backend.MLA_ATTN, _Backend.TRITON_MLA_ATTN):
            raise ValueError("Invalid attention backend you specified.")
        return module + ("AppendAttentionBackend" if selected == _Backend.APPEND_ATTN else "MLAAttentionBackend")
