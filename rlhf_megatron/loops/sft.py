"""Supervised fine-tuning: next-token loss on the responses of a data set. All but the loop is shared with rl."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_megatron.algorithms.aggregation import token_weights
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.errors import DataError
from rlhf_megatron.evaluation.history import History
from rlhf_megatron.loops.session import Session


def run_sft(session: Session) -> dict[str, float]:
    """Trains the actor on the recipe's data; returns the first and the last held-out loss, if there is such data."""
    recipe = session.recipe
    history = History()
    checkpoints = session.checkpoints({"actor": session.actor}, {"data": session.train, "history": history})
    for step in session.steps(checkpoints, functools.partial(evaluate, session, history)):
        batch = batch_of(session.train.next(recipe.batch.prompts_per_step))
        weights = token_weights(batch.response_mask, batch.cu_seqlens, recipe.algorithm.loss_aggregation)
        with session.phase("update"):
            metrics = session.actor.update(batch, {"weights": weights}, negative_log_likelihood)
        metrics = session.actor.everywhere(metrics)
        session.end_step(step, {f"train/{name}": value for name, value in metrics.items()}, len(batch.tokens), batch)
    return history.summary()


def negative_log_likelihood(
    logprobs: Tensor, entropy: Tensor, fields: dict[str, Tensor]
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The objective: minus the weighted logprob of the tokens to be learnt."""
    count = torch.full_like(logprobs, 1.0).sum()
    return -(logprobs * fields["weights"]).sum(), {"entropy": (entropy.sum(), count)}


def batch_of(prompts: Sequence[Prompt]) -> RolloutBatch:
    """The packed rows of prompts and their given responses; raises DataError for a row that has none."""
    responses = []
    for prompt in prompts:
        if not prompt.response_token_ids:
            raise DataError(f"row {prompt.row}: there is no response to learn; set data.response_column")
        responses.append(prompt.response_token_ids)
    return batch_from_rows([prompt.token_ids for prompt in prompts], responses)


def evaluate(session: Session, history: History, step: int) -> None:
    """Logs the mean loss per token on held-out rows as ``eval/loss``; nothing where there are none."""
    if session.validation is None:
        return
    batch = batch_of(session.validation)
    loss = -float(session.actor.logprobs(batch).logprobs[batch.response_mask].mean())
    session.log(step, {"eval/loss": loss})
    history.add(step, loss)
