"""The sizes of a model, read from its Hugging Face config.json for planning. Needs no weights.

Which configs can be trained is decided by ``models.architecture``; here every decoder of the usual form counts, dense
or with experts in each layer.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.roles import LoraSection, RoleSection
from rlhf_megatron.untrusted import read_json, shown

_VOCABULARY_MULTIPLE = 64  # as in models.architecture: vLLM pads to it too


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What decides the size of a decoder-only transformer; ``feed_forward`` does not where it has experts."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    tied_embeddings: bool
    qkv_bias: bool
    query_key_norm: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_feed_forward: int = 0
    scalar_head: bool = False

    @property
    def query(self) -> int:
        """Columns of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Columns of all key heads together, which are those of all value heads."""
        return self.key_value_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, without padding, as its model card counts them."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings or self.scalar_head else 2)
        head = self.hidden if self.scalar_head else 0
        layers = self.layers * (self.layer_parameters() + self.expert_parameters())
        return embeddings + layers + self.hidden + head

    @property
    def active_parameters(self) -> int:
        """Those that work on one token: all, but of the experts only the chosen ones."""
        idle = self.experts - self.experts_per_token
        return self.parameters - self.layers * idle * 3 * self.hidden * self.expert_feed_forward

    def layer_parameters(self, tensor: int = 1, repeated_heads: bool = False) -> int:
        """Parameters of one decoder layer beside its experts on one of ``tensor`` ranks.

        Key-value heads fewer than ranks are divided further (Megatron), or, with ``repeated_heads``, each rank has one
        (vLLM).
        """
        query = self.query // tensor
        qkv = (self.query + 2 * self.key_value) // tensor
        if repeated_heads:
            qkv = query + 2 * max(self.key_value // tensor, self.head_dim)
        attention = qkv * self.hidden + (qkv if self.qkv_bias else 0) + query * self.hidden
        norms = 2 * self.hidden + (2 * self.head_dim if self.query_key_norm else 0)
        if self.experts:
            return attention + norms + self.experts * self.hidden  # the router, which every rank has
        return attention + norms + 3 * self.hidden * (self.feed_forward // tensor)

    def expert_parameters(self, shards: int = 1) -> int:
        """Parameters of one layer's experts on each of the ``shards`` ranks that they are dealt out to and cut over."""
        return self.experts * 3 * self.hidden * self.expert_feed_forward // shards

    def linear_layers(self, modules: Collection[str]) -> list[tuple[int, int]]:
        """(rows, columns) of those of a dense decoder layer's linear layers, or of its attention, that have these
        Hugging Face names."""
        shapes = {
            "q_proj": (self.query, self.hidden),
            "k_proj": (self.key_value, self.hidden),
            "v_proj": (self.key_value, self.hidden),
            "o_proj": (self.hidden, self.query),
            "gate_proj": (self.feed_forward, self.hidden),
            "up_proj": (self.feed_forward, self.hidden),
            "down_proj": (self.hidden, self.feed_forward),
        }
        return [shape for name, shape in shapes.items() if name in modules]

    def adapter_parameters(self, lora: LoraSection) -> int:
        """Parameters of one decoder layer's low-rank adapters."""
        return sum(lora.rank * (rows + columns) for rows, columns in self.linear_layers(lora.modules))

    def padded_vocabulary(self, tensor: int) -> int:
        """Rows of the embedding over all ranks: a multiple of 64 that ``tensor`` divides."""
        multiple = _VOCABULARY_MULTIPLE
        while multiple % tensor:
            multiple += _VOCABULARY_MULTIPLE
        return -(-self.vocabulary // multiple) * multiple

    def embedding_parameters(self, tensor: int) -> int:
        """Parameters of the embedding, or of the output layer, on one of ``tensor`` ranks."""
        return self.padded_vocabulary(tensor) // tensor * self.hidden

    def rank_parameters(
        self,
        tensor: int,
        stage_layers: list[int],
        stage: int,
        *,
        expert_shards: int | None = None,
        repeated_heads: bool = False,
    ) -> int:
        """Parameters that one rank of a pipeline ``stage`` holds, where stage s has ``stage_layers[s]`` layers.

        ``expert_shards``: the ranks that share the experts, by default the ``tensor`` ones.
        """
        first, last = stage == 0, stage == len(stage_layers) - 1
        layer = self.layer_parameters(tensor, repeated_heads) + self.expert_parameters(expert_shards or tensor)
        count = stage_layers[stage] * layer
        embeddings = int(first) + int(last and not self.scalar_head)
        if self.tied_embeddings and first and last:
            embeddings = 1
        norm_and_head = self.hidden * (2 if self.scalar_head else 1) if last else 0
        return count + embeddings * self.embedding_parameters(tensor) + norm_and_head


def planning_folder(recipe: Recipe) -> Path:
    """``model.path``, or ``model.config`` where the former has no config.json; raises RecipeError if neither has."""
    candidates = [folder for folder in (recipe.model.path, recipe.model.config) if folder is not None]
    given = next((Path(folder) for folder in candidates if _has_config(Path(folder))), None)
    if given is None:
        tried = " nor ".join(shown(Path(folder) / "config.json") for folder in candidates)
        raise RecipeError(
            f"model.path: there is no {tried}; download the model, or set model.config to a folder with its config.json"
        )
    return given


def planning_config(recipe: Recipe) -> dict[str, Any]:
    """config.json of the ``planning_folder``; raises RecipeError."""
    return _read(planning_folder(recipe) / "config.json")


def role_folder(recipe: Recipe, section: RoleSection) -> Path | None:
    """The role's own folder, if it names one that is here and is not the model's."""
    own = section.weights_folder
    return None if own in (None, recipe.model.path) or not _has_config(Path(own)) else Path(own)


def role_config(recipe: Recipe, section: RoleSection, config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the ``role_folder``; else ``config``, the model's."""
    own = role_folder(recipe, section)
    return config if own is None else _read(own / "config.json")


def _has_config(folder: Path) -> bool:
    """Whether there is something of that name, which may be no file that can be read."""
    return os.path.lexists(folder / "config.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path, RecipeError)
    except RecipeError as error:
        reason = str(error).removeprefix(f"{shown(path)}: ")
        raise RecipeError(f"{shown(path)}: cannot be read as JSON ({reason}); download it again") from error
    if not isinstance(config, dict):
        raise RecipeError(f"{shown(path)}: must hold a JSON object; download it again")
    return config


def shape_of(config: dict[str, Any]) -> ModelShape:
    """The sizes in a Hugging Face config; raises RecipeError naming the field that is missing or no size."""
    heads, hidden, kind = size(config, "num_attention_heads"), size(config, "hidden_size"), config.get("model_type")
    experts = experts_of(config)
    return ModelShape(
        layers=size(config, "num_hidden_layers"),
        hidden=hidden,
        feed_forward=size(config, "intermediate_size"),
        heads=heads,
        key_value_heads=size(config, "num_key_value_heads", heads),
        head_dim=size(config, "head_dim", hidden // heads),
        vocabulary=size(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
        query_key_norm=kind in ("qwen3", "qwen3_moe"),
        experts=experts,
        experts_per_token=size(config, "num_experts_per_tok") if experts else 0,
        expert_feed_forward=size(config, "moe_intermediate_size") if experts else 0,
    )


def size(config: dict[str, Any], field: str, default: int | None = None) -> int:
    """A size in a Hugging Face config; ``default`` is what it means that the field is absent or null.

    Raises RecipeError where it is no whole number above 0.
    """
    value = config.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        shown = repr(value) if field in config else "missing"
        raise RecipeError(f"config.json: {field} must be a whole number above 0; it is {shown}")
    return value


def experts_of(config: dict[str, Any]) -> int:
    """The number of experts of a layer, 0 in a dense model; transformers has two names for it."""
    field = next((field for field in ("num_local_experts", "num_experts") if config.get(field)), None)
    return size(config, field) if field else 0
