"""One rank's part of the rollout: groups of prompts in, scored trajectories of all replicas out."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import Field, TypeAdapter
from torch import Tensor
from typing_extensions import TypedDict

from rlhf_megatron.agents.program import AgentProgram
from rlhf_megatron.data.expert_choices import ChoiceShape
from rlhf_megatron.data.row_numbers import SpreadRows
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.generation.agent_turns import AgentTurns
from rlhf_megatron.generation.conversations import Conversations, conversations_of
from rlhf_megatron.generation.generated_groups import GeneratedGroups, GroupPacker, GroupScoring
from rlhf_megatron.generation.generation_metrics import (
    agent_metrics,
    generation_metrics,
    scoring_metrics,
    tool_metrics,
    turn_time_metrics,
)
from rlhf_megatron.generation.journal import Journal
from rlhf_megatron.generation.judge_verdicts import Judge, judge_metrics
from rlhf_megatron.generation.partners import Partner
from rlhf_megatron.generation.prompt_groups import (
    Group,
    ReadPrompts,
    begun_tensors,
    groups_from_state,
    groups_left,
    requests_for,
    with_begun,
)
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.generation.staleness import StepGoal
from rlhf_megatron.generation.waiting_rows import OwnTensors
from rlhf_megatron.generation.weight_sync import WeightSync
from rlhf_megatron.recipe import RLRecipe
from rlhf_megatron.recipe.rollout import PromptLengthSection, RolloutSection
from rlhf_megatron.rewards.score import Scorer
from rlhf_megatron.roles.reward_model import RewardModel
from rlhf_megatron.rollout.engine import Completion, GenerationRecord, Sampling, SamplingOfLength, request_seed
from rlhf_megatron.rollout.grouped_requests import GroupedRequests
from rlhf_megatron.rollout.response_lengths import LATEST
from rlhf_megatron.rollout.work_queue import WorkQueue, WorkQueues
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.exchange import gather_objects

_Count = Annotated[int, Field(ge=0, le=2**53)]


class _State(TypedDict):
    """The rollout's part of a checkpoint."""

    version: _Count
    lengths: list[_Count]


_STATE = TypeAdapter(_State)


