"""Dynamic sampling and the overlong penalty: which groups a step gets, in how many rounds, what becomes of others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lessons import spread_alone
from rlhf_megatron.algorithms.filters import informative_rows, overlong_penalty
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import batch_from_rows, concatenate
from rlhf_megatron.data.row_numbers import SpreadRows
from rlhf_megatron.errors import UserError
from rlhf_megatron.generation.batch_source import BatchSource, Collector
from rlhf_megatron.generation.prompt_groups import Group, begun_tensors, groups_from_state, with_begun
from rlhf_megatron.generation.waiting_rows import OwnTensors
from rlhf_megatron.recipe import RLRecipe, RolloutSection
from rlhf_megatron.rollout.engine import Sampling
from rlhf_megatron.topology.team import Team

RECIPE: dict[str, Any] = {
    "name": "filtered",
    "loop": "rl",
    "steps": 1,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 8},
    "batch": {"prompts_per_step": 2, "responses_per_prompt": 2},
    "actor": {"tokens_per_gpu": 64, "optimizer": {"learning_rate": 1e-3}},
    "reference": None,
    "rollout": {"max_response_length": 10},
    "algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 3}},
}


def test_groups_of_one_value_are_not_informative() -> None:
    values = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, 0.0, 0.0])
    groups = torch.tensor([4, 9, 4, 9, 2, 7, 7])
    assert informative_rows(values, groups).tolist() == [False, True, False, True, False, False, False]


def test_overlong_penalty_of_the_paper() -> None:
    # arXiv 2503.14476, eq. 13 and section 4.1: limit 20480, buffer 4096.
    lengths = torch.tensor([1, 16384, 17408, 18432, 20480, 30000])
    assert overlong_penalty(lengths, 20480, 4096, 1.0).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, 20480, 4096, 0.5).tolist() == [0.0, 0.0, -0.125, -0.25, -0.5, -0.5]
    with pytest.raises(ValueError, match=r"overlong_buffer\.len=11 must be from 1 to 10"):
        overlong_penalty(lengths, 10, 11, 1.0)


def test_joined_batches_are_their_rows() -> None:
    one = batch_from_rows([[1], [2, 3]], [[4, 5], [6]], rewards=[0.5, 1.0])
    two = batch_from_rows([[7]], [[8]], rewards=[2.0])
    joined = concatenate([one, two])
    assert joined.tokens.tolist() == [1, 4, 5, 2, 3, 6, 7, 8]
    assert joined.cu_seqlens.tolist() == [0, 3, 6, 8]
    assert joined.rewards.tolist() == [0.5, 1.0, 2.0]
    assert joined.select([2]).tokens.tolist() == [7, 8]
    assert joined.select(range(joined.rows)) is joined
    with pytest.raises(ValueError, match="different fields"):
        concatenate([one, two.with_fields(scores=two.rewards)])


class Answers:
    """In the place of the engines: prompt n is answered with tokens n, n and rewards as given; keeps the first rows."""

    def __init__(self, rewards: list[tuple[float, float]]) -> None:
        self.rewards, self.first_rows, self.version = rewards, list[int](), 1
        self.sampling, self.choices = Sampling(1.0, 1.0, -1, 10, ()), None
        self.has_turn_rewards = False

    def generate(
        self, groups: list[Group], responses: int, sampling: Any, step: int, first_row: int, wanted: int | None
    ) -> Any:
        self.first_rows.append(first_row)
        left = groups[wanted:] if wanted else []
        prompts = [group.prompt.row for group in groups[:wanted]]
        rows = [(prompt, k) for prompt in prompts for k in range(responses)]
        batch = batch_from_rows(
            [[prompt] for prompt, _ in rows],
            [[prompt] * (8 + k) for prompt, k in rows],
            group_id=[index // responses for index in range(len(rows))],
            rewards=[self.rewards[prompt][k] for prompt, k in rows],
        )
        return SimpleNamespace(batch=batch, tokens=len(batch.tokens), asked=groups, left=left)

    replicas = 1

    holders = (0,)

    def drop_paused(self) -> None:
        pass

    def begun_tensors(self, groups: list[Group]) -> dict[str, torch.Tensor]:
        return begun_tensors(groups)

    def restored_groups(self, state: dict[str, Any], own: OwnTensors, read: Any, vocabulary: int) -> list[Group]:
        return groups_from_state(with_begun(state, [own(0, "waiting")]) if state else {}, 2, read, vocabulary)

    def gather(self, generated: Any) -> SpreadRows:
        return spread_alone(generated.batch)

    def scoring_metrics(self, calls: Any) -> dict[str, float]:
        right = torch.cat([generated.batch.rewards for generated in calls]).mean().item()
        return {"reward/timeouts": 0.0, "reward/right": right}

    def generation_metrics(self, calls: Any) -> dict[str, float]:
        return {"rollout/sampled_tokens": 100.0}


class Run:
    """As much of a run's context and data as collecting needs."""

    def __init__(self, **algorithm: Any) -> None:
        settings = {"algorithm": algorithm or RECIPE["algorithm"], "monitor": {"rollouts": {"every": 0}}}
        self.recipe = RLRecipe(**RECIPE | settings)
        self._next = 0
        self.said: list[str] = []
        self.generators, self.rank = Team((0,)), 0

    def metrics(self) -> dict[str, float]:
        return {"data/epoch": float(self._next)}

    def take_wait(self) -> dict[str, float]:
        return {"perf/data_loading_time_ms": 0.0}

    def say(self, line: str) -> None:
        self.said.append(line)

    def read(self, places: list[tuple[int, int]]) -> list[Prompt]:
        return [Prompt(row, "source", (row,), "", {}) for _, row in places]

    def draw(self, count: int) -> list[Prompt]:
        self._next += count
        return [Prompt(row, "source", (row,), "", {}) for row in range(self._next - count, self._next)]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def seconds(self, phase: str) -> float:
        return 1.0


