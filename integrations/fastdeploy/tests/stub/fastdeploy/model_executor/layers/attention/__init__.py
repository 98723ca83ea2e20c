"""The attention layers' exports."""

from .append_attn_backend import AppendAttentionBackend
from .attention_selecter import get_attention_backend
from .mla_attention_backend import MLAAttentionBackend
