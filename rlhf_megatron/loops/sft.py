"""Supervised fine-tuning: next-token loss on the responses of a data set. All but the loop is shared with rl."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_megatron.algorithms.aggregation import token_weights
from rlhf_megatron.algorithms.objective import of_rows
from rlhf_megatron.algorithms.totals import count, total
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.row_numbers import numbers_of
from rlhf_megatron.errors import DataError
from rlhf_megatron.evaluation.history import History
from rlhf_megatron.loops.schedule import evaluation_is_due, export_is_due, is_last, save_is_due
from rlhf_megatron.loops.training_run import LoopResult, TrainingRun
from rlhf_megatron.recipe import SFTRecipe


def run_sft(run: TrainingRun[SFTRecipe]) -> LoopResult:
    """Train the actor on the responses of the recipe's data; the headline metric is the held-out loss."""
    context, recipe, recorder, history = run.context, run.recipe, run.recorder, History()
    checkpoints = run.start_or_resume({"actor": run.actor}, {"data": run.data.train, "history": history})
    steps = run.steps_after(checkpoints.saved)
    if steps.start == 1 and evaluation_is_due(recipe, 0):
        with context.phase("evaluate"):
            evaluate(run, history, 0)
    recorder.end_start()

    for step in steps:
        recorder.begin_step(step)
        batch = batch_of(run.data.train.next(recipe.batch.prompts_per_step))
        weights = token_weights(batch.response_mask, batch.cu_seqlens, recipe.algorithm.loss_aggregation)
        with context.phase("update"):
            rows = run.actor.own_rows(batch.lengths)
            fields = of_rows({"weights": weights}, batch, rows)
            metrics = run.actor.update(batch.select(rows), fields, negative_log_likelihood)
        metrics = run.actor.broadcast(metrics)
        numbers = numbers_of(batch, context.rank)
        recorder.end_step(step, {f"train/{name}": value for name, value in metrics.items()}, numbers.tokens, numbers)

        if evaluation_is_due(recipe, step):
            with context.phase("evaluate"):
                evaluate(run, history, step)
            recorder.end_evaluation(step)
        with context.phase("save"):
            if export_is_due(recipe, step):
                run.exports.write_between(step)
            is_due = save_is_due(recipe, step, recorder.skipped_steps.are_going_on)
            checkpoints.after(step, is_due, is_last(recipe, step), recorder.best_metric.value(step))
        recorder.close_step(step)
    return LoopResult(history.summary(), checkpoints.saved)


def negative_log_likelihood(
    logprobs: Tensor, entropy: Tensor, fields: dict[str, Tensor]
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Return the objective: minus the weighted logprob of the response tokens."""
    count = torch.full_like(logprobs, 1.0).sum()
    return -(logprobs * fields["weights"]).sum(), {"entropy": (entropy.sum(), count)}


def batch_of(prompts: Sequence[Prompt]) -> RolloutBatch:
    """Return the packed rows of prompts and their given responses; raises DataError for a row that has none."""
    responses = []
    for prompt in prompts:
        if not prompt.response_token_ids:
            raise DataError(f"row {prompt.row}: there is no response to learn; set data.response_column")
        responses.append(prompt.response_token_ids)
    learned = [prompt.learned for prompt in prompts]
    return batch_from_rows([prompt.token_ids for prompt in prompts], responses, sampled=learned)


def evaluate(run: TrainingRun[SFTRecipe], history: History, step: int) -> None:
    """Log the mean loss per token on held-out rows as ``eval/loss``; nothing where there are none."""
    if run.data.validation is None:
        return
    whole, role = batch_of(run.data.validation), run.actor.local
    loss = 0.0
    if role:
        batch = whole.select(role.own_rows(whole.lengths))
        logprobs = role.logprobs(batch).logprobs[batch.response_mask].double()
        loss = -float(total(logprobs, role.totals)) / count(logprobs, role.totals)
    loss = run.actor.broadcast(loss)
    run.recorder.log(step, {"eval/loss": loss})
    history.add(step, loss)
