"""Rollouts as the loops see them: prompts in, scored trajectories of all replicas out; weights follow the actor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlhf_megatron.data.batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.loops.session import Session
from rlhf_megatron.models.weight_map import rollout_blocks
from rlhf_megatron.regather.execute import Regather
from rlhf_megatron.regather.plan import plan_regather
from rlhf_megatron.regather.transport import PointToPoint
from rlhf_megatron.rewards.score import ScoreItem, Scorer
from rlhf_megatron.rollout.engine import Completion, Request, Sampling
from rlhf_megatron.rollout.vllm_engine import VllmEngine
from rlhf_megatron.topology.exchange import gather_batches, gather_tensors, sum_over_ranks

Progress = Callable[[int, int], None]


def request_seed(seed: int, step: int, row: int) -> int:
    """The sampling seed of one trajectory: the same in every layout, unrelated between rows and steps."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


class Rollouts:
    """This rank's vLLM engine as one of several replicas, and the regathering that feeds it from the actor."""

    def __init__(self, session: Session) -> None:
        """Builds the engine; collective over the world."""
        recipe, section = session.recipe, session.recipe.rollout
        assert section is not None, "the recipe's own check asks for it"
        self._session, self._seed = session, recipe.seed
        self._tensor = section.layout.tensor
        self._replicas = session.world // self._tensor
        self._replica = session.rank // self._tensor
        self._leads = session.rank % self._tensor == 0
        self._scorer = Scorer(recipe.reward) if self._leads else None
        if self._scorer:
            self._scorer.check_sources(session.training.data_sources())
        self._unscored = [0, 0]
        self._tokenizer: Tokenizer = session.tokenizer
        self.version = 0
        self.sampling = Sampling(
            section.temperature,
            section.top_p,
            section.top_k,
            section.max_response_length,
            session.tokenizer.stop_token_ids,
        )
        self.engine = VllmEngine(
            recipe.model.path, section, recipe.model.dtype, recipe.data.max_prompt_length, recipe.seed
        )
        actor, architecture = session.actor, session.architecture
        copies = plan_regather(
            {rank: actor.blocks(position) for position, rank in enumerate(actor.ranks)},
            {rank: rollout_blocks(architecture, self._tensor, rank % self._tensor) for rank in range(session.world)},
            recipe.cluster.gpus_per_node,
        )
        dtype = next(iter(self.engine.parameters().values())).dtype
        self.regather = Regather(copies, session.rank, dtype, session.device, PointToPoint())

    def refresh(self) -> None:
        """Wakes the engine and brings the actor's weights into it; collective."""
        self.engine.wake_weights()
        self.regather.run(self._session.actor.parameters(), self.engine.parameters())
        self.version += 1
        self.engine.wake_kv_cache()
        self.engine.weights_updated(self.version)

    def generate(
        self, prompts: Sequence[Prompt], responses_per_prompt: int, sampling: Sampling, step: int, first_row: int = 0
    ) -> Rolled:
        """This replica's share of ``prompts``, each answered ``responses_per_prompt`` times.

        ``first_row``: how many rows this step has generated before, so that no sampling seed comes twice.
        """
        rows = [
            index * responses_per_prompt + k
            for index in range(self._replica, len(prompts), self._replicas)
            for k in range(responses_per_prompt)
        ]
        seeds = [request_seed(self._seed, step, first_row + row) for row in rows]
        requests = [
            Request(row, prompts[row // responses_per_prompt].token_ids, seed)
            for row, seed in zip(rows, seeds, strict=True)
        ]
        completions = self.engine.generate(
            requests, sampling, lambda done, total: self._session.progress("generate", done, total)
        )
        own = completions if self._leads else []
        return Rolled(own, [prompts[c.row_id // responses_per_prompt] for c in own], responses_per_prompt)

    def score(self, rolled: Rolled) -> list[float]:
        """The rewards of this replica's rows, on the rank that leads it."""
        if self._scorer is None:
            return []
        return self._scorer.score(
            [
                ScoreItem(prompt.data_source, text, prompt.ground_truth, prompt.extra_info, completion.row_id)
                for prompt, completion, text in zip(
                    rolled.prompts, rolled.completions, self.texts(rolled), strict=True
                )
            ]
        )

    def scoring_metrics(self) -> dict[str, float]:
        """How many samples since the last call got 0 because their scorer ran out of time or failed; collective."""
        counts = [self._scorer.timeouts, self._scorer.failures] if self._scorer else [0, 0]
        new = [count - before for count, before in zip(counts, self._unscored, strict=True)]
        self._unscored = counts
        timeouts, failures = sum_over_ranks(new)
        return {"reward/timeouts": timeouts, "reward/failures": failures}

    def texts(self, rolled: Rolled) -> list[str]:
        """The responses in words, without special tokens."""
        return [self._tokenizer.decode(completion.token_ids) for completion in rolled.completions]

    def state(self) -> dict[str, Any]:
        """For a checkpoint, taken after the step's weights were brought in."""
        return {"version": self.version}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken; the ``refresh`` that must follow counts that version again."""
        self.version = int(state["version"]) - 1

    def close(self) -> None:
        """Ends the engine and the reward workers."""
        if self._scorer:
            self._scorer.close()
        self.engine.close()


class Rolled:
    """What one replica generated, before it is brought together with the others."""

    def __init__(self, completions: list[Completion], prompts: list[Prompt], responses_per_prompt: int) -> None:
        self.completions, self.prompts, self._responses_per_prompt = completions, prompts, responses_per_prompt

    def gather(self, rewards: Sequence[float]) -> RolloutBatch:
        """All replicas' rows as one batch on every rank, with their rewards; collective."""
        completions = self.completions
        batch = batch_from_rows(
            [prompt.token_ids for prompt in self.prompts],
            [completion.token_ids for completion in completions],
            [completion.logprobs for completion in completions],
            group_id=[completion.row_id // self._responses_per_prompt for completion in completions],
            row_id=[completion.row_id for completion in completions],
            weight_version=[completion.weight_version for completion in completions],
            truncated=[completion.finish_reason == "length" for completion in completions],
            rewards=rewards,
        )
        return gather_batches(batch)


def gather_scores(rolled: Rolled, rewards: Sequence[float]) -> dict[int, float]:
    """Row id -> reward over all replicas, on every rank; collective."""
    rows = torch.tensor([completion.row_id for completion in rolled.completions], dtype=torch.int64)
    gathered_rows = torch.cat(gather_tensors(rows)).tolist()
    gathered = torch.cat(gather_tensors(torch.tensor(list(rewards), dtype=torch.float64))).tolist()
    return dict(zip(gathered_rows, gathered, strict=True))