class RolloutWorker:
    """Worker that generates this rank's share of each step's responses, and tells all ranks of all shares.

    Attributes:
        sampling: how the recipe draws tokens.
        weight_sync: this rank's engine, and its weights.
        choices: of experts, where the actor replays the rollout's.
        has_turn_rewards: an environment gives some.
    """

    def __init__(
        self,
        context: RunContext[RLRecipe],
        replica: Replica,
        tokenizer: Tokenizer,
        weight_sync: WeightSync,
        scorer: Scorer | None,
        partner: Partner | AgentProgram | None,
        scoring_models: Mapping[str, RewardModel | Judge],
        choices: ChoiceShape | None = None,
    ) -> None:
        """Set up; ``scorer`` and, where responses have several turns, their ``partner`` are on the rank that leads a
        replica; ``scoring_models``, by the recipe's names, are on all that generate. ``choices``: of experts, where
        batches have them."""
        self.choices, self.has_turn_rewards = choices, context.recipe.has_environment
        section = context.recipe.rollout
        self._context, self._team, self._replica = context, context.generators, replica
        self._section, self._tokenizer, self.weight_sync = section, tokenizer, weight_sync
        self._scorer, self._partner, self._scoring_models = scorer, partner, scoring_models
        self._queues = WorkQueues(section.scheduling, replica.index or 0, replica.count)
        self._packing_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="packing")
        self._pauses = section.updates_in_flight > 0
        self._journal = _journal_of(context, replica)
        self._lengths: list[int] = []  # of the latest responses of all replicas
        self.sampling = Sampling(
            section.temperature,
            section.top_p,
            section.top_k,
            section.max_response_length,
            () if section.drawn_lengths else tokenizer.stop_token_ids,
            [_sampling_of_length(section, entry) for entry in section.by_prompt_length],
        )

    def generate(
        self,
        groups: Sequence[Group],
        responses_per_prompt: int,
        sampling: Sampling,
        step: int,
        first_row: int = 0,
        wanted: int | None = None,
        for_training: bool = True,
    ) -> GeneratedGroups:
        """Answer this replica's share of ``groups``, each with ``responses_per_prompt``; scores are on their way.

        Collective over the team that generates; elsewhere nothing.

        With ``wanted``, that many groups are enough: others begun or finished by then are left for a later call, which
        is to be given all of them. ``first_row``: how many rows this step has generated before, so that no sampling
        seed comes twice.
        ``for_training``: what only training reads goes with the rows.
        """
        journal = None
        if self._journal and for_training:
            journal = self._journal.open(step, self.weight_sync.version, groups, responses_per_prompt)
            groups = journal.groups
        goal = None if wanted is None else self._goal(groups, wanted)
        choices, has_turn_rewards = self.choices if for_training else None, self.has_turn_rewards
        packer = GroupPacker(
            self._packing_thread,
            self._replica,
            groups,
            choices,
            has_turn_rewards,
            self._context.recipe.has_branches,
        )
        seed = self._context.recipe.seed
        conversations = conversations_of(
            self._context.recipe,
            self._partner,
            groups,
            responses_per_prompt,
            self._tokenizer,
            lambda row: request_seed(seed, step, first_row + row),
            journal,
        )
        scoring = GroupScoring(
            self._scorer,
            groups,
            responses_per_prompt,
            self._tokenizer,
            on_group=packer.begin,
            conversations=conversations,
        )
        for index, group in enumerate(groups):
            if group.is_whole and group.home == self._replica.index:
                scoring.submit_if_whole(index)
        requests = self._requests(groups, responses_per_prompt, sampling, step, first_row)
        completions, record = self._run_engine(groups, requests, sampling, scoring, conversations, goal)
        chosen, left = list(range(len(groups))), list[Group]()
        if self._team.here:
            with self._context.span("wait"):  # else rank 0 would time a slower replica as scoring
                dist.barrier(self._team.group)
            if goal is not None:
                submitted = gather_objects(scoring.submitted(), self._team.group)
                chosen = goal.chosen({index for part in submitted for index in part})
                discards = self._section.partial == "discard"
                left = groups_left(
                    groups, chosen, completions, responses_per_prompt, discards, self._replica, self._team.group
                )
        return GeneratedGroups(groups, chosen, left, scoring, packer, record, conversations)

    def _goal(self, groups: Sequence[Group], wanted: int) -> StepGoal:
        """Return the goal of a generation that may leave groups for later ones."""
        shares = self._pauses and self._section.scheduling == "static"
        return StepGoal(
            groups,
            wanted,
            self.weight_sync.version,
            self._section.updates_in_flight,
            self._replica.count if shares else None,
        )

    def _queue(self, groups: Sequence[Group], requests: GroupedRequests, goal: StepGoal | None) -> WorkQueue:
        """Return the queue of the groups that are asked for: this replica's own, and those that any may answer."""
        asked = requests.group_ids
        own = sum(groups[index].home is not None for index in asked)
        if goal is None:
            return self._queues.open(len(asked) - own, own=own)
        wanted, due = goal.lacking(self._replica.index)
        return self._queues.open(len(asked) - own, wanted, own, goal.deadlines(asked, due))

    def _requests(
        self, groups: Sequence[Group], responses_per_prompt: int, sampling: Sampling, step: int, first_row: int
    ) -> GroupedRequests:
        """Return this replica's requests for ``groups``, each row with a seed, and perhaps a length, of its own."""
        seed, drawn_lengths = self._context.recipe.seed, self._section.drawn_lengths

        def limit_of(row: int) -> int:
            assert drawn_lengths is not None
            return drawn_lengths.of_row(self._drawn_row(groups, row, responses_per_prompt))

        return requests_for(
            groups,
            responses_per_prompt,
            lambda length: sampling.of_prompt(length).max_tokens,
            lambda row: request_seed(seed, step, first_row + row),
            self._replica.index or 0,
            in_order=self._pauses,
            limit_of=limit_of if drawn_lengths else None,
        )

    def _drawn_row(self, groups: Sequence[Group], row: int, responses_per_prompt: int) -> int:
        """Return the row that says how long a response gets: of a step, so that all steps have the same lengths; where
        responses go on after an update, of the prompt, or the same groups would be left each time."""
        batch, (group, response) = self._context.recipe.batch, divmod(row, responses_per_prompt)
        number = groups[group].number
        if number is None:
            number = group
        elif not self._pauses:
            number %= batch.prompts_per_step
        return number * responses_per_prompt + response

    def _run_engine(
        self,
        groups: Sequence[Group],
        requests: GroupedRequests,
        sampling: Sampling,
        scoring: GroupScoring,
        conversations: Conversations | AgentTurns | None,
        goal: StepGoal | None,
    ) -> tuple[list[Completion], GenerationRecord]:
        """Return (what this replica has answered of the requests, what its engine did); nothing on ranks without
        one."""
        engine = self.weight_sync.engine
        if engine is None:
            return [], GenerationRecord()
        # What a replica has learned itself would be gone after a resume, and other groups would be admitted.
        engine.expect(self._lengths)

        def take(completion: Completion) -> None:
            if conversations:
                conversations.end(completion)
            scoring.take(completion)

        with conversations or contextlib.nullcontext():
            completions = engine.generate(
                requests,
                sampling,
                lambda done, total: self._context.progress("generate", done, total),
                take,
                self._queue(groups, requests, goal),
                conversations,
                pauses=goal is not None and self._pauses,
            )
        return completions, engine.record

    def gather(self, generated: GeneratedGroups) -> SpreadRows | None:
        """Return the rows of all replicas with their rewards, those of models included; the tokens of each are on
        one of the ranks of the replica that answered.

        Collective over the team that generates; elsewhere None. Waits for the last score. A reward is NaN where the row
        is to be left out of the loss.
        """
        if not self._team.here:
            return None
        rows = generated.gather(self._team.group)
        self._lengths = [*self._lengths, *rows.numbers.completion_lengths[-LATEST:].tolist()][-LATEST:]
        for name, section in self._context.recipe.scoring_models.items():
            with self._context.span(name):
                rows = generated.with_model_scores(rows, self._scoring_models[name], section.weight)
        return rows

    def generation_metrics(self, calls: Sequence[GeneratedGroups]) -> dict[str, float]:
        """Return what replicas did in these calls; collective over the team."""
        turns, every = None, [generated.conversations for generated in calls]
        if self._section.multi_turn:
            turns = [each.counts for each in every if isinstance(each, Conversations)]
        records, completions = [each.record for each in calls], [row for each in calls for row in each.completions]
        metrics = generation_metrics(records, completions, turns, self._replica, self._team)
        if self._section.multi_turn or self._section.agent:
            metrics |= turn_time_metrics(records, self._replica, self._team)
        if self._context.recipe.has_tools:
            tools = [each.tools for each in every if isinstance(each, Conversations) and each.tools]
            names = [tool["function"]["name"] for tool in self._tokenizer.tools]
            metrics |= tool_metrics(tools, names, self._replica, self._team)
        if self._section.agent:
            counts = [each.counts for each in every if isinstance(each, AgentTurns)]
            metrics |= agent_metrics(counts, self._replica, self._team)
        return metrics

    def scoring_metrics(self, calls: Sequence[GeneratedGroups]) -> dict[str, float]:
        """Return the scoring outcomes of these calls, and the parts of their rewards; collective."""
        scores = [score for generated in calls for score in generated.scores()]
        judged = [generated.judged for generated in calls if generated.judged]
        metrics = scoring_metrics(scores, self._context.recipe.reward_names, self._team)
        return metrics | (judge_metrics(judged) if judged else {})

    @property
    def replicas(self) -> int:
        """Number of engines."""
        return self._replica.count

    def reset_prefix_cache(self) -> None:
        """Empty the engine's cache of prompts, as it is in a run that begins here."""
        if self.weight_sync.engine:
            self.weight_sync.engine.reset_prefix_cache()

    def drop_paused(self) -> None:
        """Have what is paused computed anew when it goes on, as in a run that is resumed."""
        if self.weight_sync.engine and self._pauses:
            self.weight_sync.engine.drop_paused()

    def begun_tensors(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        """Return the responses to groups that wait, on the rank that speaks for their replica; {} for none."""
        return begun_tensors(groups) if self._replica.leads and any(group.begun for group in groups) else {}

    def restored_groups(
        self, state: dict[str, Any], own: OwnTensors, read: ReadPrompts, vocabulary: int
    ) -> list[Group]:
        """Return the groups of a ``groups_state``, with the responses that are this replica's.

        ``state`` also has ``holders``, the ranks whose ``begun_tensors`` are in ``own``; one of an earlier version has
        the responses themselves.
        """
        if "holders" in state:
            state = with_begun(state, [own(rank, "waiting") for rank in state["holders"].tolist()])
        responses = self._context.recipe.batch.responses_per_prompt
        return groups_from_state(state, responses, read, vocabulary, self.choices, self._replica)

    @property
    def holders(self) -> list[int]:
        """The ranks that speak for their replicas."""
        return self._replica.leaders

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, taken after the step's weights were brought in.

        Of text to draft from there is nothing in it, and then no more in the engine, as in a run that is resumed.
        """
        if self.weight_sync.engine and self._section.speculative:
            self.weight_sync.engine.drop_paused()
        return {"version": self.weight_sync.version, "lengths": self._lengths}

    def load(self, state: dict[str, Any]) -> None:
        """Resume where ``state`` was taken; the ``refresh`` that must follow counts that version again."""
        checked = _STATE.validate_python(state)
        self.weight_sync.version = checked["version"] - 1
        self._lengths = list(checked["lengths"])

    def forget_journal(self, saved: int | None) -> None:
        """Delete what is kept of trajectories for a run that resumes, up to the step of a checkpoint."""
        if self._journal:
            self._journal.forget(saved)

    def close(self) -> None:
        """End the engine and the reward workers."""
        if self._scorer:
            self._scorer.close()
        if self._partner:
            self._partner.close()
        self._packing_thread.shutdown()
        self.weight_sync.close()


def _sampling_of_length(section: RolloutSection, entry: PromptLengthSection) -> SamplingOfLength:
    """Return an entry's settings, and the section's where it has none."""
    chosen = entry.model_dump()
    keys = ("top_p", "top_k", "max_response_length")
    top_p, top_k, most = (getattr(section, key) if chosen[key] is None else chosen[key] for key in keys)
    return SamplingOfLength(entry.up_to, top_p, top_k, most)


def _journal_of(context: RunContext[RLRecipe], replica: Replica) -> Journal | None:
    if not (context.recipe.keeps_journal and context.generators.here):
        return None
    return Journal(context.folder.journal, context.recipe, replica, context.generators)
