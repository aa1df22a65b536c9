"""Small models with a layer for the token after the next one (multi-token prediction), and its drafts by torch alone.

The layer is a decoder layer of transformers' applied to a projection of the next token's embedding and the hidden state
before it (DeepSeek-V3, arXiv 2412.19437, section 2.2). transformers reads no such layer, so that its tensors are made
here under the names that are published.
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

LAYERS = 4


def make_model_with_layer(folder: Path, family: str, **fields: Any) -> Path:
    """Save a model of ``LAYERS`` layers and one for the token after the next, whose output layer is the model's."""
    make_model(folder, family, tied=False, num_hidden_layers=LAYERS + 1, **fields)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    hidden, generator = tensors["model.norm.weight"].shape[0], torch.Generator().manual_seed(7)
    layer = f"model.layers.{LAYERS}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    # A draft follows from the token before it far more than from others, so that drafts differ.
    tensors[f"{layer}eh_proj.weight"] = 0.3 * torch.randn(hidden, 2 * hidden, generator=generator)
    tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(name), list):
            config[name] = config[name][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class NextTokenLayer:
    """Drafts of a folder's layer, computed for the whole sequence each time."""

    def __init__(self, folder: Path, recycles_normed: bool) -> None:
        """Read a folder; ``recycles_normed`` tells which hidden state the layer goes on from, by family."""
        self._model, self._recycles_normed = load_model(folder), recycles_normed
        # With a layer more than the config has, transformers reads that of the file.
        more: dict[str, Any] = {"num_hidden_layers": LAYERS + 1}
        for name in ("layer_types", "mlp_layer_types"):
            kinds = getattr(self._model.config, name, None)
            if isinstance(kinds, list):
                more[name] = [*kinds, kinds[-1]]
        self._layer = load_model(folder, **more).model.layers[LAYERS]
        tensors, prefix = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS}."
        self._weights = {
            name: tensors[f"{prefix}{name}.weight"] for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        }

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the likeliest ``count`` tokens after ``tokens``, one after the other."""
        base, drafted = self._model.model, list(tokens[1:])
        hidden = base(torch.tensor([tokens[:-1]])).last_hidden_state
        for _ in range(count):
            embedded = base.embed_tokens(torch.tensor([drafted]))
            embedded[:, 0] = 0  # there is nothing before the first position
            both = torch.cat((self._normed("enorm", embedded), self._normed("hnorm", hidden)), -1)
            output = self._decoded(both @ self._weights["eh_proj"].T)
            normed = self._normed("shared_head.norm", output)
            drafted.append(int(self._model.lm_head(normed[0, -1]).argmax()))
            hidden = torch.cat((hidden, (normed if self._recycles_normed else output)[:, -1:]), 1)
        return drafted[-count:]

    def _normed(self, name: str, values: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(
            values, values.shape[-1:], self._weights[name], self._model.config.rms_norm_eps
        )

    def _decoded(self, values: Tensor) -> Tensor:
        length = values.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(values.dtype).min).triu(1)[None, None]
        turns = self._model.model.rotary_emb(values, positions)
        output = self._layer(values, attention_mask=mask, position_ids=positions, position_embeddings=turns)
        return output if isinstance(output, Tensor) else output[0]
