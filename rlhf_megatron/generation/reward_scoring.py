"""The rewards of what was generated: rules and functions on each replica, then a reward model over all rows."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_megatron.data.opening import Data
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.generation.generated_groups import GeneratedGroups
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.recipe import Recipe
from rlhf_megatron.rewards.score import Scorer, reward_metrics, reward_totals
from rlhf_megatron.roles.reward_model import RewardModel
from rlhf_megatron.topology.exchange import sum_over_ranks
from rlhf_megatron.topology.team import Team


def make_scorer(recipe: Recipe, replica: Replica, data: Data) -> Scorer | None:
    """Starts what scores this replica's responses, on the rank that leads it.

    Raises RewardError where it has no rule for a source of the data.
    """
    if not replica.leads:
        return None
    scorer = Scorer(recipe.reward)
    held_out = (prompt.data_source for prompt in data.validation or [])
    scorer.check_sources(dict.fromkeys([*data.train.data_sources(), *held_out]))
    return scorer


class RewardScoring:
    """Scores the rollout as the recipe says.

    Attributes:
        scorer: scores groups while others are generated, on the rank that leads a replica.
    """

    def __init__(self, recipe: Recipe, team: Team, scorer: Scorer | None, model: RewardModel | None) -> None:
        """``team`` generates; ``model`` is on all of its ranks, if the recipe has one."""
        self.scorer = scorer
        self._recipe, self._team, self._model = recipe, team, model

    def with_model_scores(self, generated: GeneratedGroups, batch: RolloutBatch) -> RolloutBatch:
        """Adds the reward model's share to the rewards of a gathered ``batch``; collective over the team."""
        section = self._recipe.reward_model
        if self._model is None or section is None:
            return batch
        conversations = [generated.asked[group].messages for group in batch.group_id.tolist()]
        model_scores = self._model.scores(batch, conversations)
        generated.add_reward_part(model_scores, batch.row_id, section.weight)
        return batch.with_fields(rewards=batch.rewards + section.weight * model_scores)

    def metrics(self, calls: Sequence[GeneratedGroups]) -> dict[str, float]:
        """Returns what became of the samples of these calls, and the mean of each part of the reward; collective."""
        scores = [score for generated in calls for score in generated.scores()]
        totals = reward_totals(scores, self._recipe.reward_names)
        summed = sum_over_ranks(list(totals.values()), self._team.group)
        return reward_metrics(dict(zip(totals, summed, strict=True)))

    def close(self) -> None:
        """Ends the reward workers."""
        if self.scorer:
            self.scorer.close()
