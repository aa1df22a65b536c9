"""The common part of the recipes of all loops; each loop has its own recipe class (rl_recipe.py, supervised.py)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from rlhf_megatron.gpu_kinds import GPUS
from rlhf_megatron.recipe.batch import BatchSection
from rlhf_megatron.recipe.data import DataSection
from rlhf_megatron.recipe.health import HealthSection
from rlhf_megatron.recipe.model import ModelSection
from rlhf_megatron.recipe.operations import (
    CheckpointSection,
    ClusterSection,
    EvaluationSection,
    MonitorSection,
)
from rlhf_megatron.recipe.role_sections import (
    ActorSection,
    CriticSection,
    FrozenRoleSection,
    RewardModelSection,
    RoleSection,
)
from rlhf_megatron.recipe.section import Section, make_all
from rlhf_megatron.recipe.slurm import RetrySection, SlurmSection
from rlhf_megatron.untrusted import shown

# Keys at the top level in the order that a reader wants: what is run, with which models, how it learns, how it is kept.
READING_ORDER = (
    *("name", "loop", "steps", "epochs", "seed", "deterministic", "run_root", "model", "data", "batch"),
    *("actor", "reference", "critic", "reward_model", "judge", "rollout", "regather", "algorithm", "reward"),
    *("evaluation", "checkpoint", "monitor", "health", "cluster", "retry", "slurm"),
)
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
# A folder's name has up to 255, and runs of a sweep or a study get a few more behind it.
_LONGEST_NAME = 200
_ROUNDING = 1e-6  # of a step, for a number of epochs such as 2/3


def check_run_name(name: str) -> None:
    """Raise ValueError where ``name`` cannot be that of a folder beside those of other runs."""
    if not _RUN_NAME.fullmatch(name):
        raise ValueError(
            f"{shown(repr(name))} cannot name a run folder; begin with a letter or digit, go on with those and "
            ". _ + = -"
        )
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"{shown(repr(name), 40)} cannot name a run folder; take at most {_LONGEST_NAME} characters")


class Recipe(Section):
    """Everything that decides a run, of any loop."""

    name: str
    """Files go to run_root/name."""
    loop: str
    """sft: supervised fine-tuning; reward_modeling: from pairs."""
    steps: int = Field(default=0, ge=0)
    """0: as many as epochs take."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the rows, rounded up to whole steps; with steps too, whichever ends first."""
    seed: int = Field(default=1, ge=0)
    """Of data order, sampling, random weights."""
    deterministic: bool = False
    """Reproducible, slower kernels; needs rollout.scheduling static."""
    run_root: str = "runs"
    """Folder of all runs."""
    model: ModelSection
    """Initial weights and tokenizer (docs/models.md)."""
    data: DataSection
    """Parquet files with verl's columns (docs/data.md)."""
    batch: BatchSection
    """Sizes of one step over all GPUs."""
    actor: ActorSection
    """The model that is trained."""
    evaluation: EvaluationSection = EvaluationSection()
    """On the validation files (docs/evaluation.md)."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Checkpoints and exports (docs/checkpoints.md)."""
    monitor: MonitorSection = MonitorSection()
    """Metrics, console and plots (docs/monitoring.md)."""
    health: HealthSection = HealthSection()
    """Rules over metrics, and alerts (docs/health.md)."""
    cluster: ClusterSection = ClusterSection()
    """Machines, for plans and weight sync."""
    retry: RetrySection = RetrySection()
    """Restarts after a fault (docs/recovery.md)."""
    slurm: SlurmSection = SlurmSection()
    """The job of launch/submit.py (docs/slurm.md)."""

    evaluation_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics that evaluations of this loop log, where the recipe alone decides which."""
    needed: ClassVar[Mapping[str, str]] = {}
    """Sections that this loop cannot do without, and what is said where one is missing."""

    @field_validator("name")
    @classmethod
    def _name_is_of_a_folder(cls, name: str) -> str:
        check_run_name(name)
        return name

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        make_all(self._checks())
        return self

    def _checks(self) -> list[Callable[[], None]]:
        """Check of several sections together; each raises ValueError where it fails."""
        own = [
            self._check_length, self._check_fp8, self._check_remainders, self._check_evaluations, self._check_keep_best
        ]  # fmt: skip
        return [*own, *self._checks_of_length()]

    def _checks_of_length(self) -> list[Callable[[], None]]:
        """Return those of keys that depend on the number of steps, once that is known."""
        return [self._check_compared_steps, self._check_recorded_steps] if self.steps else []

    def _check_length(self) -> None:
        if not self.steps and self.epochs is None:
            raise ValueError("steps: missing; add it, or epochs")

    def _check_fp8(self) -> None:
        if self.actor.fp8 is None:
            return
        if self.model.dtype != "bfloat16":
            raise ValueError(f"actor.fp8={self.actor.fp8} needs model.dtype bfloat16; it is {self.model.dtype}")
        hopper = [name for name, gpu in GPUS.items() if gpu.hopper]
        self._check_gpu(f"actor.fp8={self.actor.fp8}", hopper, "multiply blocks with scales; leave out fp8")

    def _check_gpu(self, setting: str, able: Collection[str], what: str) -> None:
        """Refuse a setting for another kind of GPU than those ``able``, which do ``what``."""
        if self.cluster.gpu not in (None, *able):
            raise ValueError(f"{setting}: cluster.gpu={self.cluster.gpu} is none of {', '.join(able)}, which {what}")

    def _check_remainders(self) -> None:
        for name, section in self.roles.items():
            if section.learns_by is None or not section.learns_by.master_remainders:
                continue
            key = f"{name}.optimizer.master_remainders=True"
            if section.adapters:
                raise ValueError(f"{key}: adapters are float32, and there are no other master weights; leave it out")
            if self.dtype_of(section) != "bfloat16":
                raise ValueError(f"{key} needs weights in bfloat16; they are {self.dtype_of(section)}: leave it out")

    def with_counted_steps(self, rows: float) -> Self:
        """Return the recipe with the steps that ``epochs`` of so many training rows take; without epochs, as it is.

        Raises ValueError where another key contradicts that number.
        """
        if self.epochs is None:
            return self
        counted = max(1, math.ceil(self.epochs * rows / self.batch.prompts_per_step - _ROUNDING))
        whole = self.model_copy(update={"steps": min(counted, self.steps or counted)})
        make_all(whole._checks_of_length())
        return whole

    def _check_evaluations(self) -> None:
        """Refuse evaluations without data."""
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

    def _check_keep_best(self) -> None:
        """Refuse a metric that no evaluation of this recipe has."""
        best = self.checkpoint.keep_best
        if best and not any(fnmatchcase(name, best.metric) for name in self.evaluation_metrics):
            raise self._unknown_metric(self.evaluation_metrics)

    def _unknown_metric(self, known: tuple[str, ...]) -> ValueError:
        assert self.checkpoint.keep_best is not None
        return ValueError(
            f"checkpoint.keep_best.metric={self.checkpoint.keep_best.metric}: evaluations of this recipe have "
            f"{', '.join(known)}; name one of them, and mode: min for a loss"
        )

    def _check_no_shared_prompts(self) -> None:
        """Refuse what only groups of responses have."""
        if self.actor.shared_prompts:
            raise ValueError(
                f"actor.shared_prompts: loop {self.loop} has no groups of responses to a prompt; leave it out"
            )

    def _check_reads(self, *keys: str) -> None:
        """Refuse keys of data that this loop does not read, and that are not the default."""
        for key in keys:
            value = getattr(self.data, key)
            if value != type(self.data).model_fields[key].default:
                raise ValueError(f"data.{key}={value}: loop {self.loop} does not read it; leave it out")

    def _check_compared_steps(self) -> None:
        """Refuse keep_best where it would compare nothing."""
        best, save, evaluate = self.checkpoint.keep_best, self.checkpoint.save_interval, self.evaluation.interval
        if not save:  # which is refused already
            return
        # The last step is saved in any case.
        both = evaluate and (self.steps % evaluate == 0 or math.lcm(save, evaluate) <= self.steps)
        if best is not None and not (self.evaluation.at_end or both):
            raise ValueError(
                f"checkpoint.keep_best: no step of {self.steps} is both saved (checkpoint.save_interval={save}) and "
                f"evaluated (evaluation.interval={evaluate}, at_end=false); change one"
            )

    def _check_recorded_steps(self) -> None:
        monitor = self.monitor
        steps = {"profile": monitor.profile.steps, "timeline": [] if monitor.timeline.every else monitor.timeline.steps}
        for key, chosen in steps.items():
            if chosen and min(chosen) > self.steps:
                raise ValueError(f"monitor.{key}.steps={chosen}: the run has {self.steps} steps; name some of them")

    @property
    def roles(self) -> Mapping[str, RoleSection]:
        """The roles that the recipe has sections for, by name."""
        return {"actor": self.actor}

    @property
    def roles_made(self) -> Mapping[str, RoleSection]:
        """Those of ``roles`` that the run makes."""
        return self.roles

    def shares_prompts(self, section: RoleSection) -> bool:
        """Return True if the role of ``section`` computes a prompt once for the rows of a micro-batch that begin with
        it."""
        return self.actor.shared_prompts and not isinstance(section, RewardModelSection)

    def dtype_of(self, section: RoleSection) -> str:
        """Return the type that the role of ``section`` computes in."""
        if isinstance(section, FrozenRoleSection | CriticSection | RewardModelSection) and section.dtype:
            return section.dtype
        return self.model.dtype

    @property
    def learning_steps(self) -> int:
        """Steps in which the actor learns."""
        return self.steps

    @property
    def rollout_is_ahead(self) -> bool:
        """True if GPUs of their own generate for a step while others learn from the one before."""
        return False

    @property
    def predicts(self) -> bool:
        """True if the model's layer for multi-token prediction drafts for the rollout."""
        return False

    @property
    def reference_is_base(self) -> bool:
        """True if kl_coef compares with the actor without its adapters, for which there is no role."""
        return False

    @property
    def temperature(self) -> float:
        """The divisor of logits."""
        return 1.0

    @property
    def rows_per_response(self) -> int:
        """Rows through the model for each response asked for."""
        return 1

    @property
    def longest_sequence(self) -> int:
        """Most tokens of one row through the models, of what the recipe does not leave out for its length.

        Given responses without a limit have no longest; they are taken to be as long as prompts.
        """
        return self.data.max_prompt_length + (self.data.max_response_length or self.data.max_prompt_length)
