"""The recipe as a whole, and the rules that join its sections."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_megatron.recipe.algorithm import AlgorithmSection
from rlhf_megatron.recipe.batch import BatchSection
from rlhf_megatron.recipe.data import DataSection
from rlhf_megatron.recipe.model import ModelSection
from rlhf_megatron.recipe.operations import (
    CheckpointSection,
    ClusterSection,
    EvaluationSection,
    MonitorSection,
    RewardSection,
)
from rlhf_megatron.recipe.roles import ActorSection, FrozenRoleSection
from rlhf_megatron.recipe.rollout import RolloutSection
from rlhf_megatron.recipe.section import Section


class Recipe(Section):
    """Everything that decides a run."""

    name: str
    """Name of the run; its files go to run_root/name."""
    loop: Literal["rl", "sft"]
    """rl: reinforcement learning; sft: supervised fine-tuning."""
    steps: int = Field(gt=0)
    """Steps of the loop: each takes batch.prompts_per_step prompts."""
    seed: int = 1
    """Decides data order, sampling and random weights."""
    run_root: str = "runs"
    """Folder of all runs."""
    model: ModelSection
    """The model."""
    data: DataSection
    """The data."""
    batch: BatchSection
    """Sizes of a step."""
    actor: ActorSection
    """The model that is trained."""
    reference: FrozenRoleSection | None = None
    """The frozen model that kl_coef compares with."""
    critic: FrozenRoleSection | None = None
    """The value model of PPO."""
    reward_model: FrozenRoleSection | None = None
    """A model that gives rewards."""
    rollout: RolloutSection | None = None
    """How responses are generated; needed by rl."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """The objective."""
    reward: RewardSection = RewardSection()
    """Rewards."""
    evaluation: EvaluationSection = EvaluationSection()
    """Evaluation."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Saving."""
    monitor: MonitorSection = MonitorSection()
    """Recording."""
    cluster: ClusterSection = ClusterSection()
    """The machines."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        if self.evaluation.interval and not self.data.validation_files:
            raise ValueError(
                f"evaluation.interval={self.evaluation.interval} needs data.validation_files; name some, or set it to 0"
            )
        if self.loop == "sft" and self.batch.responses_per_prompt != 1:
            raise ValueError(
                f"batch.responses_per_prompt={self.batch.responses_per_prompt}: sft learns one response per row; "
                "leave it out"
            )
        if self.loop == "rl":
            self._check_rl()
        return self

    def _check_rl(self) -> None:
        algorithm, group = self.algorithm, self.batch.responses_per_prompt
        if self.rollout is None:
            raise ValueError("rollout: loop rl needs this section; see recipes/tiny_grpo.yaml")
        if algorithm.kl_coef and self.reference is None:
            raise ValueError(f"algorithm.kl_coef={algorithm.kl_coef} needs the section reference; add it, or use 0")
        if algorithm.advantage in ("grpo", "rloo") and group < 2:
            raise ValueError(
                f"batch.responses_per_prompt={group} must be at least 2: {algorithm.advantage} compares the responses "
                "to one prompt"
            )
        if algorithm.advantage == "rloo" and algorithm.normalize_by_std:
            raise ValueError("algorithm.normalize_by_std must be false: advantage rloo does not divide by it")
        buffer, longest = algorithm.overlong_buffer, self.rollout.max_response_length
        if buffer.enable and not 0 < buffer.len <= longest:
            raise ValueError(
                f"algorithm.overlong_buffer.len={buffer.len} must be from 1 to rollout.max_response_length={longest}"
            )
