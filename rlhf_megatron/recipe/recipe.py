"""The recipe as a whole, and the rules that join its sections."""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rlhf_megatron.recipe.algorithm import COMPARING_ADVANTAGES, SELECTING_LOSSES, AlgorithmSection
from rlhf_megatron.recipe.batch import BatchSection
from rlhf_megatron.recipe.data import DataSection
from rlhf_megatron.recipe.health import HealthSection
from rlhf_megatron.recipe.model import ModelSection
from rlhf_megatron.recipe.operations import (
    CheckpointSection,
    ClusterSection,
    EvaluationSection,
    MonitorSection,
    RegatherSection,
)
from rlhf_megatron.recipe.reward import RewardSection
from rlhf_megatron.recipe.roles import ActorSection, CriticSection, FrozenRoleSection, RewardModelSection
from rlhf_megatron.recipe.rollout import RolloutSection
from rlhf_megatron.recipe.section import Section
from rlhf_megatron.recipe.slurm import RetrySection, SlurmSection
from rlhf_megatron.untrusted import shown

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
# A folder's name has up to 255, and runs of a sweep or a study get a few more behind it.
_LONGEST_NAME = 200


def check_run_name(name: str) -> None:
    """Raises ValueError where ``name`` cannot be that of a folder beside those of other runs."""
    if not _RUN_NAME.fullmatch(name):
        raise ValueError(
            f"{shown(repr(name))} cannot name a run folder; begin with a letter or digit, go on with those and "
            ". _ + = -"
        )
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"{shown(repr(name), 40)} cannot name a run folder; take at most {_LONGEST_NAME} characters")


