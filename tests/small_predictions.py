"""Small models with a layer for multi-token prediction, and what transformers' own decoder layer makes of it.

The layer is a decoder layer applied to a projection of the next token's embedding and the hidden state before it
(DeepSeek-V3, arXiv 2412.19437, section 2.2). transformers leaves such layers out, so a model with one decoder layer
more is made, whose last one is taken for it, beside tensors under the names that are published.
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
_BY_LAYER = ("layer_types", "mlp_layer_types")


def make_predicting_model(
    folder: Path, family: str, layers: int = 4, scale: float = 0.08, copies: bool = False, **fields: Any
) -> Path:
    """Save a model of ``layers`` decoder layers and one for prediction; return its folder.

    ``scale``: of the projection; with a large one a draft follows from the token before it far more than from others,
    so that drafts differ. ``copies``: the layer also has embeddings and output layer, which are the model's.
    """
    make_model(folder, family, num_hidden_layers=layers + 1, **fields | {"num_nextn_predict_layers": 0})
    path, prefix = folder / "model.safetensors", f"model.layers.{layers}."
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(path)
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    config |= {name: config[name][:layers] for name in _BY_LAYER if isinstance(config.get(name), list)}
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(5)
    for name in _INPUT:
        is_matrix = name.startswith("eh_proj")
        noise = torch.randn((hidden, 2 * hidden) if is_matrix else (hidden,), generator=generator)
        tensors[prefix + name] = scale * noise if is_matrix else 1 + 0.1 * noise
    if copies:
        tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class PredictionReference(torch.nn.Module):
    """The layer behind a model's decoder, by transformers and torch."""

    def __init__(self, folder: Path, recycles_normed: bool = False) -> None:
        """Load both; ``recycles_normed``: from the second drafted token on the layer goes on from its normed output."""
        super().__init__()
        self.base, self.recycles_normed = load_model(folder), recycles_normed
        config = self.base.config
        # With a layer more than the config has, transformers reads that of the file.
        more: dict[str, Any] = {"num_hidden_layers": config.num_hidden_layers + 1}
        kinds = {name: getattr(config, name, None) for name in _BY_LAYER}
        more |= {name: [*each, each[-1]] for name, each in kinds.items() if isinstance(each, list)}
        self.whole = load_model(folder, **more)
        self.layer, self.rotary = self.whole.model.layers[-1], self.whole.model.rotary_emb
        self.prefix, tensors = f"model.layers.{config.num_hidden_layers}.", load_file(folder / "model.safetensors")
        self.own = torch.nn.ParameterDict(
            {name.replace(".", "/"): torch.nn.Parameter(tensors[self.prefix + name]) for name in _INPUT}
        )

    def learned(self) -> list[torch.nn.Parameter]:
        """Return the parameters of the layer that learn."""
        return [*self.own.parameters(), *self.layer.parameters()]

    def _normed(self, name: str, values: Tensor) -> Tensor:
        weight = self.own[f"{name}/weight"]
        return torch.nn.functional.rms_norm(values, weight.shape, weight, self.base.config.rms_norm_eps)

    def output(self, following: Sequence[int], hidden: Tensor) -> Tensor:
        """Return [n, hidden] before the last norm, of hidden states [n, hidden] and the tokens behind each."""
        embeddings = self.base.model.embed_tokens(torch.tensor(following)).detach().clone()
        embeddings[0] = 0  # as in vLLM
        both = torch.cat([self._normed("enorm", embeddings), self._normed("hnorm", hidden)], -1)
        given = (both @ self.own["eh_proj/weight"].T)[None]
        positions = torch.arange(len(following))[None]
        mask = torch.full((len(following),) * 2, torch.finfo(given.dtype).min).triu(1)[None, None]
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

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the likeliest ``count`` tokens after ``tokens``, one after the other, all anew for each."""
        following, hidden = list(tokens[1:]), self.hidden(tokens[:-1])
        for _ in range(count):
            output = self.output(following, hidden)
            following.append(int(self.logits(output)[-1].argmax()))
            last = output[-1:]
            hidden = torch.cat([hidden, self._normed("shared_head/norm", last) if self.recycles_normed else last])
        return following[-count:]

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """Return the layer's tensors by their names in a checkpoint, which transformers writes into ``folder``."""
        self.whole.save_pretrained(folder)
        saved = load_file(folder / "model.safetensors")
        own = {self.prefix + name.replace("/", "."): parameter.data for name, parameter in self.own.items()}
        return own | {name: tensor for name, tensor in saved.items() if name.startswith(self.prefix)}
