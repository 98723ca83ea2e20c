"""Small models with random weights, saved where vLLM can load them, with a tokenizer of numbered words."""

from pathlib import Path

import tokenizers
import transformers
from small_models import DEEPSEEK, GEMMA2, HEADS, SIZES, TOKENS, VOCABULARY, random_model

_WORDS = dict(pad_token="0", bos_token="1", eos_token="2", unk_token="0")

CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, **HEADS, **TOKENS),
    "gemma2": transformers.Gemma2Config(**GEMMA2),
    "mistral": transformers.MistralConfig(**SIZES, **HEADS, **TOKENS, sliding_window=48),
    # ALiBi.
    "bloom": transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=128, n_layer=2, n_head=4, initializer_range=0.12, **TOKENS
    ),
    # Encoder only.
    "bert": transformers.BertConfig(**SIZES, num_attention_heads=4, intermediate_size=256, pad_token_id=0),
    "deepseek": transformers.DeepseekV2Config(**DEEPSEEK),
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
        model = random_model(_CLASSES[name], CONFIGS[name])
        model.save_pretrained(path)
        words = tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_WORDS).save_pretrained(path)
    return path
