"""Small models with random weights, saved where SGLang can load them. Their tokens are numbers; there is no tokenizer."""

from functools import cache
from pathlib import Path

import torch
import transformers
from small_models import DEEPSEEK, GEMMA2, HEADS, SIZES, TOKENS, random_model

CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, **HEADS, **TOKENS),
    # SGLang reads the name that older checkpoints have.
    "gemma2": transformers.Gemma2Config(**GEMMA2, hidden_act="gelu_pytorch_tanh"),
    # Windows in every second layer, whose keys are in a pool of their own.
    "cohere2": transformers.Cohere2Config(
        **SIZES,
        **(HEADS | dict(num_attention_heads=4)),
        **TOKENS,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        logit_scale=1.0,
        is_hybrid_swa=True,
        hybrid_layer_pattern=[1, 0],
    ),
    "deepseek": transformers.DeepseekV2Config(**DEEPSEEK, moe_layer_freq=1),
}

_CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "gemma2": transformers.Gemma2ForCausalLM,
    "cohere2": transformers.Cohere2ForCausalLM,
    "deepseek": transformers.DeepseekV2ForCausalLM,
}


#: A model that drafts for another is that one with weights that are so far off: it is right now and then.
_DRAFT = "-draft"
_DRAFT_NOISE = 0.02


def save(name: str, folder: Path) -> Path:
    """The folder of a model, made where it is missing."""
    path = folder / name
    if not (path / "config.json").exists():
        kind = name.removesuffix(_DRAFT)
        model = random_model(_CLASSES[kind], CONFIGS[kind])
        if name != kind:
            for weight in model.parameters():
                weight.data.add_(_DRAFT_NOISE * torch.randn_like(weight))
        model.save_pretrained(path)
    return path


@torch.inference_mode()
def exact(name: str, folder: Path, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The logprobs of all tokens that could stand in the place of each of `tokens`, by transformers in float32."""
    model = _loaded(save(name, folder))
    ids = torch.tensor([prompt + tokens[:-1]])
    return model(ids).logits[0, len(prompt) - 1 :].log_softmax(-1)


@cache
def _loaded(path: Path) -> transformers.PreTrainedModel:
    # Its other implementations leave out caps.
    options = dict(dtype=torch.float32, attn_implementation="eager")
    if path.name == "cohere2":
        # SGLang's model does not count a row's own key to its window.
        options["sliding_window"] = CONFIGS["cohere2"].sliding_window + 1
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()
