"""Prefixes once for the rows that share them: which rows go together, what of them there is once, what attends."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from rlhf_megatron.data.expert_choices import ChoiceShape
from rlhf_megatron.data.packing import MicroBatch, make_micro_batch, plan_for_all
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.row_numbers import numbers_of
from rlhf_megatron.data.shared_prompts import SharedPrefixes
from rlhf_megatron.errors import RecipeError
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.flops import forward_flops
from rlhf_megatron.models.repeated_keys import repeat
from rlhf_megatron.planning.feasibility import check_architectures
from rlhf_megatron.planning.model_folders import role_architectures
from rlhf_megatron.planning.report import plan_text
from rlhf_megatron.planning.stage_memory import repeated_keys
from rlhf_megatron.planning.step_time import expected_time
from rlhf_megatron.recipe import RLRecipe, load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def batch_of(groups: list[tuple[int, list[int]]], seed: int = 0) -> RolloutBatch:
    """Return rows of groups (tokens of the prompt, of each response), in no order."""
    draw = random.Random(seed)
    rows = []
    for group, (length, responses) in enumerate(groups):
        prompt = [draw.randrange(2, 99) for _ in range(length)]
        rows += [(group, prompt, [draw.randrange(2, 99) for _ in range(size)]) for size in responses]
    draw.shuffle(rows)
    return batch_from_rows(
        [prompt for _, prompt, _ in rows], [answer for *_, answer in rows], group_id=[group for group, *_ in rows]
    )


groups_of_rows = some.lists(
    some.tuples(some.integers(1, 50), some.lists(some.integers(0, 60), min_size=1, max_size=9)), min_size=1, max_size=9
)


@given(groups_of_rows, some.integers(1, 4), some.integers(1, 3), some.integers(60, 300))
def test_every_row_is_dealt_once_and_within_the_budget(
    groups: list[tuple[int, list[int]]], data: int, multiple: int, budget: int
) -> None:
    batch = batch_of(groups)
    owner = SharedPrefixes.of_numbers(numbers_of(batch, 0)).assign(data, None, 0.01)
    own = [(owner == rank).nonzero().flatten().tolist() for rank in range(data)]
    of_ranks = [SharedPrefixes.of_batch(batch.select(rows)) for rows in own]
    count = max(len(rows.plan(budget, multiple, 0.01)) for rows in of_ranks)
    for places, rows in zip(own, of_ranks, strict=True):
        plan = plan_for_all(lambda least, rows=rows: rows.plan(budget, multiple, 0.01, least), lambda _: count)
        assert sorted(itertools.chain.from_iterable(plan)) == list(range(len(places)))
        assert len(plan) == count and count % multiple == 0
        for micro in plan:
            assert len(micro) <= 1 or rows.tokens(micro) <= budget


def test_micro_batches_and_ranks_cost_about_the_same() -> None:
    draw = random.Random(3)
    groups = [(1000, [int(draw.lognormvariate(6.8, 0.5)) for _ in range(16)]) for _ in range(32)]
    rows = SharedPrefixes.of_batch(batch_of(groups))
    whole = rows.tokens(range(len(rows.lengths)))
    owner = rows.assign(4, None, 1e-5)
    costs = [rows.cost((owner == rank).nonzero().flatten().tolist(), 1e-5) for rank in range(4)]
    assert max(costs) < 1.03 * sum(costs) / 4
    plan = rows.plan(16384, attention=1e-5)
    assert len(plan) <= 1.15 * whole / 16384 + 1, "budgets are filled"
    costs = [rows.cost(micro, 1e-5) for micro in plan]
    assert max(costs) < 1.1 * sum(costs) / len(plan)
    assert sum(map(rows.tokens, plan)) < 0.6 * float(rows.lengths.sum())


def check_what_outputs_see(micro: MicroBatch, alone: MicroBatch) -> None:
    """Check that outputs are read where they predict, and that what each one's sequence attends to is its row."""
    assert torch.equal(micro.batch_indices, alone.batch_indices)
    assert torch.equal(micro.targets, alone.targets)
    assert torch.equal(micro.tokens[micro.outputs], alone.tokens[alone.outputs])
    assert torch.equal(micro.positions[micro.outputs], alone.positions[alone.outputs])
    ends, keys = micro.cu_seqlens.tolist(), micro.keys
    of_keys = ends if keys is None else keys.boundaries.tolist()
    tokens = micro.tokens if keys is None else micro.tokens[keys.tokens]
    for output, of_alone in zip(micro.outputs.tolist(), alone.outputs.tolist(), strict=True):
        sequence = next(index for index, end in enumerate(ends[1:]) if output < end)
        last = of_keys[sequence + 1] - (ends[sequence + 1] - output)
        begin = max(begin for begin in alone.cu_seqlens.tolist() if begin <= of_alone)
        assert torch.equal(tokens[of_keys[sequence] : last + 1], alone.tokens[begin : of_alone + 1])


