"""One rank's part of the rollout: groups of prompts in, scored trajectories of all replicas out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from rlhf_megatron.data.expert_choices import ChoiceShape
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.generation.conversations import Conversations, TurnFunction
from rlhf_megatron.generation.generated_groups import GeneratedGroups, GroupPacker, GroupScoring
from rlhf_megatron.generation.generation_metrics import generation_metrics, scoring_metrics
from rlhf_megatron.generation.prompt_groups import Group, groups_left, requests_for
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.generation.weight_sync import WeightSync
from rlhf_megatron.recipe import RLRecipe
from rlhf_megatron.rewards.score import Scorer
from rlhf_megatron.roles.reward_model import RewardModel
from rlhf_megatron.rollout.engine import Completion, GenerationRecord, Request, Sampling, request_seed
from rlhf_megatron.rollout.response_lengths import LATEST
from rlhf_megatron.rollout.work_queue import WorkQueues
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.exchange import gather_objects

_Count = Annotated[int, Field(ge=0, le=2**53)]


class _State(TypedDict):
    """The rollout's part of a checkpoint."""

    version: _Count
    lengths: list[_Count]


_STATE = TypeAdapter(_State)


class RolloutWorker:
    """Generates this rank's share of each step's responses, and brings all shares together.

    Attributes:
        sampling: how the recipe draws tokens.
        weight_sync: this rank's engine, and its weights.
        choices: of experts, where the actor replays the rollout's.
    """

    def __init__(
        self,
        context: RunContext[RLRecipe],
        replica: Replica,
        tokenizer: Tokenizer,
        weight_sync: WeightSync,
        scorer: Scorer | None,
        turn_function: TurnFunction | None,
        reward_model: RewardModel | None,
        choices: ChoiceShape | None = None,
    ) -> None:
        """``scorer`` and, where responses have several turns, ``turn_function`` are on the rank that leads a replica;
        ``reward_model`` is on all that generate, if the recipe has one. ``choices``: of experts, where batches have
        them."""
        self.choices = choices
        section = context.recipe.rollout
        self._context, self._team, self._replica = context, context.generators, replica
        self._section, self._tokenizer, self.weight_sync = section, tokenizer, weight_sync
        self._scorer, self._turn_function, self._reward_model = scorer, turn_function, reward_model
        self._queues = WorkQueues(section.scheduling, replica.index or 0, replica.count)
        self._packing_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="packing")
        self._lengths: list[int] = []  # of the latest responses of all replicas
        self.sampling = Sampling(
            section.temperature,
            section.top_p,
            section.top_k,
            section.max_response_length,
            () if section.drawn_lengths else tokenizer.stop_token_ids,
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
        """Answers this replica's share of ``groups``, each with ``responses_per_prompt``; scores are on their way.

        Collective over the team that generates; elsewhere nothing.

        With ``wanted``, that many groups are enough: others begun or finished by then are left for a later call.
        ``first_row``: how many rows this step has generated before, so that no sampling seed comes twice.
        ``for_training``: what only training reads goes with the rows.
        """
        whole = [index for index, group in enumerate(groups) if group.whole() == responses_per_prompt]
        packer = GroupPacker(self._packing_thread, groups, self.choices if for_training else None)
        conversations = self._conversations(groups, responses_per_prompt)
        scoring = GroupScoring(
            self._scorer,
            groups,
            responses_per_prompt,
            self._tokenizer,
            on_group=packer.begin,
            conversations=conversations,
        )
        for index in whole[:wanted]:
            if self._replica.owns(index):
                scoring.submit_if_whole(index)
        requests = self._requests(groups, responses_per_prompt, sampling, step, first_row)
        lacking = None if wanted is None else max(wanted - len(whole), 0)
        completions, record = self._run_engine(requests, sampling, scoring, conversations, lacking)
        chosen, left = list(range(len(groups))), list[Group]()
        if self._team.here:
            with self._context.span("wait"):  # else rank 0 would time a slower replica as scoring
                dist.barrier(self._team.group)
            if wanted is not None:
                submitted = gather_objects(scoring.submitted(), self._team.group)
                chosen = sorted({index for part in submitted for index in part}.union(whole))[:wanted]
                own, discards = completions if self._replica.leads else [], self._section.partial == "discard"
                left = groups_left(groups, chosen, own, responses_per_prompt, discards, self._team.group)
        return GeneratedGroups(groups, chosen, left, scoring, packer, record, conversations)

    def _requests(
        self, groups: Sequence[Group], responses_per_prompt: int, sampling: Sampling, step: int, first_row: int
    ) -> list[Request]:
        """The requests for ``groups``, each row with a seed, and perhaps a length, of its own."""
        seed, drawn_lengths = self._context.recipe.seed, self._section.drawn_lengths
        requests = requests_for(
            groups, responses_per_prompt, sampling.max_tokens, lambda row: request_seed(seed, step, first_row + row)
        )
        if not drawn_lengths:
            return requests
        return [
            dataclasses.replace(request, max_tokens=drawn_lengths.of_row(first_row + request.row_id))
            for request in requests
        ]

    def _run_engine(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        scoring: GroupScoring,
        conversations: Conversations | None,
        wanted: int | None,
    ) -> tuple[list[Completion], GenerationRecord]:
        """(what this replica has answered of the requests, what its engine did); nothing on ranks without one."""
        engine = self.weight_sync.engine
        if engine is None:
            return [], GenerationRecord()
        # What a replica has learned itself would be gone after a resume, and other groups would be admitted.
        engine.expect(self._lengths)
        completions = engine.generate(
            requests,
            sampling,
            lambda done, total: self._context.progress("generate", done, total),
            scoring.take,
            self._queues.open(len({request.group_id for request in requests}), wanted),
            conversations,
        )
        return completions, engine.record

    def _conversations(self, groups: Sequence[Group], responses_per_prompt: int) -> Conversations | None:
        """The turns of these groups, where responses have several."""
        section, repeatable = self._section.multi_turn, self._context.recipe.rollout_repeats
        if section is None:
            return None
        return Conversations(section, self._turn_function, groups, responses_per_prompt, self._tokenizer, repeatable)

    def gather(self, generated: GeneratedGroups) -> RolloutBatch:
        """Returns all replicas' rows as one batch with their rewards, the reward model's included.

        Collective over the team that generates, and the same on its every rank; elsewhere without rows. Waits for the
        last score. A reward is NaN where the row is to be left out of the loss.
        """
        if not self._team.here:
            return batch_from_rows([], [], [])
        batch = generated.gather(self._team.group)
        self._lengths = [*self._lengths, *batch.completion_lengths.tolist()][-LATEST:]
        section = self._context.recipe.reward_model
        if self._reward_model is None or section is None:
            return batch
        return generated.with_model_scores(batch, self._reward_model, section.weight)

    def generation_metrics(self, calls: Sequence[GeneratedGroups]) -> dict[str, float]:
        """Returns what replicas did in these calls; collective over the team."""
        turns = None
        if self._section.multi_turn:
            turns = [generated.conversations.counts for generated in calls if generated.conversations]
        return generation_metrics([generated.record for generated in calls], turns, self._replica, self._team)

    def scoring_metrics(self, calls: Sequence[GeneratedGroups]) -> dict[str, float]:
        """Returns the scoring outcomes of these calls, and the parts of their rewards; collective."""
        scores = [score for generated in calls for score in generated.scores()]
        return scoring_metrics(scores, self._context.recipe.reward_names, self._team)

    def reset_prefix_cache(self) -> None:
        """Empties the engine's cache of prompts, as it is in a run that begins here."""
        if self.weight_sync.engine:
            self.weight_sync.engine.reset_prefix_cache()

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, taken after the step's weights were brought in."""
        return {"version": self.weight_sync.version, "lengths": self._lengths}

    def load(self, state: dict[str, Any]) -> None:
        """Resumes where ``state`` was taken; the ``refresh`` that must follow counts that version again."""
        checked = _STATE.validate_python(state)
        self.weight_sync.version = checked["version"] - 1
        self._lengths = list(checked["lengths"])

    def close(self) -> None:
        """Ends the engine and the reward workers."""
        if self._scorer:
            self._scorer.close()
        if self._turn_function:
            self._turn_function.close()
        self._packing_thread.shutdown()
        self.weight_sync.close()
