"""Small models with random weights, saved where vLLM can load them, with a tokenizer of numbered words."""

from pathlib import Path

import heads
import tokenizers
import torch
import transformers
from small_models import DEEPSEEK, GEMMA2, HEADS, HEARING, SIZES, TOKENS, VOCABULARY, WHISPER, random_model

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
    # Sinks, and a window in every second layer.
    "granite": transformers.GraniteSWAConfig(
        **SIZES,
        **HEADS,
        **TOKENS,
        attention_multiplier=32**-0.5,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=48,
        tie_word_embeddings=False,
    ),
    "whisper": transformers.WhisperConfig(**WHISPER),
}

_CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "gemma2": transformers.Gemma2ForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "bloom": transformers.BloomForCausalLM,
    "bert": transformers.BertModel,
    "deepseek": transformers.DeepseekV2ForCausalLM,
    "granite": transformers.GraniteSWAForCausalLM,
    "whisper": transformers.WhisperForConditionalGeneration,
}


#: A model that drafts for another is that one with weights that are so far off: it is right now and then.
_DRAFT = "-draft"
_DRAFT_NOISE = 0.02
_HEAD = "-eagle"


def save(name: str, folder: Path) -> Path:
    """The folder of a model, made where it is missing. MODEL-draft and the head MODEL-eagle draft for MODEL."""
    path = folder / name
    if not (path / "config.json").exists():
        kind = name.removesuffix(_DRAFT).removesuffix(_HEAD)
        model = random_model(_CLASSES[kind], CONFIGS[kind])
        if name.endswith(_HEAD):
            heads.save(model, path)
            return path
        if name != kind:
            for weight in model.parameters():
                weight.data.add_(_DRAFT_NOISE * torch.randn_like(weight))
        if name == "granite":
            # They are 0 in a new model. Now some take most of a row, and some nearly nothing.
            for layer in model.model.layers:
                layer.self_attn.sinks.data.normal_(std=3)
        if name == "whisper":
            # Its output has the embeddings' weights, which are small: logits would hardly differ.
            model.model.decoder.layer_norm.weight.data.mul_(10)
        model.save_pretrained(path)
        words = tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_WORDS).save_pretrained(path)
        if name == "whisper":
            transformers.WhisperFeatureExtractor(**HEARING, processor_class="WhisperProcessor").save_pretrained(path)
    return path