def prompts_of(rows: SpreadRows) -> list[int]:
    return rows.held.tokens[rows.held.cu_seqlens[:-1]].tolist()


EQUAL, MIXED = (1.0, 1.0), (0.0, 1.0)


def collector(rewards: list[tuple[float, float]], **algorithm: Any) -> Any:
    run: Any = Run(**algorithm)
    return Collector(run, Answers(rewards), run, vocabulary=100)  # type: ignore[arg-type]


def filters(**settings: Any) -> dict[str, Any]:
    return {"filter_groups": {"enable": True, "max_num_gen_batches": 3, **settings}}


def test_without_filtering_every_group_is_taken() -> None:
    batch, metrics, tokens = collector([EQUAL, EQUAL], kl_coef=0.0).collect(1)
    assert prompts_of(batch) == [0, 0, 1, 1]
    assert metrics["reward/informative_group_fraction"] == 0.0
    assert "rollout/rounds" not in metrics
    assert tokens == batch.numbers.tokens


def test_rounds_go_on_until_the_batch_is_full() -> None:
    made = collector([EQUAL, MIXED, EQUAL, EQUAL, MIXED, MIXED], **filters())
    batch, metrics, tokens = made.collect(1)
    assert prompts_of(batch) == [1, 1, 4, 4]
    assert batch.numbers.group_id.tolist() == [0, 0, 1, 1]
    assert batch.numbers.row_id.tolist() == [0, 1, 2, 3]
    assert made._worker.first_rows == [0, 4, 8], "no sampling seed comes twice"
    assert metrics["rollout/rounds"] == 3
    assert metrics["rollout/groups"] == 2
    assert metrics["rollout/groups_dropped"] == 3
    assert metrics["rollout/groups_surplus"] == 1
    assert metrics["reward/mean"] == 0.75, "of everything that was generated"
    assert tokens == 3 * 2 * (9 + 10), "what is dropped was generated too"


