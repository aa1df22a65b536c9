"""The ``algorithm`` section: what is optimised. Terms are the field's."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from rlhf_megatron.recipe.section import Section

AdvantageName = Literal[
    "grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "pass_at_k",
    "gae",
]
PolicyLossName = Literal[
    "clip", "gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "reinforce"
]
ADVANTAGE_NAMES: tuple[str, ...] = get_args(AdvantageName)
POLICY_LOSS_NAMES: tuple[str, ...] = get_args(PolicyLossName)
# Those that say nothing about a response that is alone with its prompt.
COMPARING_ADVANTAGES = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "pass_at_k")
# Those that treat some tokens of a whole minibatch otherwise, chosen by their old logprobs.
SELECTING_LOSSES = ("clip_cov", "kl_cov")
_CAN_CLIP_TWICE = ("clip", "gspo", "clip_cov", "dppo_tv", "dppo_kl")
_MAY_DIVIDE_BY_STD = ("grpo", "gpg", "pass_at_k")
# Keys that only some choices of another key read.
_READ_BY = (
    ("pass_k", "advantage", ("pass_at_k",)),
    ("gamma", "advantage", ("gae", "reinforce_plus_plus")),
    ("gae_lambda", "advantage", ("gae",)),
    ("discount_per", "advantage", ("gae", "reinforce_plus_plus")),
    ("whiten_advantages", "advantage", ("gae",)),
    ("loss_constant", "loss_aggregation", ("sequence_sum_constant",)),
    ("sapo", "policy_loss", ("sapo",)),
    ("covariance", "policy_loss", SELECTING_LOSSES),
)


class _SwitchedSection(Section):
    """A section whose keys count where its key ``enable`` is true."""

    enable: bool = False

    @model_validator(mode="after")
    def _switch_is_given(self) -> _SwitchedSection:
        changed = self.changed(*type(self).model_fields)
        # Switched off by hand the keys may stay, for the day that they are wanted again.
        if changed and "enable" not in self.model_fields_set:
            key = changed[0]
            raise ValueError(f"{key}={getattr(self, key)} counts where enable is true; set enable, or leave {key} out")
        return self


class FilterGroupsSection(_SwitchedSection):
    """DAPO's dynamic sampling: replace groups whose rewards are all equal."""

    enable: bool = False
    """Turn it on."""
    metric: Literal["accuracy", "reward"] = "accuracy"
    """Must differ within a group: score, or reward with penalties."""
    max_num_gen_batches: int = Field(default=10, ge=0)
    """Generation rounds per step; 0: unlimited."""
    prompts_per_round: int | None = Field(default=None, gt=0, le=2**20)
    """Default: batch.prompts_per_step."""
    when_exhausted: Literal["train", "stop"] = "train"
    """After the last round: train on what there is, or stop."""
    keep_surplus: bool = False
    """Carry surplus groups, one update old, to the next step."""


class OverlongBufferSection(_SwitchedSection):
    """DAPO's soft length penalty."""

    enable: bool = False
    """Turn it on."""
    len: int = Field(default=0, ge=0)
    """The penalty grows over the last so many tokens."""
    penalty_factor: float = Field(default=1.0, ge=0)
    """Penalty at the limit."""