def test_tokens_lie_once_and_outputs_are_read_where_they_predict() -> None:
    batch = batch_of([(4, [3, 0, 2]), (3, [1, 5]), (2, [6])])
    prefixes, rows = SharedPrefixes.of_batch(batch), [5, 0, 3, 1, 4, 2]
    micro = make_micro_batch(batch, rows, {"weights": batch.response_mask.float()}, alignment=8, prefixes=prefixes)
    alone = make_micro_batch(batch, rows, {"weights": batch.response_mask.float()})
    assert len(micro.tokens) == -(-(4 + 5 + 3 + 6 + 8) // 8) * 8
    assert micro.keys is not None
    check_what_outputs_see(micro, alone)


def beginnings(rows: list[list[int]]) -> set[tuple[int, ...]]:
    """Return what any of the rows begins with, each once: the nodes of their tree."""
    return {tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)}


# Of two tokens, so that many rows have much in common, as branches of trajectories have, at any depth.
branching_rows = some.lists(
    some.tuples(some.lists(some.integers(2, 3), min_size=1, max_size=6), some.lists(some.integers(2, 3), max_size=6)),
    min_size=1,
    max_size=9,
)


@given(branching_rows, some.randoms(use_true_random=False))
def test_rows_that_branch_anywhere_are_computed_as_one_tree(
    rows: list[tuple[list[int], list[int]]], draw: random.Random
) -> None:
    batch = batch_from_rows([prompt for prompt, _ in rows], [answer for _, answer in rows])
    prefixes, whole = SharedPrefixes.of_batch(batch), [[*prompt, *answer] for prompt, answer in rows]
    chosen = draw.sample(range(len(rows)), draw.randint(1, len(rows)))
    nodes = beginnings([whole[row] for row in chosen])
    assert prefixes.tokens(chosen) == len(nodes)
    assert prefixes.cost(chosen, 0.5) == pytest.approx(sum(1 + 0.5 * (2 * len(node) - 1) for node in nodes))
    micro = make_micro_batch(batch, chosen, {}, alignment=4, prefixes=prefixes)
    assert len(micro.tokens) == -(-len(nodes) // 4) * 4
    assert micro.keys is None or len(micro.keys.tokens) <= sum(len(whole[row]) for row in chosen) + 3, "never more keys"
    check_what_outputs_see(micro, make_micro_batch(batch, chosen, {}))
    for places in prefixes.plan(12, attention=0.1):
        assert len(places) <= 1 or len(beginnings([whole[row] for row in places])) <= 12


def test_later_rows_of_a_trajectory_share_its_turns() -> None:
    first = [5, 6, 7, 8, 9, 10, 11]  # a prompt of two tokens, a turn of two, an answer of one, a turn of two
    rows = [([5, 6], first[2:]), ([*first[:5], 20, 21], [22, 23]), ([*first, 30], [31]), ([5, 6], [40, 41])]
    sampled = [[True, True, False, True, True], None, None, None]
    batch = batch_from_rows(
        [prompt for prompt, _ in rows], [answer for _, answer in rows], sampled=sampled, trajectory_id=[0, 0, 0, 1]
    )
    micro = make_micro_batch(batch, range(4), {}, prefixes=SharedPrefixes.of_batch(batch))
    assert len(micro.tokens) == len(first) + 4 + 2 + 2
    check_what_outputs_see(micro, make_micro_batch(batch, range(4), {}))


def test_sampled_tokens_whose_experts_are_replayed_are_computed_for_each_row() -> None:
    shape = ChoiceShape(layers=1, chosen=1, experts=4)
    choices = [torch.full((6, 1, 1), row, dtype=shape.dtype) for row in range(2)]
    batch = batch_from_rows([[2, 3, 4]] * 2, [[5, 6, 7], [5, 6, 8]], expert_choices=choices, choices=shape)
    prefixes = SharedPrefixes.of_batch(batch)
    assert prefixes.tokens([0, 1]) == 9
    micro = make_micro_batch(batch, [0, 1], {}, prefixes=prefixes, replayed_layers=[0])
    assert micro.expert_choices is not None and micro.expert_choices.flatten().tolist() == [0] * 6 + [1] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_repeated_keys_are_sums(dtype: torch.dtype) -> None:
    prompts = [[2] * 7, [2] * 7, [2] * 9, [2, 2, 3], [4] * 5, [4] * 5]
    batch = batch_from_rows(prompts, [[5, 6], [5, 7], [8], [9], [9], [9, 9]])
    micro = make_micro_batch(batch, range(6), {}, alignment=4, prefixes=SharedPrefixes.of_batch(batch))
    assert micro.keys is not None
    values = torch.randn(len(micro.tokens), 2, 3, dtype=dtype, requires_grad=True)
    repeated = repeat(values, micro.keys)
    assert torch.equal(repeated, values[micro.keys.tokens])
    gradient = torch.randn_like(repeated)
    (found,) = torch.autograd.grad(repeated, values, gradient)
    expected = torch.zeros(values.shape, dtype=torch.float64)
    expected.index_add_(0, micro.keys.tokens, gradient.double())
    torch.testing.assert_close(found, expected.to(dtype))


def recipe_of(name: str, *overrides: str) -> RLRecipe:
    """Return a shipped recipe that shares prompts."""
    recipe = load_recipe(RECIPES / f"{name}.yaml", ["actor.shared_prompts=true", *overrides])
    assert isinstance(recipe, RLRecipe)
    return recipe


@pytest.mark.parametrize(
    ("name", "model", "overrides", "why"),
    [
        ("qwen7b_grpo", "qwen2.5-7b", ["actor.layout.context=2"], "with actor.layout.context=2 the rows of a prompt"),
        ("qwen3_next_grpo", "qwen3-next-80b-a3b", [], "the actor's layers with a delta net have a state"),
    ],
)
def test_what_cuts_or_walks_through_rows_is_refused(name: str, model: str, overrides: list[str], why: str) -> None:
    recipe = recipe_of(name, *overrides)
    with pytest.raises(RecipeError, match=f"^actor.shared_prompts: {why}.*leave it out") as caught:
        check_architectures(recipe, role_architectures(recipe, read_architecture(RECIPES / "models" / model)))
    assert "\n" not in str(caught.value)


def test_loops_without_groups_refuse_it() -> None:
    with pytest.raises(RecipeError, match="actor.shared_prompts: loop sft has no groups of responses"):
        load_recipe(RECIPES / "tiny_sft.yaml", ["actor.shared_prompts=true"])


def test_plans_count_what_is_not_computed() -> None:
    overrides = ["data.max_prompt_length=2048", "rollout.max_response_length=2048", "cluster.gpu=H200"]
    shared, alone = (
        recipe_of("qwen7b_grpo", *overrides),
        recipe_of("qwen7b_grpo", *overrides, "actor.shared_prompts=false"),
    )
    model = read_architecture(RECIPES / "models" / "qwen2.5-7b")
    group = shared.batch.responses_per_prompt
    saved = 0.5 * (group - 1) / group
    line = re.search("prompts of 1024 tokens once for their groups: up to (..)% of the tokens", plan_text(shared, 8))
    assert line and int(line[1]) == pytest.approx(100 * saved, abs=3), "long responses are cut, so the mean is shorter"
    times = [expected_time(recipe, role_architectures(recipe, model), 8) for recipe in (shared, alone)]
    assert times[0] is not None and times[1] is not None
    assert times[0].phases["update"] / times[1].phases["update"] == pytest.approx(1 - saved, abs=0.06)
    assert repeated_keys(alone, alone.actor, 16384) == 0
    # A prompt of 2,048 tokens and up to 14 responses of 1,024 tokens, which repeat it, but for the first.
    rows = min(group, 14)
    assert repeated_keys(shared, shared.actor, 16384) == pytest.approx((rows - 1) * 2048 / (2048 + rows * 1024))


def test_operations_are_those_of_rows_without_what_they_repeat() -> None:
    model = read_architecture(RECIPES / "models" / "qwen2.5-7b")
    whole = forward_flops(model, [1024 + 512, 1024 + 256], 768)
    shared = forward_flops(model, [1024 + 512, 1024 + 256], 768, spared=[1024])
    assert whole - shared == pytest.approx(forward_flops(model, [1024], 0))