def test_surplus_groups_wait_for_the_next_step() -> None:
    made = collector([MIXED] * 3 + [EQUAL, MIXED, MIXED], **filters(prompts_per_round=3, keep_surplus=True))
    first, metrics, _ = made.collect(1)
    assert (prompts_of(first), metrics["rollout/groups_surplus"]) == ([0, 0, 1, 1], 1)
    second, metrics, _ = made.collect(2)
    assert prompts_of(second) == [2, 2, 4, 4]
    assert (metrics["rollout/groups_carried_over"], metrics["rollout/groups_dropped"]) == (1, 1)
    assert metrics["rollout/groups_surplus"] == 1


def test_groups_that_were_given_up_come_first_in_the_next_step() -> None:
    made = collector([MIXED] * 20, kl_coef=0.0)
    made._context.recipe = made._context.recipe.model_copy(
        update={"rollout": RolloutSection(max_response_length=10, oversample=1.6, partial="resume")}
    )
    first, metrics, _ = made.collect(1)
    assert (prompts_of(first), metrics["rollout/groups_waiting"]) == ([0, 0, 1, 1], 2)
    assert made._context._next == 4, "1.6 times 2, whole groups"
    saved, made_own = made.state(), own_of(made)
    again = collector([MIXED] * 20, kl_coef=0.0)
    again._context = again._train = made._context
    again.load(saved, made_own)
    for which in (made, again):
        made._context._next = 4
        second, metrics, _ = which.collect(2)
        assert prompts_of(second) == [2, 2, 3, 3], "of the data no row comes twice or is lost"
        assert metrics["rollout/groups_waiting"] == 2
        assert made._context._next == 6


def test_baselines_are_of_the_prompts_that_are_trained_on() -> None:
    made = collector([(0.1 * row, 1.0) for row in range(8)], advantage="remax")
    update = {"rollout": RolloutSection(max_response_length=10, oversample=1.5)}
    made._context.recipe = made._context.recipe.model_copy(update=update)
    for expected in ([0.0, 0.0, 0.1, 0.1], [0.2, 0.2, 0.3, 0.3]):
        batch, metrics, tokens = made.collect(1)
        assert batch.numbers.baseline_rewards.tolist() == pytest.approx(expected), "of each prompt's first response"
        assert metrics["reward/right"] == pytest.approx(metrics["reward/mean"]), "of what was sampled alone"
        assert tokens == 2 * (9 + 10 + 9), "what it is compared with was generated too"


def test_groups_that_wait_are_dropped_where_rewards_are_made_in_another_way_now() -> None:
    settings = filters(prompts_per_round=3, keep_surplus=True)
    made = collector([MIXED] * 9, **settings)
    made.collect(1)
    penalized = settings | {"overlong_buffer": {"enable": True, "len": 2, "penalty_factor": 1.0}}
    for algorithm, kept in ((settings, 1), (penalized, 0), (settings | {"advantage": "remax"}, 0)):
        again = collector([MIXED] * 9, **algorithm)
        again.load(made.state(), own_of(made))
        assert again.collect(2)[1]["rollout/groups_carried_over"] == kept
        assert bool(again._context.said) != bool(kept)


def test_staleness_is_that_of_the_rows_that_are_trained_on() -> None:
    made = collector([MIXED] * 4, kl_coef=0.0)
    made._worker.version = 3
    generate = made._worker.generate

    def of_several_versions(*arguments: Any) -> Any:
        generated = generate(*arguments)
        generated.batch = generated.batch.with_fields(weight_version=torch.tensor([3, 3, 2, 0]))
        return generated

    made._worker.generate = of_several_versions
    _, metrics, _ = supply_of(made).take(1)
    assert (metrics["rollout/staleness_mean"], metrics["rollout/staleness_max"]) == (1.0, 3.0)


def own_of(saved: Any) -> OwnTensors:
    """Return the tensors of one rank as a checkpoint gives them back."""
    tensors = saved.own_tensors()

    def own(rank: int, prefix: str) -> dict[str, torch.Tensor]:
        assert rank == 0
        begin = f"{prefix}/"
        return {name.removeprefix(begin): value for name, value in tensors.items() if name.startswith(begin)}

    return own


def supply_of(made: Any) -> BatchSource:
    return BatchSource(made._context, made, made._worker)