class RolloutCorrectionSection(Section):
    """Importance weights: trainer over rollout probabilities."""

    type: Literal["none", "tis", "mis"] = "none"
    """tis: truncate at threshold; mis: zero outside the thresholds."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of the token, or of the whole response."""
    threshold: float = Field(default=2.0, gt=0)
    """Largest weight."""
    threshold_low: float = Field(default=0.0, ge=0)
    """mis: smallest weight."""
    reject_threshold: float | None = Field(default=None, gt=1)
    """Reject responses with a geometric mean ratio outside 1 / this to this (1.01)."""
    veto_threshold: float | None = Field(default=None, gt=0, lt=1)
    """Reject responses with a token ratio below this (0.0001)."""

    @property
    def is_used(self) -> bool:
        """True if anything is asked for."""
        return self.type != "none" or self.reject_threshold is not None or self.veto_threshold is not None

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> RolloutCorrectionSection:
        if self.threshold_low and self.type != "mis":
            raise ValueError(
                f"threshold_low={self.threshold_low} is for type mis; the type is {self.type}, leave it out"
            )
        unused = self.changed("threshold", "level") if self.type == "none" else []
        if unused:
            key = unused[0]
            raise ValueError(f"{key}={getattr(self, key)} is for types tis and mis; the type is none, leave it out")
        if self.threshold_low >= self.threshold:
            raise ValueError(f"threshold_low={self.threshold_low} must be below threshold={self.threshold}")
        return self


class KLControllerSection(Section):
    """Schedule of the KL coefficient."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: keeps the KL near target."""
    target: float | None = Field(default=None, gt=0)
    """adaptive: KL to keep, nats per token."""
    horizon: int = Field(default=10000, gt=0)
    """Responses over which kl_coef changes by a fifth at most."""

    @model_validator(mode="after")
    def _target_is_given(self) -> KLControllerSection:
        if (self.type == "adaptive") != (self.target is not None):
            raise ValueError(f"target={self.target}: type adaptive needs one, and type fixed has none")
        if self.type == "fixed" and self.changed("horizon"):
            raise ValueError(f"horizon={self.horizon} is for type adaptive; it is fixed, leave it out")
        return self


class SapoSection(Section):
    """sapo: a higher temperature damps tokens sooner."""

    temperature_positive: float = Field(default=1.0, gt=0)
    """For A > 0."""
    temperature_negative: float = Field(default=1.05, gt=0)
    """For other tokens."""


