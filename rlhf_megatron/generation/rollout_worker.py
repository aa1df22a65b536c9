"""Rollouts as the loops see them: groups in, scored trajectories of all replicas out; weights follow the actor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.generation.conversations import Conversations, TurnFunction
from rlhf_megatron.generation.prompt_groups import Group, groups_left, requests_for
from rlhf_megatron.generation.rolled import Packing, Rolled
from rlhf_megatron.generation.scoring import GroupScoring
from rlhf_megatron.loops.session import Session
from rlhf_megatron.models.architecture import check_generates
from rlhf_megatron.recipe import role_ranks
from rlhf_megatron.recipe.world_checks import roles_made
from rlhf_megatron.regather.execute import Regather
from rlhf_megatron.regather.learned_rollout import check_engine, learned_rollout_blocks
from rlhf_megatron.regather.peer_memory import describe_transfer, map_peers
from rlhf_megatron.regather.plan import RankPlan, plan_regather
from rlhf_megatron.regather.shard_specs import rollout_shards
from rlhf_megatron.regather.views import describe_sharing, shareable
from rlhf_megatron.rewards.score import Scorer, reward_metrics, reward_totals
from rlhf_megatron.rollout.engine import Completion, GenerationRecord, Sampling, request_seed
from rlhf_megatron.rollout.response_lengths import LATEST
from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine
from rlhf_megatron.rollout.work_queue import WorkQueues
from rlhf_megatron.topology.exchange import gather_objects, sum_over_ranks
from rlhf_megatron.topology.team import world_of_their_own

_Count = Annotated[int, Field(ge=0, le=2**53)]


class _State(TypedDict):
    """What a checkpoint has of the rollouts."""

    version: _Count
    lengths: list[_Count]


_STATE = TypeAdapter(_State)


class Rollouts:
    """This rank's vLLM engine as one of several replicas, and the regathering that feeds it from the actor."""

    def __init__(self, session: Session) -> None:
        """Builds the engine; collective over the world."""
        recipe, section = session.recipe, session.recipe.rollout
        assert section is not None, "the recipe's own check asks for it"
        self._session, self._seed, self._team = session, recipe.seed, session.generators
        ranks, tensor = role_ranks(recipe, "rollout", session.world), section.layout.tensor
        self._replicas = len(ranks) // tensor
        # None: this rank generates nothing.
        self._replica = ranks.index(session.rank) // tensor if session.rank in ranks else None
        self._leads = self._replica is not None and ranks.index(session.rank) % tensor == 0
        self._office = WorkQueues(section.scheduling, self._replica or 0, self._replicas)
        self._discards = section.partial == "discard"
        self._packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="packing")
        self._scorer = Scorer(recipe.reward) if self._leads else None
        if self._scorer:
            held_out = (prompt.data_source for prompt in session.validation or [])
            self._scorer.check_sources(dict.fromkeys([*session.train.data_sources(), *held_out]))
        self._turns = section.multi_turn
        self._turn_function = TurnFunction(self._turns) if self._turns and self._leads else None
        judge = recipe.reward_model
        self._reward_model = session.make_reward_model(judge) if judge else None
        self.version = 0
        self._lengths: list[int] = []  # of the latest responses of all replicas
        self.sampling = Sampling(
            section.temperature,
            section.top_p,
            section.top_k,
            section.max_response_length,
            () if section.drawn_lengths else session.tokenizer.stop_token_ids,
        )
        self._drawn_lengths = section.drawn_lengths
        check_generates(session.architecture, recipe.model.path)
        learned = learned_rollout_blocks(
            session.architecture,
            recipe.model.path,
            ranks,
            tensor,
            section.layout.expert_parallel,
            section.dtype or recipe.model.dtype,
            recipe.run_root,
        )
        wanted = rollout_shards(session.architecture, tensor, ranks, section.layout.expert_parallel, learned)
        plan = plan_regather(session.actor.side(), wanted, session.rank, recipe.cluster.gpus_per_node)
        why_copied = recipe.why_weights_are_copied
        actors = {} if why_copied else session.actor.parameters()
        shared = {name: actors[source] for name, source in shareable(plan).items()} if actors else {}
        self.engine: VllmEngine | None = None
        with session.phase("engine"):
            with world_of_their_own(ranks):
                if self._replica is not None:
                    self.engine = VllmEngine(
                        recipe.model.path,
                        section,
                        recipe.model.dtype,
                        recipe.data.max_prompt_length,
                        recipe.seed,
                        shared=shared,
                    )
            dist.barrier()  # engines compile at different speeds, and the wait for the slowest is the engines' time
        if learned is not None:
            blocks = learned[ranks.index(session.rank) % tensor] if self.engine else None
            names = list(self.engine.parameters()) if self.engine else []
            check_engine(session.architecture, blocks, names, recipe.model.path)
        if self.engine:
            sharing = f"all are copies, since {why_copied}" if why_copied else None
            session.say(f"rollout weights: {sharing or describe_sharing(plan, actors, self.engine.parameters())}")
        roles = [role_ranks(recipe, name, session.world) for name in roles_made(recipe)]
        # Ahead of learning, the reward model judges and the engine generates by turns, without a time for sleep.
        self._sleeps = not recipe.rollout_is_ahead and not set(ranks).isdisjoint(itertools.chain(*roles))
        self.regather = self._make_regather(plan)

    def _make_regather(self, plan: RankPlan) -> Regather:
        """What carries out ``plan``, by the way that the machine and the recipe allow; collective over the world."""
        session, recipe, section = self._session, self._session.recipe, self._session.recipe.rollout
        assert section is not None
        source_dtype = getattr(torch, recipe.model.dtype)
        dtype = getattr(torch, section.dtype or recipe.model.dtype)
        # What leaves the GPU comes back elsewhere, and numbers that are to be cast travel better when they have been.
        stays = dtype == source_dtype and not recipe.actor.offload.parameters
        peers = map_peers(plan, session.actor.parameters()) if recipe.regather.peer_memory and stays else None
        if peers:
            session.at_end(peers.close)
        if plan.receives:
            session.say(f"regathering: {describe_transfer(plan, peers, dtype)}")
        elif not self.engine:  # where rank 0 has one, that line is its own
            given = plan.bytes_sent(dtype.itemsize) / 1e9
            session.say(f"regathering: {given:.3g} GB go to the rollout's ranks {section.ranks}, from rank 0")
        return Regather(
            plan,
            dtype,
            session.device,
            staging_bytes=recipe.regather.buffer_mb << 20,
            source_dtype=source_dtype,
            peers=peers,
        )

    def refresh(self) -> None:
        """Wakes the engine and brings the actor's weights into it; collective over the world.

        Shared ones are there already: an optimizer step returns when its parameters are whole on every rank.
        """
        if self.engine:
            with self._session.span("wake"):
                self.engine.wake_weights()
        sources, destinations = self._session.actor.parameters(), self.engine.parameters() if self.engine else {}
        with self._session.span("transfer"):
            self.regather.run(sources, destinations)
        self.version += 1
        every = self._session.recipe.regather.verify
        if every and self.version % every == 0:
            self.regather.verify(sources, destinations)
        self._session.actor.offload()
        if self.engine:
            with self._session.span("wake"):
                self.engine.wake_kv_cache()
            self.engine.weights_updated(self.version)

    def sleep(self) -> None:
        """Gives the engine's memory to the roles that are on its GPUs, until ``refresh``."""
        if self.engine and self._sleeps:
            self.engine.sleep()

    def reset_prefix_cache(self) -> None:
        """Empties the engine's cache of prompts, as it is in a run that begins here."""
        if self.engine:
            self.engine.reset_prefix_cache()

    def generate(
        self,
        groups: Sequence[Group],
        responses_per_prompt: int,
        sampling: Sampling,
        step: int,
        first_row: int = 0,
        wanted: int | None = None,
    ) -> Rolled:
        """What this replica answers of ``groups``, each with ``responses_per_prompt``, and is being scored.

        Collective over the team that generates; elsewhere nothing.

        With ``wanted``, so many groups are enough: what else has begun or finished by then is left for another time.
        ``first_row``: how many rows this step has generated before, so that no sampling seed comes twice.
        """
        whole = [index for index, group in enumerate(groups) if group.whole() == responses_per_prompt]
        lacking = None if wanted is None else max(wanted - len(whole), 0)
        packing = Packing(self._packer, groups)
        conversations = self._conversations(groups, responses_per_prompt)
        scoring = GroupScoring(
            self._scorer,
            groups,
            responses_per_prompt,
            self._session.tokenizer,
            on_group=packing.begin,
            conversations=conversations,
        )
        for index in whole[:wanted]:
            if index % self._replicas == self._replica:
                scoring.submit_if_whole(index)
        requests = requests_for(
            groups,
            responses_per_prompt,
            sampling.max_tokens,
            lambda row: request_seed(self._seed, step, first_row + row),
        )
        if self._drawn_lengths:
            requests = [
                dataclasses.replace(request, max_tokens=self._drawn_lengths.of_row(first_row + request.row_id))
                for request in requests
            ]
        completions, record = list[Completion](), GenerationRecord()
        if self.engine:
            # What a replica has learned itself would be gone after a resume, and other groups would be admitted.
            self.engine.expect(self._lengths)
            completions = self.engine.generate(
                requests,
                sampling,
                lambda done, total: self._session.progress("generate", done, total),
                scoring.take,
                self._office.open(len({request.group_id for request in requests}), lacking),
                conversations,
            )
            record = self.engine.record
        chosen, left = list(range(len(groups))), list[Group]()
        if not self._team.here:
            return Rolled(groups, chosen, left, scoring, packing, record, conversations)
        with self._session.span("wait"):  # else rank 0 would time a slower replica as scoring
            dist.barrier(self._team.group)
        if wanted is not None:
            finished = {index for part in gather_objects(scoring.submitted(), self._team.group) for index in part}
            chosen = sorted(finished.union(whole))[:wanted]
            own = completions if self._leads else []
            left = groups_left(groups, chosen, own, responses_per_prompt, self._discards, self._team.group)
        return Rolled(groups, chosen, left, scoring, packing, record, conversations)

    def _conversations(self, groups: Sequence[Group], responses_per_prompt: int) -> Conversations | None:
        """Who speaks between turns, where responses have several."""
        if self._turns is None:
            return None
        repeatable = self._session.recipe.rollout_repeats
        return Conversations(
            self._turns, self._turn_function, groups, responses_per_prompt, self._session.tokenizer, repeatable
        )

    def gather(self, rolled: Rolled) -> RolloutBatch:
        """All replicas' rows as one batch with their rewards, the reward model's included.

        Collective over the team that generates, and the same on its every rank; elsewhere without rows. Waits for the
        last score. A reward is NaN where the row is to be left out of the loss.
        """
        if not self._team.here:
            return batch_from_rows([], [], [])
        batch = rolled.gather(self._team.group)
        self._lengths = [*self._lengths, *batch.completion_lengths.tolist()][-LATEST:]
        section = self._session.recipe.reward_model
        if self._reward_model is None or section is None:
            return batch
        conversations = [rolled.asked[group].messages for group in batch.group_id.tolist()]
        of_model = self._reward_model.scores(batch, conversations)
        rolled.add(of_model, batch.row_id, section.weight)
        return batch.with_fields(rewards=batch.rewards + section.weight * of_model)

    def scoring_metrics(self, rolled: Sequence[Rolled]) -> dict[str, float]:
        """What became of the samples of these calls, and the mean of each part of the reward; collective."""
        scores = [score for each in rolled for score in each.scores()]
        totals = reward_totals(scores, self._session.recipe.reward_names)
        return reward_metrics(dict(zip(totals, sum_over_ranks(list(totals.values()), self._team.group), strict=True)))

    def generation_metrics(self, rolled: Sequence[Rolled]) -> dict[str, float]:
        """What replicas did in these calls; collective.

        ``rollout/replica_imbalance`` is how long the slowest generated, over the mean of all, 1 at best.
        """
        records = [each.record if self._leads else GenerationRecord() for each in rolled]
        counts: tuple[str, ...] = ("sampled_tokens", "aborted", "resumed")
        own = [float(sum(getattr(record, name) for record in records)) for name in counts]
        if self._turns:
            of_turns = [each.conversations.counts for each in rolled if each.conversations and self._leads]
            counts += ("turn_answers", "turn_ends", "turn_failures")
            own += [float(sum(getattr(of, name) for of in of_turns)) for name in ("answers", "ended", "failed")]
        seconds = torch.zeros(len(rolled), self._replicas, dtype=torch.float64)
        if self._leads:
            seconds[:, self._replica] = torch.tensor([record.seconds for record in records])
        total = sum_over_ranks([*own, *seconds.flatten().tolist()], self._team.group)
        metrics = {f"rollout/{name}": value for name, value in zip(counts, total, strict=False)}
        seconds = torch.tensor(total[len(counts) :]).view_as(seconds)
        mean = float(seconds.mean(1).sum())
        return metrics | {"rollout/replica_imbalance": float(seconds.amax(1).sum()) / mean if mean else 1.0}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, taken after the step's weights were brought in."""
        return {"version": self.version, "lengths": self._lengths}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken; the ``refresh`` that must follow counts that version again."""
        checked = _STATE.validate_python(state)
        self.version = checked["version"] - 1
        self._lengths = list(checked["lengths"])

    def close(self) -> None:
        """Ends the engine and the reward workers."""
        if self._scorer:
            self._scorer.close()
        if self._turn_function:
            self._turn_function.close()
        self._packer.shutdown()
        if self.engine:
            self.engine.close()
