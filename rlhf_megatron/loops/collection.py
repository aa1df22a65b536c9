"""What a step learns from: rounds of generating and scoring until there are enough groups that teach something."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from rlhf_megatron.algorithms.filters import informative_rows, overlong_penalty
from rlhf_megatron.data.batch import RolloutBatch, concatenate
from rlhf_megatron.loops.rollouts import Rollouts
from rlhf_megatron.loops.session import Session
from rlhf_megatron.recipe.errors import UserError


class Collector:
    """Draws prompts, has them answered and scored, and shapes and filters the results as the recipe says."""

    def __init__(self, session: Session, rollouts: Rollouts) -> None:
        """Holds groups that one step had too many of, for the next."""
        self._session, self._rollouts = session, rollouts
        self._surplus: RolloutBatch | None = None

    def collect(self, step: int) -> tuple[RolloutBatch, dict[str, float], int]:
        """(the step's batch in whole groups, metrics of all that was generated, its tokens); collective.

        The batch has ``batch.prompts_per_step`` groups; with dynamic sampling it may have fewer, or none, where
        ``filter_groups.max_num_gen_batches`` is reached. Raises UserError there if the recipe says stop.
        """
        recipe = self._session.recipe
        settings, wanted = recipe.algorithm.filter_groups, recipe.batch.prompts_per_step
        kept = [self._surplus] if self._surplus else []
        carried = self._groups(kept)
        generated: list[RolloutBatch] = []
        while self._groups(kept) < wanted:
            if settings.enable and settings.max_num_gen_batches and len(generated) == settings.max_num_gen_batches:
                if settings.when_exhausted == "stop":
                    raise UserError(self._exhausted(step, self._groups(kept)))
                break
            count = settings.prompts_per_round or wanted if settings.enable else wanted
            batch = self._one_round(step, count, sum(part.rows for part in generated))
            generated.append(batch)
            kept.append(self._informative(batch) if settings.enable else batch)
        batch, surplus = self._cut(kept, wanted)
        self._surplus = surplus if settings.keep_surplus and surplus.rows else None
        metrics = self._metrics(generated) | self._rollouts.scoring_metrics()
        if settings.enable:
            informative = sum(self._groups([part]) for part in kept) - carried
            metrics |= {
                "rollout/rounds": float(len(generated)),
                "rollout/groups_carried_over": float(carried),
                "rollout/groups_dropped": float(self._groups(generated) - informative),
                "rollout/groups_surplus": float(self._groups([surplus])),
                "rollout/groups": float(self._groups([batch])),
            }
        return batch, metrics, sum(len(part.tokens) for part in generated)

    def state(self) -> dict[str, Any]:
        """The groups that wait for the next step, for a checkpoint."""
        if self._surplus is None:
            return {}
        fields = {field.name: getattr(self._surplus, field.name) for field in dataclasses.fields(self._surplus)}
        return {name: value for name, value in fields.items() if value is not None}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken."""
        self._surplus = RolloutBatch(**state) if state else None

    def _one_round(self, step: int, prompts: int, first_row: int) -> RolloutBatch:
        """``prompts`` more groups, scored, the same on every rank."""
        session, rollouts = self._session, self._rollouts
        recipe = session.recipe
        drawn = session.train.next(prompts)
        with session.phase("generate"):
            rolled = rollouts.generate(
                drawn, recipe.batch.responses_per_prompt, rollouts.sampling, step, first_row=first_row
            )
        with session.phase("score"):
            batch = rolled.gather(rollouts.score(rolled))
        buffer = recipe.algorithm.overlong_buffer
        if buffer.enable and recipe.rollout:
            limit = recipe.rollout.max_response_length
            penalty = overlong_penalty(batch.response_lengths, limit, buffer.len, buffer.penalty_factor)
            batch = batch.with_fields(scores=batch.rewards, rewards=batch.rewards + penalty)
        return batch

    def _informative(self, batch: RolloutBatch) -> RolloutBatch:
        by_reward = self._session.recipe.algorithm.filter_groups.metric == "reward"
        values = batch.rewards if by_reward or batch.scores is None else batch.scores
        return batch.select(informative_rows(values, batch.group_id).nonzero().squeeze(1).tolist())

    def _cut(self, parts: list[RolloutBatch], groups: int) -> tuple[RolloutBatch, RolloutBatch]:
        """The first ``groups`` groups of all parts, numbered anew, and the rest."""
        whole, responses = concatenate(parts), self._session.recipe.batch.responses_per_prompt
        rows = torch.arange(whole.rows)
        whole = whole.with_fields(row_id=rows, group_id=rows // responses)
        end = min(groups * responses, whole.rows)
        return whole.select(range(end)), whole.select(range(end, whole.rows))

    def _groups(self, parts: list[RolloutBatch]) -> int:
        return sum(part.rows for part in parts) // self._session.recipe.batch.responses_per_prompt

    def _exhausted(self, step: int, groups: int) -> str:
        recipe = self._session.recipe
        return (
            f"step {step}: {groups} of {recipe.batch.prompts_per_step} groups teach something after "
            f"algorithm.filter_groups.max_num_gen_batches={recipe.algorithm.filter_groups.max_num_gen_batches} rounds; "
            "raise it, set when_exhausted: train, or choose data that is neither too easy nor too hard"
        )

    def _metrics(self, generated: list[RolloutBatch]) -> dict[str, float]:
        """What all generated trajectories look like, also those that are not trained on."""
        if not generated:
            return {}
        batch, session = concatenate(generated), self._session
        lengths = batch.response_lengths.double()
        groups = batch.rewards.view(-1, session.recipe.batch.responses_per_prompt)
        metrics = {
            "rollout/throughput_tokens_per_sec": float(lengths.sum()) / max(session.seconds("generate"), 1e-9),
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/response_length_max": float(lengths.max()),
            "rollout/truncated_fraction": float(batch.truncated.double().mean()),
            "rollout/weight_version": float(batch.weight_version.double().mean()),
            "reward/mean": float(batch.rewards.mean()),
            "reward/std": float(batch.rewards.std(unbiased=False)),
            "reward/informative_group_fraction": float((groups.amax(1) > groups.amin(1)).double().mean()),
            "reward/latency_ms": session.seconds("score") * 1000.0,
        }
        if batch.scores is not None:
            metrics["reward/score_mean"] = float(batch.scores.mean())
            metrics["reward/overlong_penalty_mean"] = float((batch.rewards - batch.scores).mean())
        return metrics