class CovarianceSection(Section):
    """Tokens selected by the covariance of advantage and logprob, for policy_loss clip_cov and kl_cov."""

    fraction: float = Field(default=0.0002, gt=0, le=1)
    """Of a minibatch's sampled tokens; at least one."""
    low: float = 1.0
    """clip_cov: smallest covariance."""
    high: float = 5.0
    """clip_cov: largest covariance."""
    kl_coef: float = Field(default=1.0, ge=0)
    """kl_cov: weight of their KL from the old policy."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> CovarianceSection:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self


class TokenAggregationSection(Section):
    """The objective of supervised fine-tuning: next-token loss."""

    loss_aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"] = "token_mean"
    """Over the whole step: token_mean, or the mean over responses of their mean or sum."""


class AlgorithmSection(Section):
    """The objective (docs/algorithms.md)."""

    advantage: AdvantageName = "grpo"
    """Dr.GRPO is grpo without normalize_by_std."""
    normalize_by_std: bool | None = None
    """Divide by the group's reward std: grpo (default true), gpg and pass_at_k (default false)."""
    pass_k: int | None = Field(default=None, ge=2)
    """pass_at_k: k; default: batch.responses_per_prompt."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """gae and reinforce_plus_plus: discount."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """gae: 1: rewards only; 0: next value only."""
    discount_per: Literal["token", "turn"] = "token"
    """gae, reinforce_plus_plus: gamma and gae_lambda per token or turn (docs/multi_turn.md)."""
    credited_turns: Literal["all", "last"] = "all"
    """Turns whose tokens get the advantage."""
    whiten_advantages: bool = True
    """gae: over the step's sampled tokens."""
    policy_loss: PolicyLossName = "clip"
    """Of a token (docs/algorithms.md)."""
    clip_ratio_low: float = Field(default=0.2, gt=0)
    """Clips the ratio below 1 - this (gspo: of the sequence; gmpo: log ratio below minus this; dppo: divergence where A
    < 0)."""
    clip_ratio_high: float = Field(default=0.2, gt=0)
    """Clips the ratio above 1 + this; gspo, gmpo, dppo: likewise."""
    clip_ratio_dual: float | None = Field(default=None, gt=1)
    """Dual clip: bound on the ratio where A < 0 (clip, gspo, clip_cov); dppo: on every ratio."""
    sapo: SapoSection = SapoSection()
    """sapo: a higher temperature damps tokens sooner."""
    covariance: CovarianceSection = CovarianceSection()
    """clip_cov, kl_cov: selection by covariance of advantage and logprob."""
    loss_aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_sum_constant"
    ] = "token_mean"
    """Mean over the minibatch's tokens (DAPO), or over its responses' mean (GRPO), sum, or sum / constant (Dr.GRPO)."""
    loss_constant: float | None = Field(default=None, gt=0)
    """sequence_sum_constant: in tokens; default: rollout.max_response_length."""
    kl_coef: float = Field(default=0.0, ge=0)
    """KL to the reference; 0: no reference model."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """In the loss, or subtracted from the reward (per token for per-token advantages)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 is usual in the reward."""
    kl_gradient: Literal["k1", "k2", "k3"] | None = None
    """In the loss: this estimator's gradient instead; k2's is the KL's own."""
    kl_controller: KLControllerSection = KLControllerSection()
    """Schedule of kl_coef."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    zero_advantage_rows: Literal["skip", "keep"] = "skip"
    """skip: no passes over rows without a gradient."""
    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    """Of the actor before the step's updates, or the rollout. auto: of the update's own pass, with one update per
    step."""
    router_replay: Literal["off", "rollout"] = "off"
    """rollout: the actor uses the rollout's choice of experts (R3)."""
    filter_groups: FilterGroupsSection = FilterGroupsSection()
    """DAPO's dynamic sampling: replace groups whose rewards are all equal."""
    overlong_buffer: OverlongBufferSection = OverlongBufferSection()
    """DAPO's soft length penalty."""
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()
    """Importance weights, trainer over rollout."""

    @property
    def replays_experts(self) -> bool:
        """True if the actor takes the rollout's choices of experts."""
        return self.router_replay == "rollout"

    @property
    def divides_by_std(self) -> bool:
        """True if advantages are divided by the group's standard deviation."""
        return self.advantage == "grpo" if self.normalize_by_std is None else self.normalize_by_std

    @model_validator(mode="after")
    def _keys_agree(self) -> AlgorithmSection:
        if self.divides_by_std and self.advantage not in _MAY_DIVIDE_BY_STD:
            raise ValueError(f"normalize_by_std must be false: advantage {self.advantage} does not divide by it")
        for key, choice, readers in _READ_BY:
            chosen, value = getattr(self, choice), getattr(self, key)
            if chosen not in readers and self.changed(key):
                value = "..." if isinstance(value, Section) else value
                raise ValueError(f"{key}={value} is for {choice} {' and '.join(readers)}; it is {chosen}, leave it out")
        if self.clip_ratio_dual is not None and self.policy_loss not in _CAN_CLIP_TWICE:
            raise ValueError(
                f"clip_ratio_dual={self.clip_ratio_dual}: policy_loss {self.policy_loss} has no such bound"
            )
        if self.kl_gradient is not None and self.kl_placement == "reward":
            raise ValueError(f"kl_gradient={self.kl_gradient}: a KL in the reward has no gradient; leave it out")
        if self.kl_controller.type == "adaptive" and not self.kl_coef:
            raise ValueError("kl_controller.type=adaptive needs a kl_coef above 0 to start from")
        if self.rollout_correction.is_used and self.old_logprobs == "rollout":
            raise ValueError(
                "rollout_correction compares the trainer's logprobs with the rollout's: set old_logprobs to recompute, "
                "or leave it out, since with rollout the ratio itself is against the rollout"
            )
        return self

    @property
    def is_corrected(self) -> bool:
        """True if answers of other policies than the actor's are corrected for."""
        return self.rollout_correction.is_used or self.old_logprobs == "rollout"
