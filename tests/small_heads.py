"""Small heads in EAGLE-3's form, in the published form of files, and the same by torch alone.

The model that a head drafts for is transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from torch import Tensor

from hugging_face import load_model

WIDTHS = {
    "head_dim": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}


def head_fields(model: Path, drafted: int, layers: Sequence[int] | None, **fields: Any) -> dict[str, Any]:
    """Return the config.json of a head that drafts for ``model``, and reads it before ``layers``."""
    target = json.loads((model / "config.json").read_text())
    states = {} if layers is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 1,
        "draft_vocab_size": drafted,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "initializer_range": 0.02,
        "max_position_embeddings": 256,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "vocab_size": target["vocab_size"],
        **WIDTHS,
        **states,
        **fields,
    }


def make_head(
    folder: Path, model: Path, drafted: int, layers: Sequence[int], seed: int = 3, scale: float = 0.08
) -> Path:
    """Save a head with random weights, whose ``drafted`` tokens are spread over the vocabulary; return its folder."""
    config, generator = head_fields(model, drafted, layers), torch.Generator().manual_seed(seed)
    hidden, inner, size = config["hidden_size"], WIDTHS["intermediate_size"], config["vocab_size"]
    queries, keys = (
        int(WIDTHS[heads] * WIDTHS["head_dim"]) for heads in ("num_attention_heads", "num_key_value_heads")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(layers) * hidden),
        "lm_head.weight": (drafted, hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.mlp.down_proj.weight": (hidden, int(inner)),
        "midlayer.mlp.gate_proj.weight": (int(inner), hidden),
        "midlayer.mlp.up_proj.weight": (int(inner), hidden),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "norm.weight": (hidden,),
    }
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = scale * noise if len(shape) == 2 else 1 + 0.1 * noise
    if drafted < size:
        ids = torch.randperm(size, generator=generator)[:drafted].sort().values
        tensors["d2t"] = ids - torch.arange(drafted)
        tensors["t2d"] = torch.isin(torch.arange(size), ids)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class HeadReference(torch.nn.Module):
    """A head beside the model that it drafts for."""

    def __init__(self, model: Path, head: Path) -> None:
        """Load both."""
        super().__init__()
        self.base, self.config = load_model(model), json.loads((head / "config.json").read_text())
        tensors = load_file(head / "model.safetensors")
        offsets, self.drafted = tensors.pop("d2t", torch.tensor(0)), tensors.pop("t2d", None)
        self.ids = torch.arange(self.config["draft_vocab_size"]) + offsets
        self.layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.own = torch.nn.ParameterDict(
            {name.replace(".", "/"): torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
        )

    def _product(self, name: str, values: Tensor) -> Tensor:
        return values @ self.own[f"{name}/weight"].T

    def _normed(self, name: str, values: Tensor) -> Tensor:
        weight = self.own[f"{name}/weight"]
        return functional.rms_norm(values, weight.shape, weight, self.config["rms_norm_eps"])

    def _turned(self, heads: Tensor) -> Tensor:
        """Turn [n, heads, d] by positions 0 to n - 1."""
        half = heads.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = (torch.arange(len(heads))[:, None] * frequencies)[:, None]
        one, other = heads.split(half, -1)
        return torch.cat([one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], dim=-1)

    def features(self, tokens: Sequence[int]) -> Tensor:
        """Return [n, hidden] made of the model's hidden states, to which nothing flows back."""
        states: list[Tensor] = []
        layers = self.base.model.layers
        keep = [layer.register_forward_pre_hook(lambda _, given: states.append(given[0][0])) for layer in layers]
        # What transformers calls the last of its hidden states is behind the last norm.
        keep.append(self.base.model.norm.register_forward_pre_hook(lambda _, given: states.append(given[0][0])))
        with torch.no_grad():
            self.base(torch.tensor([list(tokens)]))
        for handle in keep:
            handle.remove()
        return self._product("fc", torch.cat([states[layer] for layer in self.layers], -1))

    def output(self, following: Sequence[int], features: Tensor) -> Tensor:
        """Return [n, hidden] before the last norm, of features [n, hidden] and the token behind each."""
        size, count = self.config["head_dim"], len(following)
        table = self.base.get_input_embeddings().weight
        embeddings = table[torch.tensor(following)].detach()
        both = torch.cat(
            [self._normed("midlayer/input_layernorm", embeddings), self._normed("midlayer/hidden_norm", features)], -1
        )
        query, key, value = (
            self._product(f"midlayer/self_attn/{part}_proj", both).view(count, -1, size) for part in "qkv"
        )
        attended = functional.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (self._turned(query), self._turned(key), value)),
            is_causal=True,
            enable_gqa=True,
        )
        middle = features + self._product("midlayer/self_attn/o_proj", attended[0].transpose(0, 1).flatten(1))
        normed = self._normed("midlayer/post_attention_layernorm", middle)
        gate, up = (self._product(f"midlayer/mlp/{part}_proj", normed) for part in ("gate", "up"))
        return middle + self._product("midlayer/mlp/down_proj", functional.silu(gate) * up)

    def logits(self, output: Tensor) -> Tensor:
        """Map what ``output`` returns to [n, drafted tokens]."""
        return self._product("lm_head", self._normed("norm", output))

    def row_logprobs(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
        """Return the logprob of each token of a response that is drafted, but a row's second; differentiable."""
        row = [*prompt, *response]
        logits = self.logits(self.output(row[1:], self.features(row)[:-1])) / temperature
        first = max(len(prompt), 2)
        of_drafted = {int(token): place for place, token in enumerate(self.ids)}
        read = [(place - 2, of_drafted[row[place]]) for place in range(first, len(row)) if row[place] in of_drafted]
        return torch.stack([logits[at].log_softmax(-1)[token] for at, token in read] or [logits.new_zeros(0)]).flatten()

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the ``count`` tokens that vLLM drafts behind ``tokens``: later ones by the head's own output."""
        row, features = list(tokens), self.features(tokens)[:-1]
        drafts = []
        for _ in range(count):
            output = self.output(row[1:], features)
            drafts.append(int(self.ids[self.logits(output)[-1].argmax()]))
            row, features = [*row, drafts[-1]], torch.cat([features, output[-1:]])
        return drafts

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained tensors by their names in files."""
        return {name.replace("/", "."): parameter.data for name, parameter in self.own.items()}
