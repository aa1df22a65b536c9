"""The part of the recipe of reinforcement learning that an evaluation reads too: generation and rewards."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_megatron.gpu_kinds import GPUS
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.reward import RewardSection
from rlhf_megatron.recipe.rollout import RolloutSection


class RolloutRecipe(Recipe):
    """A recipe that generates responses and scores them."""

    rollout: RolloutSection
    """Generation; vLLM's names (docs/rollout.md)."""
    reward: RewardSection = RewardSection()
    """Rewards (docs/rewards.md)."""

    def _checks(self) -> list[Callable[[], None]]:
        """See Recipe."""
        return [*super()._checks(), self._check_quantization]

    def _check_quantization(self) -> None:
        kind = self.rollout.quantization
        if kind:
            able = [name for name, gpu in GPUS.items() if (gpu.hopper if kind == "fp8_blockwise" else gpu.fp8)]
            self._check_gpu(f"rollout.quantization={kind}", able, "multiply so; leave it out")

    @property
    def rollout_repeats(self) -> bool:
        """True if the batches of the engines are to be the same in every run."""
        return self.rollout.scheduling == "static"

    @property
    def has_environment(self) -> bool:
        """True if an environment gives rewards."""
        return self.rollout.multi_turn is not None and self.rollout.multi_turn.environment is not None

    @property
    def has_tools(self) -> bool:
        """True if the model calls tools between its turns."""
        return self.rollout.multi_turn is not None and bool(self.rollout.multi_turn.tools)

    @property
    def needs_state(self) -> bool:
        """True if a trajectory cannot go on in another process from its conversation alone."""
        turns = self.rollout.multi_turn
        return self.has_environment or (turns is not None and bool(turns.tool_servers))

    @property
    def plays(self) -> bool:
        """True if an environment or an agent gives rewards."""
        return self.has_environment or self.rollout.agent is not None

    @property
    def has_branches(self) -> bool:
        """True if a trajectory may have several rows."""
        turns, agent = self.rollout.multi_turn, self.rollout.agent
        return (agent is not None and agent.branches == "all") or (turns is not None and turns.context is not None)

    @property
    def keeps_journal(self) -> bool:
        """True if trajectories of several turns are kept on disk as they go."""
        turns = self.rollout.multi_turn or self.rollout.agent
        if turns is None or turns.journal is not None:
            return turns is not None and bool(turns.journal)
        return not self.rollout_repeats and self.checkpoint.save_interval > 0

    @property
    def reward_names(self) -> list[str]:
        """Names of the parts of a reward, the environment's or agent's the last; none where there is one part without
        a name."""
        if not self.plays:
            return self.reward.part_names
        return [*self._names_of_scores, "agent" if self.rollout.agent else "environment"]

    @property
    def _names_of_scores(self) -> list[str]:
        return [] if self.reward.rule == "none" else self.reward.part_names or ["rule"]
