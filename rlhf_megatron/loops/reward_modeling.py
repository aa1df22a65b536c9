"""Training a reward model on pairs of responses, by the Bradley-Terry loss. All but the loop is shared with sft and rl.

The model is the recipe's actor with a scalar head; it is exported as a Hugging Face sequence classification.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.row_numbers import numbers_of
from rlhf_megatron.evaluation.history import History
from rlhf_megatron.loops.schedule import evaluation_is_due, export_is_due, is_last, save_is_due
from rlhf_megatron.loops.training_run import LoopResult, TrainingRun
from rlhf_megatron.recipe import RewardModelingRecipe
from rlhf_megatron.roles.outputs import SCORES
from rlhf_megatron.roles.placed import PlacedRole


def run_reward_modeling(run: TrainingRun[RewardModelingRecipe]) -> LoopResult:
    """Train the scores on the recipe's pairs; the headline metric is the held-out accuracy."""
    context, recipe, recorder, history = run.context, run.recipe, run.recorder, History()
    checkpoints = run.start_or_resume({"actor": run.actor}, {"data": run.data.train, "history": history})
    steps = run.steps_after(checkpoints.saved)
    if steps.start == 1 and evaluation_is_due(recipe, 0):
        with context.phase("evaluate"):
            evaluate(run, history, 0)
    recorder.end_start()

    for step in steps:
        recorder.begin_step(step)
        batch, margins = batch_of_pairs(run.data.train.next(recipe.batch.prompts_per_step))
        fields = {"margins": margins, "weights": torch.full_like(margins, 2.0 / batch.rows)}
        with context.phase("update"):
            rows = run.actor.own_rows(batch.lengths, rows_together=2)
            fields = {name: values[rows] for name, values in fields.items()}
            metrics = run.actor.update(batch.select(rows), fields, bradley_terry, output=SCORES, rows_together=2)
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


def bradley_terry(scores: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Return the objective: minus the weighted log-likelihood that the chosen response of each pair wins.

    scores [2 p]: chosen, rejected of each of p pairs; fields ``margins`` and ``weights`` [2 p], of which the chosen
    rows' count. loss = -log sigmoid(chosen - rejected - margin): Bradley and Terry 1952, as in arXiv 2203.02155, eq. 1;
    the margin as in arXiv 2307.09288, eq. 2. Metrics: ``accuracy`` (a tie is half right) and ``margin``, the mean of
    chosen - rejected.
    """
    ahead = scores[0::2] - scores[1::2]
    loss = -(functional.logsigmoid(ahead - fields["margins"][0::2]) * fields["weights"][0::2]).sum()
    right = (ahead > 0).double() + 0.5 * (ahead == 0)
    count = torch.full_like(right, 1.0).sum()
    return loss, {"accuracy": (right.sum(), count), "margin": (ahead.sum(), count)}


def batch_of_pairs(prompts: Sequence[Prompt]) -> tuple[RolloutBatch, Tensor]:
    """Return the packed conversations, chosen and rejected response of each pair alternating; their margins [R]."""
    conversations = [tokens for prompt in prompts for tokens in prompt.pair or ()]
    margins = torch.tensor([prompt.margin for prompt in prompts])
    return batch_from_rows(conversations, [()] * len(conversations)), margins.repeat_interleave(2)


def evaluate(run: TrainingRun[RewardModelingRecipe], history: History, step: int) -> None:
    """Log loss, accuracy and margin on held-out pairs as ``eval/...``; nothing where there are none."""
    if run.data.validation is None:
        return
    batch, margins = batch_of_pairs(run.data.validation)
    weights = torch.full_like(margins, 1.0 / len(run.data.validation))
    loss, metrics = bradley_terry(_scores(run.actor, batch), {"margins": margins, "weights": weights})
    means = {name: float(total / number) for name, (total, number) in metrics.items()}
    run.recorder.log(step, {f"eval/{name}": value for name, value in {"loss": float(loss), **means}.items()})
    history.add(step, means["accuracy"])


def _scores(actor: PlacedRole, batch: RolloutBatch) -> Tensor:
    """Return [R]: the scores of rows of which every rank has all, each on its data-parallel rank; on every rank."""
    scores = torch.zeros(batch.rows)
    if actor.local:
        rows = actor.local.own_rows(batch.lengths)
        scores = actor.local.totals.sum(
            scores.index_copy(0, torch.tensor(rows), actor.local.scores(batch.select(rows)))
        )
    return actor.broadcast(scores)