class Recipe(Section):
    """Everything that decides a run."""

    name: str
    """Name of the run; its files go to run_root/name."""
    loop: Literal["rl", "sft", "reward_modeling"]
    """rl: reinforcement learning; sft: supervised fine-tuning; reward_modeling: a reward model from pairs of
    responses."""
    steps: int = Field(gt=0)
    """Steps of the loop: each takes batch.prompts_per_step prompts."""
    seed: int = Field(default=1, ge=0)
    """Decides data order, sampling and random weights."""
    deterministic: bool = False
    """Only kernels that give the same bits each time, which are slower on GPUs; needs rollout.scheduling static."""
    run_root: str = "runs"
    """Folder of all runs."""
    model: ModelSection
    """The model."""
    data: DataSection
    """The data."""
    batch: BatchSection
    """Sizes of a step."""
    actor: ActorSection
    """The model that is trained; for reward_modeling: with a scalar head."""
    reference: FrozenRoleSection | None = None
    """The frozen model that kl_coef compares with. With actor.lora: only one of another path, since the actor without
    its adapters is there already."""
    critic: CriticSection | None = None
    """The value model of PPO."""
    reward_model: RewardModelSection | None = None
    """A model that gives rewards."""
    rollout: RolloutSection | None = None
    """How responses are generated; needed by rl."""
    regather: RegatherSection = RegatherSection()
    """How its weights follow the actor's."""
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
    health: HealthSection = HealthSection()
    """What is watched while the run goes on."""
    cluster: ClusterSection = ClusterSection()
    """The machines."""
    retry: RetrySection = RetrySection()
    """What happens after a fault."""
    slurm: SlurmSection = SlurmSection()
    """The job."""

    @field_validator("name")
    @classmethod
    def _name_is_of_a_folder(cls, name: str) -> str:
        check_run_name(name)
        return name

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        if self.evaluation.interval and not self.data.evaluates:
            raise ValueError(
                f"evaluation.interval={self.evaluation.interval} needs data.validation_files or "
                "data.validation_fraction; give one, or set it to 0"
            )
        if self.checkpoint.keep_best and not (self.checkpoint.save_interval and self.data.evaluates):
            raise ValueError(
                "checkpoint.keep_best compares checkpoints by their evaluations; give checkpoint.save_interval, and "
                "data.validation_files or data.validation_fraction, or leave it out"
            )
        self._check_keep_best()
        self._check_recorded_steps()
        if self.loop != "sft" and self.data.response_column is not None:
            raise ValueError(
                f"data.response_column={self.data.response_column}: loop {self.loop} does not read it; leave it out"
            )
        if self.loop == "rl" and self.data.max_response_length is not None:
            raise ValueError(
                f"data.max_response_length={self.data.max_response_length}: rl learns no given responses; set "
                "rollout.max_response_length"
            )
        if self.loop != "rl" and self.batch.responses_per_prompt != 1:
            learns = "one response" if self.loop == "sft" else "one pair"
            raise ValueError(
                f"batch.responses_per_prompt={self.batch.responses_per_prompt}: {self.loop} learns {learns} per row; "
                "leave it out"
            )
        if self.actor.lora is not None:
            self._check_lora()
        if self.loop == "rl":
            self._check_rl()
        else:
            self._check_supervised()
        return self

    @property
    def reference_is_base(self) -> bool:
        """Whether what kl_coef compares with is the actor without its adapters, for which there is no role."""
        return self.actor.lora is not None and self.reference is None and self.algorithm.kl_coef != 0.0

    @property
    def old_logprobs(self) -> Literal["update", "recompute", "rollout"]:
        """Where old logprobs come from; "update": they are those of the forward pass of the step's only update.

        That is so where nothing before that update asks for them: no KL in the reward, no selection of tokens.
        """
        asked, algorithm = self.algorithm.old_logprobs, self.algorithm
        if asked != "auto":
            return asked
        asked_before = algorithm.policy_loss in SELECTING_LOSSES or (
            algorithm.kl_coef > 0 and algorithm.kl_placement == "reward"
        )
        return "recompute" if asked_before or self.batch.updates_per_step > 1 else "update"

    @property
    def rollout_is_ahead(self) -> bool:
        """Whether GPUs of their own generate for a step while others learn from the one before."""
        return self.loop == "rl" and self.rollout is not None and self.rollout.steps_ahead > 0

    @property
    def rollout_repeats(self) -> bool:
        """Whether what the engines compute together is to be the same in every run."""
        return self.rollout is not None and self.rollout.scheduling == "static"

    @property
    def longest_sequence(self) -> int:
        """Most tokens of one row through the models, of what the recipe does not leave out for its length.

        Given responses without a limit have no longest; they are taken to be as long as prompts.
        """
        data, limit = self.data, self.data.max_response_length
        if self.loop == "rl" and self.rollout is not None:
            limit = self.rollout.max_response_length
        if self.loop == "reward_modeling" and limit is not None:
            return limit  # of the whole conversation
        return data.max_prompt_length + (limit or data.max_prompt_length)

    @property
    def reward_names(self) -> list[str]:
        """Names of the parts of a reward in the run, the reward model's the last; none where there is one part."""
        if self.reward_model is None:
            return self.reward.part_names
        own = [] if self.reward.rule == "none" else self.reward.part_names or ["rule"]
        return [*own, "reward_model"]

    @property
    def why_weights_are_copied(self) -> str | None:
        """What in the recipe keeps the rollout from having weights in the actor's memory; None where nothing does."""
        if self.rollout is None or self.rollout.share_weights == "never":
            return "rollout.share_weights is never"
        if self.actor.offload.parameters:
            return "actor.offload.parameters takes the actor's off the GPU"
        if self.rollout.dtype not in (None, self.model.dtype):
            return f"rollout.dtype is {self.rollout.dtype} and model.dtype {self.model.dtype}"
        return None

    def _check_lora(self) -> None:
        if self.loop == "reward_modeling":
            raise ValueError("actor.lora: a reward model's head has to learn too, and adapters have none; leave it out")
        if self.reference is not None and self.reference.path is None:
            raise ValueError(
                "reference: with actor.lora it is the actor without its adapters; set reference=null, or "
                "reference.path to another model"
            )

    def _check_keep_best(self) -> None:
        """Refuses a metric that no evaluation of this recipe has, and no step to compare; what evaluations of rewards
        have is known at run time."""
        best, save, evaluate = self.checkpoint.keep_best, self.checkpoint.save_interval, self.evaluation.interval
        # The last step is saved in any case.
        both = evaluate and (self.steps % evaluate == 0 or math.lcm(save, evaluate) <= self.steps)
        if best is not None and not (self.evaluation.at_end or both):
            raise ValueError(
                f"checkpoint.keep_best: no step of {self.steps} is both saved (checkpoint.save_interval={save}) and "
                f"evaluated (evaluation.interval={evaluate}, at_end=false); change one"
            )
        if best is None or (self.loop == "rl" and self.reward.rule != "none"):
            return
        names = {
            "rl": ["eval/SOURCE/score"],  # to a reward model alone, no answer is right or wrong
            "sft": ["eval/loss"],
            "reward_modeling": ["eval/accuracy", "eval/margin", "eval/loss"],
        }[self.loop]
        of_sources = self.loop == "rl" and best.metric.startswith("eval/") and best.metric.endswith("/score")
        if not of_sources and not any(fnmatchcase(name, best.metric) for name in names):
            raise ValueError(
                f"checkpoint.keep_best.metric={best.metric}: evaluations of this recipe have {', '.join(names)}; name "
                "one of them, and mode: min for a loss"
            )

    def _check_recorded_steps(self) -> None:
        monitor = self.monitor
        steps = {"profile": monitor.profile.steps, "timeline": [] if monitor.timeline.every else monitor.timeline.steps}
        for key, chosen in steps.items():
            if chosen and min(chosen) > self.steps:
                raise ValueError(f"monitor.{key}.steps={chosen}: the run has {self.steps} steps; name some of them")

    def _check_filter_groups(self) -> None:
        """Refuses dynamic sampling that could never have the groups of a step together."""
        settings, group, wanted = (
            self.algorithm.filter_groups,
            self.batch.responses_per_prompt,
            self.batch.prompts_per_step,
        )
        if not settings.enable:
            return
        if group < 2:
            raise ValueError(
                f"algorithm.filter_groups: rewards of a group differ only where batch.responses_per_prompt={group} is "
                "at least 2; raise it, or set enable to false"
            )
        drawn = (settings.prompts_per_round or wanted) * settings.max_num_gen_batches
        if settings.max_num_gen_batches and drawn < wanted:
            raise ValueError(
                f"algorithm.filter_groups: max_num_gen_batches={settings.max_num_gen_batches} x prompts_per_round="
                f"{settings.prompts_per_round} is below batch.prompts_per_step={wanted}; raise one"
            )

    def _check_rewards(self) -> None:
        """Refuses rewards that would be the same for every response."""
        assert self.rollout is not None
        longest = self.rollout.max_response_length
        for source in (self.reward, *self.reward.parts):
            if source.length_low >= longest:
                raise ValueError(
                    f"reward.length_low={source.length_low}: no response would be paid, since "
                    f"rollout.max_response_length={longest}; lower it"
                )
        if self.reward.rule == "none" and self.reward_model is None:
            raise ValueError("reward.rule=none needs the section reward_model, which then gives the reward alone")
        if self.reward.rule == "none" and self.reward_model is not None and not self.reward_model.weight:
            raise ValueError(
                "reward_model.weight=0: each reward would be 0, as reward.rule=none has no other; change one"
            )

    def _check_supervised(self) -> None:
        read = ("loss_aggregation",) if self.loop == "sft" else ()
        unread = [key for key in self.algorithm.changed(*AlgorithmSection.model_fields) if key not in read]
        if unread:
            raise ValueError(f"algorithm.{unread[0]}: loop {self.loop} does not read it; leave it out")

    def _check_rl(self) -> None:
        algorithm, group = self.algorithm, self.batch.responses_per_prompt
        if self.rollout is None:
            raise ValueError("rollout: loop rl needs this section; see recipes/tiny_grpo.yaml")
        if self.deterministic and self.rollout.scheduling != "static":
            raise ValueError(
                f"deterministic: with rollout.scheduling={self.rollout.scheduling} the batches of the engine depend on "
                "the replicas' speed; set it to static"
            )
        corrected = algorithm.rollout_correction.is_used or algorithm.old_logprobs == "rollout"
        if self.rollout.quantization and not corrected:
            raise ValueError(
                f"rollout.quantization={self.rollout.quantization}: another policy than the actor's answers; correct "
                "for it by algorithm.rollout_correction, such as {type: tis}, or by algorithm.old_logprobs=rollout"
            )
        if self.rollout.steps_ahead and not corrected:
            raise ValueError(
                "rollout.steps_ahead=1: the policy of an update before answers; correct for it by "
                "algorithm.rollout_correction, such as {type: tis}, or by algorithm.old_logprobs=rollout"
            )
        if algorithm.kl_coef and self.reference is None and not self.reference_is_base:
            raise ValueError(f"algorithm.kl_coef={algorithm.kl_coef} needs the section reference; add it, or use 0")
        if algorithm.advantage in COMPARING_ADVANTAGES and group < 2:
            raise ValueError(
                f"batch.responses_per_prompt={group} must be at least 2: {algorithm.advantage} compares the responses "
                "to one prompt"
            )
        if algorithm.pass_k is not None and algorithm.pass_k > group:
            raise ValueError(f"algorithm.pass_k={algorithm.pass_k} is above batch.responses_per_prompt={group}")
        if algorithm.advantage == "gae" and self.critic is None:
            raise ValueError("algorithm.advantage=gae needs the section critic, whose values it takes")
        if algorithm.advantage != "gae" and self.critic is not None:
            raise ValueError(
                f"critic: algorithm.advantage={algorithm.advantage} reads no values; leave it out, or use gae"
            )
        if self.critic is not None and self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps}: the actor would learn in none of {self.steps} steps; "
                "lower it"
            )
        if self.rollout.multi_turn and self.reward_model is not None:
            raise ValueError(
                "reward_model: it reads one answer to a prompt, and rollout.multi_turn has several; leave one out"
            )
        self._check_rewards()
        self._check_filter_groups()
        longest_row, most = (
            self.data.max_prompt_length + self.rollout.max_response_length,
            self.rollout.max_num_batched_tokens,
        )
        if most is not None and most < longest_row and not self.rollout.enable_chunked_prefill:
            raise ValueError(
                f"rollout.max_num_batched_tokens={most} is below the {longest_row} tokens of a whole sequence "
                "(data.max_prompt_length + rollout.max_response_length), which enable_chunked_prefill=false asks for; "
                "raise it, or leave it out"
            )
        buffer, longest = algorithm.overlong_buffer, self.rollout.max_response_length
        if buffer.enable and not 0 < buffer.len <= longest:
            raise ValueError(
                f"algorithm.overlong_buffer.len={buffer.len} must be from 1 to rollout.max_response_length={longest}"
            )
