"""Training a reward model on pairs of responses, by the Bradley-Terry loss. All but the loop is shared with sft and rl.

The model is the recipe's actor with a scalar head; it is exported as a Hugging Face sequence classification.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.evaluation.history import History
from rlhf_megatron.loops.session import Session
from rlhf_megatron.roles.outputs import SCORES


def run_reward_modeling(session: Session) -> dict[str, float]:
    """Trains the scores on the recipe's pairs; returns the first and the last held-out accuracy, if any."""
    recipe = session.recipe
    history = History()
    checkpoints = session.checkpoints({"actor": session.actor}, {"data": session.train, "history": history})
    for step in session.steps(checkpoints, functools.partial(evaluate, session, history)):
        batch, margins = batch_of_pairs(session.train.next(recipe.batch.prompts_per_step))
        weights = torch.full_like(margins, 2.0 / batch.rows)
        with session.phase("update"):
            metrics = session.actor.update(
                batch, {"margins": margins, "weights": weights}, bradley_terry, output=SCORES, rows_together=2
            )
        metrics = session.actor.everywhere(metrics)
        session.end_step(step, {f"train/{name}": value for name, value in metrics.items()}, len(batch.tokens), batch)
    return history.summary()


def bradley_terry(scores: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The objective: minus the weighted log-likelihood that the chosen response of each pair wins.

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
    """The packed conversations with the chosen and the rejected response of each pair, in turn; their margins [R]."""
    conversations = [tokens for prompt in prompts for tokens in prompt.pair or ()]
    margins = torch.tensor([prompt.margin for prompt in prompts])
    return batch_from_rows(conversations, [()] * len(conversations)), margins.repeat_interleave(2)


def evaluate(session: Session, history: History, step: int) -> None:
    """Logs loss, accuracy and margin on held-out pairs as ``eval/...``; nothing where there are none."""
    if session.validation is None:
        return
    batch, margins = batch_of_pairs(session.validation)
    weights = torch.full_like(margins, 1.0 / len(session.validation))
    loss, metrics = bradley_terry(session.actor.scores(batch), {"margins": margins, "weights": weights})
    means = {name: float(total / number) for name, (total, number) in metrics.items()}
    session.log(step, {f"eval/{name}": value for name, value in {"loss": float(loss), **means}.items()})
    history.add(step, means["accuracy"])
