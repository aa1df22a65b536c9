"""The recipe of reinforcement learning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from rlhf_megatron.recipe.algorithm import COMPARING_ADVANTAGES, SELECTING_LOSSES, AlgorithmSection
from rlhf_megatron.recipe.batch import GroupedBatchSection
from rlhf_megatron.recipe.drafting import DRAFT, draft_section
from rlhf_megatron.recipe.judge import JudgeSection
from rlhf_megatron.recipe.operations import RegatherSection
from rlhf_megatron.recipe.role_sections import CriticSection, FrozenRoleSection, RewardModelSection, RoleSection
from rlhf_megatron.recipe.rollout_recipe import RolloutRecipe


class RLRecipe(RolloutRecipe):
    """A run of reinforcement learning."""

    loop: Literal["rl"]
    """Reinforcement learning."""
    batch: GroupedBatchSection
    """Sizes of one step over all GPUs."""
    reference: FrozenRoleSection | None = None
    """Frozen model for kl_coef; with actor.lora by path only."""
    critic: CriticSection | None = None
    """PPO's value model: a decoder with a scalar head."""
    reward_model: RewardModelSection | None = None
    """Frozen sequence classifier; its scores are rewards."""
    judge: JudgeSection | None = None
    """Frozen language model that generates verdicts: their scores are rewards (docs/rewards.md#a-judge-in-the-job)."""
    regather: RegatherSection = RegatherSection()
    """Weight sync, actor to rollout."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """The objective (docs/algorithms.md)."""

    needed: ClassVar[Mapping[str, str]] = {"rollout": "loop rl needs this section; see recipes/tiny_grpo.yaml"}

    def _checks(self) -> list[Callable[[], None]]:
        """See Recipe."""
        unread = ("response_column", "learned_turns", "string_prompts")
        return [
            *super()._checks(),
            *(functools.partial(self._check_reads, key) for key in unread),
            self._check_given_responses,
            self._check_adapted_reference,
            self._check_deterministic,
            self._check_corrected,
            self._check_reference,
            self._check_groups,
            self._check_critic,
            self._check_turns,
            self._check_agent,
            self._check_branches,
            self._check_rewards,
            self._check_filter_groups,
            self._check_prefill,
            self._check_overlong,
            self._check_draft,
        ]

    def _checks_of_length(self) -> list[Callable[[], None]]:
        """See Recipe."""
        return [*super()._checks_of_length(), self._check_warmup] if self.steps else []

    def _check_given_responses(self) -> None:
        if self.data.max_response_length is not None:
            raise ValueError(
                f"data.max_response_length={self.data.max_response_length}: rl learns no given responses; set "
                "rollout.max_response_length"
            )

    def _check_adapted_reference(self) -> None:
        if self.actor.lora is not None and self.reference is not None and self.reference.path is None:
            raise ValueError(
                "reference: with actor.lora it is the actor without its adapters; set reference=null, or "
                "reference.path to another model"
            )

    def _check_keep_best(self) -> None:
        """Refuse a metric that no evaluation has, where models alone score; else only the run can tell."""
        best = self.checkpoint.keep_best
        if best and self.reward.rule == "none":  # to a reward model alone, no answer is right or wrong
            of_sources = best.metric.startswith("eval/") and best.metric.endswith("/score")
            if not of_sources:
                raise self._unknown_metric(("eval/SOURCE/score",))

    @property
    def roles(self) -> Mapping[str, RoleSection]:
        """See Recipe."""
        named: dict[str, RoleSection | None]
        named = {"reference": self.reference, "critic": self.critic, "reward_model": self.reward_model}
        if self.rollout.draft_method:
            assert self.rollout.speculative is not None
            named[DRAFT] = draft_section(self.actor, self.rollout.speculative)
        return {"actor": self.actor} | {name: section for name, section in named.items() if section is not None}

    @property
    def roles_made(self) -> Mapping[str, RoleSection]:
        """See Recipe. Without a KL term nothing reads the reference."""
        compares = self.algorithm.kl_coef != 0.0
        return {name: section for name, section in self.roles.items() if name != "reference" or compares}

    @property
    def predicts(self) -> bool:
        """See Recipe."""
        return self.rollout.draft_method == "mtp"

    @property
    def reference_is_base(self) -> bool:
        """True if kl_coef compares with the actor without its adapters, for which there is no role."""
        return self.actor.lora is not None and self.reference is None and self.algorithm.kl_coef != 0.0

    @property
    def old_logprobs(self) -> Literal["update", "recompute", "rollout"]:
        """Source of the old logprobs; "update": they are those of the forward pass of the step's only update.

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
        """True if GPUs of their own generate for a step while others learn from the one before."""
        return self.rollout.steps_ahead > 0

    @property
    def learning_steps(self) -> int:
        """See Recipe; in its warm-up the critic alone learns."""
        return self.steps - (self.critic.warmup_steps if self.critic else 0)

    @property
    def temperature(self) -> float:
        """See Recipe."""
        return self.rollout.temperature

    @property
    def longest_sequence(self) -> int:
        """See Recipe."""
        return self.data.max_prompt_length + self.rollout.max_response_length

    @property
    def reward_names(self) -> list[str]:
        """Names of the parts of a reward in the run, those of models the last; none where there is one part."""
        models = list(self.scoring_models)
        return [*self._names_of_scores, *models] if models else super().reward_names

    @property
    def kept_reward_names(self) -> list[str]:
        """Names of the parts in rows that are kept: of a single one too, where the reward is less by a penalty."""
        return self.reward_names or ["rule"] * self.algorithm.overlong_buffer.enable

    @property
    def scoring_models(self) -> Mapping[str, RewardModelSection | JudgeSection]:
        """The models that score responses, in the order of their parts of a reward."""
        named = {"reward_model": self.reward_model, "judge": self.judge}
        return {name: section for name, section in named.items() if section is not None}

    @property
    def why_weights_are_copied(self) -> str | None:
        """The setting that keeps the rollout from having weights in the actor's memory; None where nothing does."""
        if self.rollout.share_weights == "never":
            return "rollout.share_weights is never"
        if self.actor.offload.parameters:
            return "actor.offload.parameters takes the actor's off the GPU"
        if self.rollout.dtype not in (None, self.model.dtype):
            return f"rollout.dtype is {self.rollout.dtype} and model.dtype {self.model.dtype}"
        return None

    def _check_rewards(self) -> None:
        """Refuse rewards that would be the same for every response."""
        longest = self.rollout.max_response_length
        for source in (self.reward, *self.reward.parts):
            if source.length_low >= longest:
                raise ValueError(
                    f"reward.length_low={source.length_low}: no response would be paid, since "
                    f"rollout.max_response_length={longest}; lower it"
                )
        if self.reward.rule != "none":
            return
        if not self.scoring_models and not self.plays:
            raise ValueError(
                "reward.rule=none needs the section reward_model or judge, or rollout.multi_turn.environment or "
                "rollout.agent, which then gives the reward alone"
            )
        if self.scoring_models and not any(section.weight for section in self.scoring_models.values()):
            raise ValueError(
                f"{next(iter(self.scoring_models))}.weight=0: each reward would be 0, as reward.rule=none has no "
                "other; change one"
            )

    def _check_filter_groups(self) -> None:
        """Refuse dynamic sampling that could never have the groups of a step together."""
        settings, group, wanted = (
            self.algorithm.filter_groups,
            self.batch.responses_per_prompt,
            self.batch.prompts_per_step,
        )
        if not settings.enable:
            return
        if self.epochs is not None:
            raise ValueError(
                "epochs: with algorithm.filter_groups a step takes as many prompts as it needs; give steps alone"
            )
        if settings.keep_surplus and self.rollout.updates_in_flight:
            raise ValueError(
                "algorithm.filter_groups.keep_surplus: with rollout.partial=resume groups would be older than "
                "rollout.max_staleness; leave one out"
            )
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

    def _check_deterministic(self) -> None:
        if self.deterministic and self.rollout.scheduling != "static":
            raise ValueError(
                f"deterministic: with rollout.scheduling={self.rollout.scheduling} the batches of the engine depend on "
                "the replicas' speed; set it to static"
            )

    def _check_corrected(self) -> None:
        """Refuse answers of other policies than the actor's without a correction."""
        rollout = self.rollout
        others = [
            ("quantization", rollout.quantization, "another policy than the actor's answers"),
            ("kv_cache_dtype", rollout.kv_cache_dtype, "another policy than the actor's answers"),
            ("steps_ahead", rollout.steps_ahead, "the policy of an update before answers"),
            ("partial", rollout.partial == "resume" and "resume", "policies of earlier updates have begun answers"),
        ]
        for key, value, whose in others:
            if value and not self.algorithm.is_corrected:
                raise ValueError(
                    f"rollout.{key}={value}: {whose}; correct for it by algorithm.rollout_correction, such as "
                    "{type: tis}, or by algorithm.old_logprobs=rollout"
                )

    def _check_reference(self) -> None:
        algorithm = self.algorithm
        if algorithm.kl_coef and self.reference is None and not self.reference_is_base:
            raise ValueError(f"algorithm.kl_coef={algorithm.kl_coef} needs the section reference; add it, or use 0")

    def _check_groups(self) -> None:
        algorithm, group = self.algorithm, self.batch.responses_per_prompt
        if algorithm.advantage in COMPARING_ADVANTAGES and group < 2:
            raise ValueError(
                f"batch.responses_per_prompt={group} must be at least 2: {algorithm.advantage} compares the responses "
                "to one prompt"
            )
        if algorithm.pass_k is not None and algorithm.pass_k > group:
            raise ValueError(f"algorithm.pass_k={algorithm.pass_k} is above batch.responses_per_prompt={group}")

    def _check_critic(self) -> None:
        algorithm = self.algorithm
        if algorithm.advantage == "gae" and self.critic is None:
            raise ValueError("algorithm.advantage=gae needs the section critic, whose values it takes")
        if algorithm.advantage != "gae" and self.critic is not None:
            raise ValueError(
                f"critic: algorithm.advantage={algorithm.advantage} reads no values; leave it out, or use gae"
            )

    def _check_warmup(self) -> None:
        if self.critic is not None and self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps}: the actor would learn in none of {self.steps} steps; "
                "lower it"
            )

    def _check_turns(self) -> None:
        if self.has_tools and "tools" in self.data.chat_template_kwargs:
            raise ValueError(
                "data.chat_template_kwargs.tools: rollout.multi_turn.tools describes the tools; leave it out"
            )
        for name in self.scoring_models if self.rollout.multi_turn else ():
            raise ValueError(
                f"{name}: it reads one answer to a prompt, and rollout.multi_turn has several; leave one out"
            )
        section = "multi_turn" if self.rollout.multi_turn else "agent"
        if self.keeps_journal and self.deterministic:
            raise ValueError(
                f"rollout.{section}.journal: a trajectory that goes on is computed in other batches, and with "
                "deterministic a killed run repeats its step; leave one out"
            )
        if self.keeps_journal and not self.checkpoint.save_interval:
            raise ValueError(
                f"rollout.{section}.journal: without checkpoint.save_interval a killed run begins anew; set that, or "
                "leave it out"
            )
        of_turns = self.algorithm.changed("discount_per", "credited_turns")
        if of_turns and self.rollout.multi_turn is None:
            raise ValueError(
                f"algorithm.{of_turns[0]}: responses have one turn; add rollout.multi_turn, or leave it out"
            )

    def _check_agent(self) -> None:
        for name in self.scoring_models if self.rollout.agent else ():
            raise ValueError(f"{name}: it reads one answer to a prompt, and rollout.agent has several; leave one out")

    def _check_branches(self) -> None:
        """Refuse what knows one row per trajectory, where there may be several."""
        if not self.has_branches:
            return
        name, algorithm = "agent" if self.rollout.agent else "multi_turn.context", self.algorithm
        way_out = "set rollout.agent.branches to last" if self.rollout.agent else "leave rollout.multi_turn.context out"
        refused = {
            f"advantage={algorithm.advantage}": algorithm.advantage in ("gae", "reinforce_plus_plus", "remax"),
            "overlong_buffer": algorithm.overlong_buffer.enable,
            "credited_turns=last": algorithm.credited_turns == "last",
        }
        for key in (key for key, is_set in refused.items() if is_set):
            raise ValueError(
                f"algorithm.{key}: a trajectory of rollout.{name} may have several rows, and one advantage; {way_out}, "
                "or choose another"
            )

    def _check_draft(self) -> None:
        """Refuse a model that drafts where it could not learn beside the actor."""
        speculative = self.rollout.speculative
        if speculative and speculative.method == "eagle3" and not (speculative.path or speculative.learns):
            raise ValueError(
                "rollout.speculative.method=eagle3: a new head is random until it learns; give path, optimizer or both"
            )
        if speculative is None or not speculative.learns:
            return
        if speculative.method == "eagle3" and self.actor.layout.pipeline > 1:
            raise ValueError(
                f"actor.layout.pipeline={self.actor.layout.pipeline}: a head that drafts and learns reads states of "
                "several layers, which must be on one rank (rollout.speculative); use tensor, expert or context"
            )
        if self.actor.shared_prompts:
            raise ValueError(
                "rollout.speculative.optimizer: the token behind a prompt that rows share differs from row to row "
                "(actor.shared_prompts); leave one out"
            )
        if self.model.dtype == "float16":
            raise ValueError(
                "rollout.speculative.optimizer: a model that drafts has no loss scale of its own, which model.dtype="
                "float16 asks for; use bfloat16, or leave it out"
            )

    def _check_prefill(self) -> None:
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

    def _check_overlong(self) -> None:
        buffer, longest = self.algorithm.overlong_buffer, self.rollout.max_response_length
        if buffer.enable and not 0 < buffer.len <= longest:
            raise ValueError(
                f"algorithm.overlong_buffer.len={buffer.len} must be from 1 to rollout.max_response_length={longest}"
            )
        if buffer.enable and any(each.max_response_length for each in self.rollout.by_prompt_length):
            raise ValueError(
                "rollout.by_prompt_length: algorithm.overlong_buffer knows one longest response; leave out "
                "max_response_length there"
            )
