"""What is checked of model folders before anything is made of them: every role's config, and the tokenizer's ids."""

from __future__ import annotations

from pathlib import Path

from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.models.architecture import Architecture, read_architecture, read_config
from rlhf_megatron.recipe import Recipe
from rlhf_megatron.recipe.checks import roles_of
from rlhf_megatron.recipe.model_shape import role_folder
from rlhf_megatron.rollout.model_config import check_generates


def checked_architecture(recipe: Recipe, folder: str | Path) -> Architecture:
    """Return what the config in ``folder``, the model's, describes.

    Raises ModelError where it, or that in a role's own folder which is here, is damaged or not supported; RolloutError
    where it generates nothing and the recipe wants it to.
    """
    architecture = read_architecture(folder)
    if recipe.loop == "rl":
        check_generates(Path(folder) / "config.json", read_config(folder))
    for section in roles_of(recipe).values():
        own = role_folder(recipe, section)
        if own is not None:
            read_architecture(own)
    return architecture


def check_tokens(tokenizer: Tokenizer, architecture: Architecture, folder: str | Path) -> None:
    """Raises DataError where the tokenizer knows ids that the model in ``folder`` has no embedding of."""
    if tokenizer.vocab_size > architecture.vocabulary:
        raise DataError(
            f"tokenizer: {tokenizer.path} has ids up to {tokenizer.vocab_size - 1}, and the model {folder} has a "
            f"vocabulary of {architecture.vocabulary}; set model.tokenizer to the model's own"
        )
    stops = [token for token in tokenizer.stop_token_ids if token >= architecture.vocabulary]
    if stops:
        raise DataError(
            f"tokenizer: {tokenizer.path} ends texts with token {stops[0]}, and the model {folder} has a vocabulary of "
            f"{architecture.vocabulary}; correct eos_token_id in generation_config.json"
        )
