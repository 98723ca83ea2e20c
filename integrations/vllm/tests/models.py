"""Small models with random weights, saved where vLLM can load them, with a tokenizer of numbered words.

Weights are larger than those of trained models, so that attention decides which token comes next: a wrong window, cap
or scale gives other tokens.
"""

from pathlib import Path

import tokenizers
import torch
import transformers

VOCABULARY = 512
_SIZES = dict(vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, initializer_range=0.12)
_HEADS = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=256)
_TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
_WORDS = dict(pad_token="0", bos_token="1", eos_token="2", unk_token="0")
_LENGTH = dict(max_position_embeddings=1024)

CONFIGS = {
    "llama": transformers.LlamaConfig(**_SIZES, **_HEADS, **_TOKENS, **_LENGTH),
    # Caps, scales of their own, and a window in every second layer.
    "gemma2": transformers.Gemma2Config(
        **_SIZES,
        **_HEADS,
        **_TOKENS,
        **_LENGTH,
        sliding_window=64,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=20,
    ),
    "mistral": transformers.MistralConfig(**_SIZES, **_HEADS, **_TOKENS, **_LENGTH, sliding_window=48),
    # ALiBi.
    "bloom": transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=128, n_layer=2, n_head=4, initializer_range=0.12, **_TOKENS
    ),
    # Encoder only.
    "bert": transformers.BertConfig(**_SIZES, num_attention_heads=4, intermediate_size=256, pad_token_id=0, **_LENGTH),
    # MLA with the widths of DeepSeek-V2, which vLLM's own backends need.
    "deepseek": transformers.DeepseekV2Config(
        **_SIZES,
        **_TOKENS,
        **_LENGTH,
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
    ),
}

_CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "gemma2": transformers.Gemma2ForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "bloom": transformers.BloomForCausalLM,
    "bert": transformers.BertModel,
    "deepseek": transformers.DeepseekV2ForCausalLM,
}


def save(name: str, folder: Path) -> Path:
    """The folder of a model, made where it is missing."""
    path = folder / name
    if not (path / "config.json").exists():
        torch.manual_seed(1)
        model = _CLASSES[name](CONFIGS[name])
        if CONFIGS[name].tie_word_embeddings:
            # Where the embeddings are the output's weights, too, large ones repeat the prompt whatever attention says.
            model.get_input_embeddings().weight.data.mul_(0.1)
        model.save_pretrained(path)
        words = tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_WORDS).save_pretrained(path)
    return path
