"""Small models with a layer for multi-token prediction, and what transformers' own decoder layer makes of it.

transformers leaves such layers out, so a model with one decoder layer more is made, whose last one is taken for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hugging_face import load_model, make_model

_INPUT = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


def make_predicting_model(folder: Path, family: str, layers: int = 2, **fields: Any) -> tuple[Path, Path]:
    """Save a model of ``layers`` decoder layers and one for prediction; return its folder, and that of the model whose
    last decoder layer it is."""
    whole = make_model(folder / "whole", family, num_hidden_layers=layers + 1, num_nextn_predict_layers=0, **fields)
    config, tensors = json.loads((whole / "config.json").read_text()), load_file(whole / "model.safetensors")
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = config["mlp_layer_types"][:layers]
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(5)
    prefix = f"model.layers.{layers}."
    for name in _INPUT:
        shape = (hidden, 2 * hidden) if name.startswith("eh_proj") else (hidden,)
        noise = torch.randn(shape, generator=generator)
        tensors[prefix + name] = 0.08 * noise if len(shape) == 2 else 1 + 0.1 * noise
    model = folder / "model"
    model.mkdir()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))
    return model, whole


class PredictionReference(torch.nn.Module):
    """The layer behind a model's decoder, by transformers and torch."""

    def __init__(self, model: Path, whole: Path) -> None:
        """Load both; the last decoder layer of ``whole`` is the layer of ``model``."""
        super().__init__()
        self.base, self.whole = load_model(model), load_model(whole)
        self.layer, self.rotary = self.whole.model.layers[-1], self.whole.model.rotary_emb
        layers = self.base.config.num_hidden_layers
        self.prefix, tensors = f"model.layers.{layers}.", load_file(model / "model.safetensors")
        self.own = torch.nn.ParameterDict(
            {name.replace(".", "/"): torch.nn.Parameter(tensors[self.prefix + name]) for name in _INPUT}
        )
        self.epsilon = self.base.config.rms_norm_eps

    def learned(self) -> list[torch.nn.Parameter]:
        """Return the parameters of the layer that learn."""
        return [*self.own.parameters(), *self.layer.parameters()]

    def _normed(self, name: str, values: Tensor) -> Tensor:
        weight = self.own[f"{name}/weight"]
        return torch.nn.functional.rms_norm(values, weight.shape, weight, self.epsilon)

    def output(self, following: Sequence[int], hidden: Tensor) -> Tensor:
        """Return [n, hidden] before the last norm, of the model's output [n, hidden] and the tokens behind each."""
        embeddings = self.base.model.embed_tokens(torch.tensor(following)).detach().clone()
        embeddings[0] = 0  # as in vLLM
        both = torch.cat([self._normed("enorm", embeddings), self._normed("hnorm", hidden)], -1)
        given = (both @ self.own["eh_proj/weight"].T)[None]
        positions = torch.arange(len(following))[None]
        mask = torch.full((len(following),) * 2, -torch.inf).triu(1)[None, None]
        turned = self.rotary(given, positions)
        made = self.layer(given, attention_mask=mask, position_ids=positions, position_embeddings=turned)
        return (made[0] if isinstance(made, tuple) else made)[0]

    def logits(self, output: Tensor) -> Tensor:
        """Map what ``output`` returns to [n, vocabulary]."""
        logits: Tensor = self._normed("shared_head/norm", output) @ self.base.lm_head.weight.detach().T
        return logits

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """Return [n, hidden] that the model's output layer reads."""
        with torch.no_grad():
            states: Tensor = self.base.model(torch.tensor([list(tokens)])).last_hidden_state[0]
        return states

    def row_logprobs(self, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
        """Return the logprob of each token of a response but a row's second, differentiable."""
        row = [*prompt, *response]
        logits = self.logits(self.output(row[1:], self.hidden(row)[:-1]))
        first = max(len(prompt), 2)
        return logits[first - 2 : -1].log_softmax(-1).gather(-1, torch.tensor(row[first:])[:, None])[:, 0]

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """Return the layer's tensors by their names in a checkpoint, which transformers writes into ``folder``."""
        self.whole.save_pretrained(folder)
        saved = load_file(folder / "model.safetensors")
        own = {self.prefix + name.replace("/", "."): parameter.data for name, parameter in self.own.items()}
        return own | {name: tensor for name, tensor in saved.items() if name.startswith(self.prefix)}
