"""What the tests of engines have in common: small models with random weights, and prompts of numbers for them. Which models
and cases there are, and how an engine loads them, is each integration's.

Weights are larger than those of trained models, so that attention decides which token comes next: a wrong window, cap
or scale gives other tokens.
"""

from typing import Any

import torch
import transformers

VOCABULARY = 512

#: Options of a transformers config.
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, initializer_range=0.12, max_position_embeddings=1024
)
HEADS: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=256)
TOKENS: dict[str, Any] = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
#: Caps, scales of their own, and a window in every second layer.
GEMMA2: dict[str, Any] = (
    SIZES
    | HEADS
    | TOKENS
    | dict(sliding_window=64, attn_logit_softcapping=5.0, final_logit_softcapping=30.0, query_pre_attn_scalar=20)
)
#: MLA with the widths of DeepSeek-V2, which engines' own backends need. All layers are dense.
DEEPSEEK: dict[str, Any] = (
    SIZES
    | TOKENS
    | dict(
        intermediate_size=256,
        moe_intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
    )
)
#: How Whisper hears: mel bands, and seconds that it pads to.
HEARING: dict[str, Any] = dict(feature_size=80, chunk_length=4)
#: Encoder and decoder. The encoder gives so many keys as `max_source_positions` says, whatever it hears.
WHISPER: dict[str, Any] = TOKENS | dict(
    vocab_size=VOCABULARY,
    d_model=128,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=256,
    decoder_ffn_dim=256,
    num_mel_bins=HEARING["feature_size"],
    max_source_positions=50 * HEARING["chunk_length"],
    max_target_positions=512,
    init_std=0.12,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)

#: Prompts of these many tokens, computed and decoded together.
MIXED = (1, 5, 17, 40, 130, 300)


def random_model(kind: type, config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """A model with the same weights in every run."""
    torch.manual_seed(1)
    model = kind(config)
    if config.tie_word_embeddings:
        # Where the embeddings are the output's weights, too, large ones repeat the prompt whatever attention says.
        model.get_input_embeddings().weight.data.mul_(0.1)
    return model


def prompts(lengths: tuple[int, ...], shared: int) -> list[list[int]]:
    """Prompts that begin with the same `shared` tokens, and have so many of their own."""
    head = _tokens(99, shared)
    return [head + _tokens(i, n) for i, n in enumerate(lengths)]


def _tokens(seed: int, length: int) -> list[int]:
    """Token ids that look random and are the same in every run; 0 to 2 mean something to models."""
    state, ids = seed + 1, []
    for _ in range(length):
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        ids.append(3 + (state >> 33) % (VOCABULARY - 3))
    return ids
