"""Small models with random weights, saved where SGLang can load them. Their tokens are numbers; there is no tokenizer,
but for Whisper, whose processor has one."""

from functools import cache
from pathlib import Path

import heads
import hearing
import torch
import transformers
from small_models import DEEPSEEK, GEMMA2, HEADS, SIZES, TOKENS, WHISPER, random_model

CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, **HEADS, **TOKENS),
    # Embeddings that are small, since they are the output's weights too.
    "llama-tied": transformers.LlamaConfig(**SIZES, **HEADS, **TOKENS, tie_word_embeddings=True),
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
    "whisper": transformers.WhisperConfig(**WHISPER),
}

_CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "llama-tied": transformers.LlamaForCausalLM,
    "gemma2": transformers.Gemma2ForCausalLM,
    "cohere2": transformers.Cohere2ForCausalLM,
    "deepseek": transformers.DeepseekV2ForCausalLM,
    "whisper": transformers.WhisperForConditionalGeneration,
}


#: A model that drafts for another is that one with weights that are so far off: it is right now and then.
_DRAFT = "draft"
_DRAFT_NOISE = 0.02
_DRAFTS = (_DRAFT, "eagle", "eagle3")


def save(name: str, folder: Path) -> Path:
    """The folder of a model, made where it is missing. MODEL-draft, MODEL-eagle and MODEL-eagle3 draft for MODEL."""
    path = folder / name
    if (path / "config.json").exists():
        return path
    target, _, draft = name.rpartition("-")
    kind = target if draft in _DRAFTS else name
    model = random_model(_CLASSES[kind], CONFIGS[kind])
    if kind != name and draft != _DRAFT:
        heads.save(draft, model, path)
        return path
    if kind != name:
        for weight in model.parameters():
            weight.data.add_(_DRAFT_NOISE * torch.randn_like(weight))
    if name == "whisper":
        _listen(model)
        hearing.save(path)
    model.save_pretrained(path)
    return path


def _listen(model: transformers.WhisperForConditionalGeneration) -> None:
    """Makes what is heard decide which token comes next."""
    # The output has the embeddings' weights, which are small: logits would hardly differ.
    model.model.decoder.layer_norm.weight.data.mul_(10)
    # Positions would drown the sound, and means over them what is attended to.
    for convolution in (model.model.encoder.conv1, model.model.encoder.conv2):
        convolution.weight.data.mul_(3)
    for layer in model.model.decoder.layers:
        layer.encoder_attn.q_proj.weight.data.mul_(3)


@torch.inference_mode()
def exact(name: str, folder: Path, prompt: list[int], tokens: list[int], heard: int | None = None) -> torch.Tensor:
    """The logprobs of all tokens that could stand in the place of each of `tokens`, by transformers in float32.

    Args:
        heard: which sound an encoder hears; None: the model has no encoder.
    """
    path = save(name, folder)
    model, ids = _loaded(path), torch.tensor([prompt + tokens[:-1]])
    if heard is None:
        logits = model(ids).logits
    else:
        logits = model(input_features=hearing.features(path, heard), decoder_input_ids=ids).logits
    return logits[0, len(prompt) - 1 :].log_softmax(-1)


@cache
def _loaded(path: Path) -> transformers.PreTrainedModel:
    # Its other implementations leave out caps.
    options = dict(dtype=torch.float32, attn_implementation="eager")
    if path.name == "cohere2":
        # SGLang's model does not count a row's own key to its window.
        options["sliding_window"] = CONFIGS["cohere2"].sliding_window + 1
    return _CLASSES[path.name].from_pretrained(path, **options).eval()
