"""Prompts once for the rows that begin with them: which rows go together, what of them there is once, what attends."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from rlhf_megatron.data.packing import make_micro_batch, plan_for_all
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.row_numbers import numbers_of
from rlhf_megatron.data.shared_prompts import PromptedRows
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
    owner = PromptedRows.of_numbers(numbers_of(batch, 0)).assign(data, None, 0.01)
    own = [(owner == rank).nonzero().flatten().tolist() for rank in range(data)]
    of_ranks = [PromptedRows.of_batch(batch.select(rows)) for rows in own]
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
    rows = PromptedRows.of_batch(batch_of(groups))
    whole = rows.tokens(range(len(rows.lengths)))
    owner = rows.assign(4, None, 1e-5)
    costs = [rows.cost((owner == rank).nonzero().flatten().tolist(), 1e-5) for rank in range(4)]
    assert max(costs) < 1.03 * sum(costs) / 4
    plan = rows.plan(16384, attention=1e-5)
    assert len(plan) <= 1.15 * whole / 16384 + 1, "budgets are filled"
    costs = [rows.cost(micro, 1e-5) for micro in plan]
    assert max(costs) < 1.1 * sum(costs) / len(plan)
    assert sum(map(rows.tokens, plan)) < 0.6 * float(rows.lengths.sum())


def test_tokens_lie_once_and_outputs_are_read_where_they_predict() -> None:
    batch = batch_of([(4, [3, 0, 2]), (3, [1, 5]), (2, [6])])
    prompted, rows = PromptedRows.of_batch(batch), [5, 0, 3, 1, 4, 2]
    micro = make_micro_batch(batch, rows, {"weights": batch.response_mask.float()}, alignment=8, prompted=prompted)
    alone = make_micro_batch(batch, rows, {"weights": batch.response_mask.float()})
    assert len(micro.tokens) == -(-(4 + 5 + 3 + 6 + 8) // 8) * 8
    assert torch.equal(micro.batch_indices, alone.batch_indices)
    assert torch.equal(micro.targets, alone.targets)
    assert torch.equal(micro.tokens[micro.outputs], alone.tokens[alone.outputs])
    assert torch.equal(micro.positions[micro.outputs], alone.positions[alone.outputs])
    # What each output's sequence attends to is its row.
    assert micro.keys is not None
    ends, of_keys = micro.cu_seqlens.tolist(), micro.keys.boundaries.tolist()
    for output, of_alone in zip(micro.outputs.tolist(), alone.outputs.tolist(), strict=True):
        sequence = next(index for index, end in enumerate(ends[1:]) if output < end)
        last = of_keys[sequence + 1] - (ends[sequence + 1] - output)
        seen = micro.tokens[micro.keys.tokens[of_keys[sequence] : last + 1]]
        begin = max(begin for begin in alone.cu_seqlens.tolist() if begin <= of_alone)
        assert torch.equal(seen, alone.tokens[begin : of_alone + 1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_repeated_keys_are_sums(dtype: torch.dtype) -> None:
    batch = batch_of([(7, [3, 4, 9]), (5, [2, 2]), (6, [1])])
    micro = make_micro_batch(batch, range(6), {}, alignment=4, prompted=PromptedRows.of_batch(batch))
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
    # 2,048 tokens of a prompt and 14 responses of 1,024 tokens, which repeat it.
    assert repeated_keys(shared, shared.actor, 16384) == pytest.approx(
        min(group, 14) * 2048 / (2048 + min(group, 14) * 1024)
    )


def test_operations_are_those_of_rows_without_what_they_repeat() -> None:
    model = read_architecture(RECIPES / "models" / "qwen2.5-7b")
    whole = forward_flops(model, [1024 + 512, 1024 + 256], 768)
    shared = forward_flops(model, [1024 + 512, 1024 + 256], 768, spared=[1024])
    assert whole - shared == pytest.approx(forward_flops(model, [1024], 0))
