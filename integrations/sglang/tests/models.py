"""Small models with random weights, saved where SGLang can load them. Their tokens are numbers; there is no tokenizer.

Weights are larger than those of trained models, so that attention decides which token comes next: a wrong window, cap
or scale gives other tokens.
"""

from functools import cache
from pathlib import Path

import torch
import transformers

VOCABULARY = 512
_SIZES = dict(vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, initializer_range=0.12)
_HEADS = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=256)
_TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
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
        # SGLang reads the name that older checkpoints have.
        hidden_act="gelu_pytorch_tanh",
    ),
    # Windows in every second layer, whose keys are in a pool of their own.
    "cohere2": transformers.Cohere2Config(
        **_SIZES,
        **(_HEADS | dict(num_attention_heads=4)),
        **_TOKENS,
        **_LENGTH,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        logit_scale=1.0,
        is_hybrid_swa=True,
        hybrid_layer_pattern=[1, 0],
    ),
    # MLA with the widths of DeepSeek-V2. All layers are dense.
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
        moe_layer_freq=1,
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
        torch.manual_seed(1)
        model = _CLASSES[kind](CONFIGS[kind])
        if CONFIGS[kind].tie_word_embeddings:
            # Where the embeddings are the output's weights, too, large ones repeat the prompt whatever attention says.
            model.get_input_embeddings().weight.data.mul_(0.1)
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
