"""A head of EAGLE-3's form for a small model, which drafts that the last token comes again, as such models often do."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
DRAFTED_TOKENS = 200  # of the vocabulary


def make_head(folder: Path, model: Path) -> Path:
    """Save a head for the model of another folder, under the names that are published.

    What attention and feed-forward add is nothing, and of the model's hidden states only the last layer's goes through:
    the model's own norm and output layer make of it the token that came after it, which is the last one sampled.
    """
    config = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    head = {name: config[name] for name in SHARED} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFTED_TOKENS,
        "hidden_act": "silu",
        "rms_norm_eps": config["rms_norm_eps"],
        "max_position_embeddings": config["max_position_embeddings"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, layers], "use_aux_hidden_state": True},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(head))
    save_file(head_tensors(head, load_file(model / "model.safetensors")), folder / "model.safetensors")
    return folder


def head_tensors(head: dict[str, int], model: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the head's tensors by their published names."""
    hidden, feed_forward, size = head["hidden_size"], head["intermediate_size"], head["head_dim"]
    queries, keys = head["num_attention_heads"] * size, head["num_key_value_heads"] * size
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "self_attn.q_proj": (queries, 2 * hidden),
        "self_attn.k_proj": (keys, 2 * hidden),
        "self_attn.v_proj": (keys, 2 * hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (feed_forward, hidden),
        "mlp.up_proj": (feed_forward, hidden),
        "mlp.down_proj": (hidden, feed_forward),
    }
    tensors = {
        f"midlayer.{name}.weight": torch.zeros(shape)
        if name.endswith(("o_proj", "down_proj"))
        else 0.1 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(hidden)
    rows = torch.randperm(head["vocab_size"], generator=generator)[:DRAFTED_TOKENS].sort().values
    output = model.get("lm_head.weight", model["model.embed_tokens.weight"])
    nothing = torch.zeros(hidden, hidden)
    return tensors | {
        "fc.weight": torch.cat((nothing, nothing, torch.eye(hidden)), 1),
        "norm.weight": model["model.norm.weight"].clone(),
        "lm_head.weight": output[rows].clone(),
        "d2t": rows - torch.arange(DRAFTED_TOKENS),
    }


def write_head(folder: Path, parameters: dict[str, Tensor]) -> None:
    """Write a folder's head into vLLM's parameters of it, in place; rows of a padded vocabulary are left alone."""
    tensors = load_file(folder / "model.safetensors")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name, parameter in parameters.items():
        published = name.replace("model.layers.0.", "midlayer.").removeprefix("model.")
        published = {"draft_id_to_target_id": "d2t"}.get(published, published)
        fused = next((kind for kind in parts if kind in published), None)
        names = [published.replace(fused, part) for part in parts[fused]] if fused else [published]
        value = torch.cat([tensors[each] for each in names])
        parameter[: len(value)].copy_(value)
