"""Rollouts as the loops see them: prompts in, scored trajectories of all replicas out; weights follow the actor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rlhf_megatron.data.batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.loops.scoring import GroupScoring
from rlhf_megatron.loops.session import Session
from rlhf_megatron.regather.execute import Regather
from rlhf_megatron.regather.plan import plan_regather
from rlhf_megatron.regather.sides import rollout_side
from rlhf_megatron.rewards.score import Score, Scorer, reward_metrics, reward_totals
from rlhf_megatron.rollout.engine import Completion, Request, Sampling, request_seed
from rlhf_megatron.rollout.vllm_engine import VllmEngine
from rlhf_megatron.topology.exchange import gather_batches, sum_over_ranks

Progress = Callable[[int, int], None]


class Rollouts:
    """This rank's vLLM engine as one of several replicas, and the regathering that feeds it from the actor."""

    def __init__(self, session: Session) -> None:
        """Builds the engine; collective over the world."""
        recipe, section = session.recipe, session.recipe.rollout
        assert section is not None, "the recipe's own check asks for it"
        self._session, self._seed = session, recipe.seed
        self._tensor = section.layout.tensor
        self._replicas = session.world // self._tensor
        self._replica = session.rank // self._tensor
        self._leads = session.rank % self._tensor == 0
        self._scorer = Scorer(recipe.reward) if self._leads else None
        if self._scorer:
            self._scorer.check_sources(session.train.data_sources())
        judge = recipe.reward_model
        self._reward_model = session.make_reward_model(judge) if judge else None
        self.version = 0
        self.sampling = Sampling(
            section.temperature,
            section.top_p,
            section.top_k,
            section.max_response_length,
            session.tokenizer.stop_token_ids,
        )
        with session.phase("engine"):
            self.engine = VllmEngine(
                recipe.model.path, section, recipe.model.dtype, recipe.data.max_prompt_length, recipe.seed
            )
        wanted = rollout_side(session.architecture, self._tensor, session.world, section.layout.expert_parallel)
        plan = plan_regather(session.actor.side(), wanted, session.rank, recipe.cluster.gpus_per_node)
        dtype = next(iter(self.engine.parameters().values())).dtype
        self.regather = Regather(plan, dtype, session.device, staging_bytes=recipe.regather.buffer_mb << 20)

    def refresh(self) -> None:
        """Wakes the engine and brings the actor's weights into it; collective."""
        self.engine.wake_weights()
        self.regather.run(self._session.actor.parameters(), self.engine.parameters())
        self.version += 1
        every = self._session.recipe.regather.verify
        if every and self.version % every == 0:
            self.regather.verify(self._session.actor.parameters(), self.engine.parameters())
        self._session.actor.offload()
        self.engine.wake_kv_cache()
        self.engine.weights_updated(self.version)

    def generate(
        self, prompts: Sequence[Prompt], responses_per_prompt: int, sampling: Sampling, step: int, first_row: int = 0
    ) -> Rolled:
        """This replica's share of ``prompts``, each answered ``responses_per_prompt`` times, and being scored.

        ``first_row``: how many rows this step has generated before, so that no sampling seed comes twice.
        """
        rows = [
            index * responses_per_prompt + k
            for index in range(self._replica, len(prompts), self._replicas)
            for k in range(responses_per_prompt)
        ]
        seeds = [request_seed(self._seed, step, first_row + row) for row in rows]
        requests = [
            Request(row, prompts[row // responses_per_prompt].token_ids, seed)
            for row, seed in zip(rows, seeds, strict=True)
        ]
        scoring = GroupScoring(self._scorer, prompts, responses_per_prompt, self._session.tokenizer)
        completions = self.engine.generate(
            requests,
            sampling,
            lambda done, total: self._session.progress("generate", done, total),
            scoring.take,
        )
        return Rolled(completions if self._leads else [], prompts, responses_per_prompt, scoring)

    def gather(self, rolled: Rolled) -> RolloutBatch:
        """All replicas' rows as one batch on every rank with their rewards, the reward model's included; collective.

        Waits for the last score. A reward is NaN where the row is to be left out of the loss.
        """
        batch = rolled.gather()
        section = self._session.recipe.reward_model
        if self._reward_model is None or section is None:
            return batch
        conversations = [rolled.asked[group].messages for group in batch.group_id.tolist()]
        of_model = self._reward_model.scores(batch, conversations)
        rolled.add(of_model, section.weight)
        return batch.with_fields(rewards=batch.rewards + section.weight * of_model)

    def scoring_metrics(self, rolled: Sequence[Rolled]) -> dict[str, float]:
        """What became of the samples of these calls, and the mean of each part of the reward; collective."""
        scores = [score for each in rolled for score in each.scores()]
        totals = reward_totals(scores, self._session.recipe.reward_names)
        return reward_metrics(dict(zip(totals, sum_over_ranks(list(totals.values())), strict=True)))

    def state(self) -> dict[str, Any]:
        """For a checkpoint, taken after the step's weights were brought in."""
        return {"version": self.version}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken; the ``refresh`` that must follow counts that version again."""
        self.version = int(state["version"]) - 1

    def close(self) -> None:
        """Ends the engine and the reward workers."""
        if self._scorer:
            self._scorer.close()
        self.engine.close()


class Rolled:
    """What one replica generated, before it is brought together with the others.

    Attributes:
        asked: the prompts of all replicas.
        completions: this replica's, on the rank that leads it.
        prompts: of each completion.
        tokens: of all replicas, prompts and responses, once they are gathered.
    """

    def __init__(
        self, completions: list[Completion], asked: Sequence[Prompt], responses_per_prompt: int, scoring: GroupScoring
    ) -> None:
        self.asked, self.completions = asked, completions
        self.prompts = [asked[completion.row_id // responses_per_prompt] for completion in completions]
        self._responses_per_prompt, self._scoring = responses_per_prompt, scoring
        self._scores: list[Score] | None = None
        self.tokens = 0

    def scores(self) -> list[Score]:
        """What each completion is worth; waits for the last one, the first time."""
        if self._scores is None:
            found = self._scoring.results()
            self._scores = [found[completion.row_id] for completion in self.completions]
        return self._scores

    def add(self, of_rows: Tensor, weight: float) -> None:
        """Counts one more part of the reward, [R] over the rows of all replicas."""
        self._scores = [
            dataclasses.replace(score, value=score.value + weight * part, parts=(*score.parts, part))
            for score, completion in zip(self.scores(), self.completions, strict=True)
            for part in [float(of_rows[completion.row_id])]
        ]

    def gather(self) -> RolloutBatch:
        """All replicas' rows as one batch on every rank, in the order of their ids; collective."""
        completions = self.completions
        batch = batch_from_rows(
            [prompt.token_ids for prompt in self.prompts],
            [completion.token_ids for completion in completions],
            [completion.logprobs for completion in completions],
            group_id=[completion.row_id // self._responses_per_prompt for completion in completions],
            row_id=[completion.row_id for completion in completions],
            weight_version=[completion.weight_version for completion in completions],
            truncated=[completion.finish_reason == "length" for completion in completions],
            rewards=[score.value for score in self.scores()],
        )
        batch = gather_batches(batch)
        self.tokens = len(batch.tokens)
        return batch