def ahead_of(rewards: list[tuple[float, float]], **changes: Any) -> BatchSource:
    """Return the batch source of a run whose rollout is a step ahead."""
    made = collector(rewards, kl_coef=0.0, rollout_correction={"type": "tis"})
    section = made._context.recipe.rollout.model_copy(update={"steps_ahead": 1})
    made._context.recipe = made._context.recipe.model_copy(update={"rollout": section, "steps": 9} | changes)
    return supply_of(made)


def test_what_was_collected_ahead_is_what_the_next_step_gets() -> None:
    source = ahead_of([MIXED] * 8)
    assert prompts_of(source.take(1).rows) == [0, 0, 1, 1]
    source.prepare(2)
    source._weight_sync.version = 2  # the actor has learned meanwhile
    batch, metrics, tokens = source.take(2)
    assert prompts_of(batch) == [2, 2, 3, 3] and tokens == batch.numbers.tokens
    assert (metrics["rollout/staleness_mean"], metrics["data/epoch"]) == (2.0, 4.0)
    assert prompts_of(source.take(3).rows) == [4, 4, 5, 5], "nothing was collected ahead of this one"
    source.prepare(10)
    assert source.state()["ahead"] == {}, "the run has no such step"


def test_what_was_collected_ahead_outlives_a_run() -> None:
    source = ahead_of([MIXED] * 8)
    source.take(1)
    source.prepare(2)
    goes_on = ahead_of([MIXED] * 8)
    goes_on.load(source.state(), own_of(source))
    expected, found = source.take(2), goes_on.take(2)
    assert found.metrics == expected.metrics and found.tokens == expected.tokens
    for field in ("tokens", "cu_seqlens", "rewards", "group_id", "weight_version"):
        assert torch.equal(getattr(found.rows.here(), field), getattr(expected.rows.here(), field))


def test_what_was_collected_ahead_is_dropped_where_it_is_not_to_be_learnt_from() -> None:
    source = ahead_of([MIXED] * 8)
    source.take(1)
    source.prepare(2)
    state, own = source.state(), own_of(source)
    assert prompts_of(source.take(2, skips_data=True).rows) == [4, 4, 5, 5]
    in_step = supply_of(collector([MIXED] * 8, kl_coef=0.0))
    in_step.load(state, own)
    assert "rollout.steps_ahead is 0 now" in in_step._context.said[0]  # type: ignore[attr-defined]
    assert prompts_of(in_step.take(2).rows) == [0, 0, 1, 1]
    without = {name: value for name, value in state.items() if name != "ahead"}
    in_step.load(without, own)  # of a version that collected nothing ahead


def test_after_the_last_round_it_trains_on_what_there_is_or_stops() -> None:
    rewards = [EQUAL, EQUAL, EQUAL, MIXED, EQUAL, EQUAL]
    batch, metrics, _ = collector(rewards, **filters()).collect(1)
    assert (prompts_of(batch), metrics["rollout/groups"]) == ([3, 3], 1)
    nothing, metrics, _ = collector([EQUAL] * 6, **filters()).collect(1)
    assert (nothing.rows, metrics["rollout/groups"]) == (0, 0)
    stopped = r"step 5: 1 of 2 groups teach something after .*max_num_gen_batches=3 rounds; "
    with pytest.raises(UserError, match=stopped):
        collector(rewards, **filters(when_exhausted="stop")).collect(5)


@pytest.mark.parametrize(("metric", "kept"), [("accuracy", []), ("reward", [0, 0, 1, 1])])
def test_penalties_count_as_differences_only_if_asked(metric: str, kept: list[int]) -> None:
    settings = filters(metric=metric) | {"overlong_buffer": {"enable": True, "len": 2, "penalty_factor": 1.0}}
    batch, metrics, _ = collector([EQUAL] * 6, **settings).collect(1)
    assert prompts_of(batch) == kept
    # Responses of 8 and 9 tokens of 10, of which the last 2 cost: 0 and -1/2.
    assert metrics["reward/overlong_penalty_mean"] == -0.25
    assert metrics["reward/score_mean"] == 1.0
    if kept:
        assert batch.numbers.rewards.tolist() == [1.0, 0.5, 1.0, 0.5]
