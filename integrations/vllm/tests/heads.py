"""A head of EAGLE that drafts for the small DeepSeek-V2, saved where vLLM can load it. It is not trained.

A head is made of its target's own layers, over embeddings of the tokens. It does not see the first token of a request,
so it is wrong now and then. The target's hidden states, which trained heads draft from, disturb it.
"""

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

_DISTURBANCE = 0.0005


def save(target: transformers.DeepseekV2ForCausalLM, path: Path) -> None:
    """Makes a head for the target. Embeddings and the output's weights are the target's."""
    torch.manual_seed(2)
    config, embeddings = target.config, target.get_input_embeddings().weight
    hidden = config.hidden_size
    weights = {f"layers.{name}": weight for name, weight in target.model.layers.state_dict().items()}
    weights["fc.weight"] = torch.cat([torch.eye(hidden), _DISTURBANCE * torch.randn(hidden, hidden)], dim=1)
    # A head takes the norm of embeddings: this undoes it.
    weights["enorm.weight"] = embeddings.square().mean().sqrt().expand(hidden)
    weights["hnorm.weight"] = torch.ones(hidden)
    weights["norm.weight"] = target.model.norm.weight.detach()
    path.mkdir(parents=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path / "model.safetensors")
    # vLLM counts a head's layers from its target's on.
    dense = 2 * config.num_hidden_layers
    own = dict(architectures=["DeepSeekMTPModel"], first_k_dense_replace=dense)
    transformers.DeepseekV2Config(**config.to_dict() | own).save_pretrained(path)
