"""Heads of EAGLE and EAGLE-3 that draft for small Llamas, saved where SGLang can load them. They are not trained.

A head is made of its target's own layers, which see the embedding of the token that a draft begins with. What it lacks
of the target makes it wrong now and then. The target's hidden states, which trained heads draft from, disturb it.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

_DISTURBANCE = {"eagle": 0.0006, "eagle3": 0.002}
#: EAGLE's head has no norm after its last layer. So large are its sums beside the target's, which have one.
_SIZE = 0.1


def save(kind: str, target: transformers.LlamaForCausalLM, path: Path) -> None:
    """Makes a head of a kind, `eagle` or `eagle3`, for the target."""
    torch.manual_seed(2)
    weights, options = (_eagle if kind == "eagle" else _eagle3)(target, _DISTURBANCE[kind])
    path.mkdir(parents=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(target.config.to_dict() | options))


def _eagle(target: transformers.LlamaForCausalLM, disturbance: float) -> tuple[dict, dict]:
    """Layers without a norm before the first, whose products with embeddings are larger for it; and with none after the
    last."""
    embeddings = target.get_input_embeddings().weight
    scale, hidden = embeddings.square().mean().rsqrt() / _SIZE, embeddings.shape[1]
    weights = {f"layers.{name}": weight for name, weight in target.model.layers.state_dict().items()}
    del weights["layers.0.input_layernorm.weight"]
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] = _SIZE * weights[name]
        elif name.startswith("layers.0.self_attn."):
            weights[name] = scale * weights[name]
    weights["fc.weight"] = _SIZE * torch.cat([torch.eye(hidden), disturbance * torch.randn(hidden, hidden)], dim=1)
    weights["fc.bias"] = torch.zeros(hidden)
    return weights, dict(architectures=["LlamaForCausalLMEagle"])


def _eagle3(target: transformers.LlamaForCausalLM, disturbance: float) -> tuple[dict, dict]:
    """Layers of which the first attends to embeddings beside hidden states, and adds to hidden states alone. So it is
    right where the target's embeddings are small beside what its attention gives."""
    hidden = target.config.hidden_size
    weights = {f"layers.{name}": weight for name, weight in target.model.layers.state_dict().items()}
    for name in list(weights):
        if name.startswith("layers.0.self_attn.") and "o_proj" not in name:
            weights[name] = torch.cat([weights[name], torch.zeros_like(weights[name])], dim=1)
        if "input_layernorm" in name and not name.startswith("layers.0."):
            weights[name.replace("input_layernorm", "hidden_norm")] = weights.pop(name)
    weights["layers.0.hidden_norm.weight"] = torch.ones(hidden)
    weights["norm.weight"] = target.model.norm.weight.detach()
    # Before the target's first layer, and after it.
    captured = [-1, 0]
    weights["fc.weight"] = disturbance * torch.randn(hidden, hidden * len(captured))
    return weights, dict(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=target.config.vocab_size,
        eagle_config=dict(eagle_aux_hidden_state_layer_ids=captured, use_aux_hidden_state=True),
    )
