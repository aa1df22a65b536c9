"""Advantages and returns against numbers from their papers, enumeration, exact expectations and their own algebra."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lessons import with_estimates
from rlhf_megatron.algorithms.advantage import (
    OF_ROWS,
    OF_TOKENS,
    gpg_advantages,
    grpo_advantages,
    opo_advantages,
    pass_at_k_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlhf_megatron.algorithms.group_statistics import whitened
from rlhf_megatron.algorithms.returns import discounted_sums, gae, on_last_turns, rewards_of_tokens
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.recipe import AlgorithmSection

DOUBLE = torch.float64
REWARDS = st.lists(st.floats(-10, 10, allow_subnormal=False, width=32), min_size=1, max_size=12)
ONE_GROUP = torch.zeros(3, dtype=torch.long)


def vector(*values: float, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def opo_of_equal_lengths(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return opo_advantages(rewards, groups, torch.full(rewards.shape, 7))


COMPARING: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    grpo_advantages,
    lambda rewards, groups: grpo_advantages(rewards, groups, normalize_by_std=False),
    rloo_advantages,
    opo_of_equal_lengths,
    reinforce_plus_plus_baseline_advantages,
    gpg_advantages,
]


# ---- by hand


def test_grpo_is_the_z_score_of_each_group() -> None:
    # arXiv 2402.03300, 4.1.2: (r - mean) / std. Group 7: mean 1/4, std 1/2. Group 3: mean 2, std sqrt(2).
    rewards, groups = vector(0, 1, 1, 0, 0, 3), torch.tensor([7, 3, 7, 7, 7, 3])
    expected = vector(-0.5, -math.sqrt(0.5), 1.5, -0.5, -0.5, math.sqrt(0.5))
    assert torch.allclose(grpo_advantages(rewards, groups), expected, rtol=1e-5)
    # Dr.GRPO, arXiv 2503.20783: r - mean.
    assert grpo_advantages(rewards, groups, normalize_by_std=False).tolist() == [-0.25, -1, 0.75, -0.25, -0.25, 1]


def test_rloo_compares_with_the_others() -> None:
    # arXiv 2402.14740, eq. 8, for rewards 1, 2, 6: 1 - 8/2, 2 - 7/2, 6 - 3/2.
    assert rloo_advantages(vector(1, 2, 6), ONE_GROUP).tolist() == [-3, -1.5, 4.5]


def test_opo_weighs_the_baseline_by_length() -> None:
    # arXiv 2505.23585: b = (1*1 + 3*0 + 4*1) / 8 = 5/8.
    assert opo_advantages(vector(1, 0, 1), ONE_GROUP, torch.tensor([1, 3, 4])).tolist() == [0.375, -0.625, 0.375]
    # A group whose responses are all empty has no baseline and no token that could learn; nothing becomes NaN.
    assert torch.isfinite(opo_advantages(vector(1, 0, 1), ONE_GROUP, torch.zeros(3))).all()


def test_reinforce_plus_plus_baseline_divides_by_the_deviation_of_the_batch() -> None:
    # arXiv 2501.03262, section 3: groups (0, 1), (2, 2), (0, 4), centred +-1/2, 0, +-2; std = sqrt(8.5 / 5).
    rewards, groups = vector(0, 1, 2, 2, 0, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    expected = vector(-0.5, 0.5, 0, 0, -2, 2) / math.sqrt(8.5 / 5)
    assert torch.allclose(reinforce_plus_plus_baseline_advantages(rewards, groups), expected, rtol=1e-5)


def test_remax_subtracts_the_greedy_reward() -> None:
    assert remax_advantages(vector(1, 0, 0.5), vector(1, 1, 0)).tolist() == [0, -1, 0.5]  # arXiv 2310.10505, alg. 1


def test_gpg_makes_up_for_groups_that_say_nothing() -> None:
    # arXiv 2504.02546: 6 rows, of which 2 are in a group of equal rewards: alpha = 6 / 4. A reward of 0 says something.
    rewards, groups = vector(0, 1, 1, 1, 0, 3), torch.tensor([0, 0, 1, 1, 2, 2])
    assert gpg_advantages(rewards, groups).tolist() == [-0.75, 0.75, 0, 0, -2.25, 2.25]
    divided = gpg_advantages(rewards, groups, normalize_by_std=True)
    assert torch.allclose(divided, 1.5 * grpo_advantages(rewards, groups))


def test_pass_at_k_by_hand() -> None:
    # arXiv 2503.19595 (k = n): the best gets its lead over the second, the others nothing.
    assert pass_at_k_advantages(vector(1, 5, 3), ONE_GROUP).tolist() == [0, 2, 0]
    assert pass_at_k_advantages(vector(1, 1, 0), ONE_GROUP).tolist() == [0, 0, 0]
    # k = 2 of 3: the pairs of reward 5 are {5, 1} and {5, 3}: (4 + 2) / 2; those of 3: {3, 1}, {3, 5}: (2 + 0) / 2.
    assert pass_at_k_advantages(vector(1, 5, 3), ONE_GROUP, 2).tolist() == [0, 3, 1]
    # With c of n right, a right one counts if k - 1 others are all wrong: C(n - c, k - 1) / C(n - 1, k - 1).
    rewards, groups = vector(1, 1, 0, 0, 0), torch.zeros(5, dtype=torch.long)
    expected = math.comb(3, 2) / math.comb(4, 2)
    assert pass_at_k_advantages(rewards, groups, 3).tolist() == [expected, expected, 0, 0, 0]
    std = float(vector(1, 5, 3).std())
    assert pass_at_k_advantages(vector(1, 5, 3), ONE_GROUP, 2, True)[1].item() == pytest.approx(3 / std, rel=1e-5)
    with pytest.raises(ValueError, match="at least 2"):
        pass_at_k_advantages(vector(1, 5, 3), ONE_GROUP, 1)


@given(rewards=st.lists(st.integers(-3, 3), min_size=2, max_size=7), k=st.integers(2, 7))
def test_pass_at_k_is_the_mean_over_all_sets(rewards: list[int], k: int) -> None:
    n, k = len(rewards), min(k, len(rewards))
    sets = list(itertools.combinations(range(n), k))
    expected = []
    for i in range(n):
        gains = [
            max(rewards[j] for j in chosen) - max(rewards[j] for j in chosen if j != i)
            for chosen in sets
            if i in chosen
        ]
        expected.append(sum(gains) / len(gains))
    found = pass_at_k_advantages(vector(*rewards), torch.zeros(n, dtype=torch.long), k)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


# ---- what the estimators estimate, exactly: expectations over all samples of a policy with three answers


def expected_gradient(
    advantages: Callable[[torch.Tensor], torch.Tensor], rewards: Sequence[float], n: int
) -> torch.Tensor:
    """Return E[mean of A_i grad log p(x_i)] over n answers drawn from softmax(logits)."""
    logits = vector(0.3, -0.5, 0.1)
    p = logits.softmax(0)
    scores = torch.eye(3, dtype=DOUBLE) - p  # [answer, logit]: the gradient of log p
    total = torch.zeros(3, dtype=DOUBLE)
    for answers in itertools.product(range(3), repeat=n):
        index = torch.tensor(answers)
        found = advantages(vector(*rewards)[index])
        total += p[index].prod() * (found[:, None] * scores[index]).mean(0)
    return total


def gradient_of(objective: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    logits = vector(0.3, -0.5, 0.1).requires_grad_()
    objective(logits.softmax(0)).backward()
    assert logits.grad is not None
    return logits.grad


def test_rloo_is_unbiased_for_the_expected_reward() -> None:
    rewards = (0.0, 1.0, 2.5)
    found = expected_gradient(lambda r: rloo_advantages(r, torch.zeros(3, dtype=torch.long)), rewards, 3)
    assert torch.allclose(found, gradient_of(lambda p: (p * vector(*rewards)).sum()), atol=1e-12)


@pytest.mark.parametrize("k", [2, 3])
def test_pass_at_k_is_unbiased_for_the_expected_best(k: int) -> None:
    rewards = (0.0, 1.0, 2.5)
    found = expected_gradient(lambda r: k * pass_at_k_advantages(r, torch.zeros(3, dtype=torch.long), k), rewards, 3)

    def expected_best(p: torch.Tensor) -> torch.Tensor:
        below = p.cumsum(0).pow(k)  # P(best is at most this one), rewards being in order
        return (below.diff(prepend=vector(0.0)) * vector(*rewards)).sum()

    assert torch.allclose(found, gradient_of(expected_best), atol=1e-12)


# ---- properties


@pytest.mark.parametrize("estimate", [*COMPARING, pass_at_k_advantages])
@given(value=st.floats(-1e3, 1e3, width=32), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_groups_of_equal_rewards_and_groups_of_one_teach_nothing(estimate, value: float, sizes: list[int]) -> None:
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    rewards = torch.full((len(groups),), value, dtype=torch.float32)
    assert not estimate(rewards, groups).any()
    # Nor do they where another group does teach something.
    rewards, groups = torch.cat([rewards, vector(0, 1).float()]), torch.cat([groups, torch.tensor([99, 99])])
    found = estimate(rewards, groups)
    assert not found[:-2].any() and found[-2:].any()


@given(parts=st.lists(REWARDS, min_size=1, max_size=4), seed=st.integers(0, 9))
def test_advantages_sum_to_zero_and_follow_their_rows(parts: list[list[float]], seed: int) -> None:
    rewards = torch.tensor([value for part in parts for value in part], dtype=DOUBLE)
    groups = torch.tensor([number for number, part in enumerate(parts) for _ in part])
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    for estimate in COMPARING:
        advantages = estimate(rewards, groups)
        sums = torch.zeros(len(parts), dtype=DOUBLE).index_add_(0, groups, advantages)
        assert sums.abs().max() < 1e-6
        assert torch.allclose(estimate(rewards[order], groups[order]), advantages[order], atol=1e-6)
    best = pass_at_k_advantages(rewards, groups)
    assert (best >= 0).all() and torch.allclose(pass_at_k_advantages(rewards[order], groups[order]), best[order])


@given(values=st.lists(st.floats(-10, 10, width=16), min_size=1, max_size=20))
def test_whitened_values_have_mean_zero_and_deviation_one(values: list[float]) -> None:
    found = whitened(vector(*values))
    assert abs(float(found.sum())) < 1e-9 * len(values) + 1e-6
    if len(set(values)) == 1:
        assert not found.any()
    elif max(values) - min(values) > 0.1:
        assert float(found.std()) == pytest.approx(1.0, rel=1e-3)


# ---- returns and GAE

MASK = torch.tensor([0, 1, 1, 0, 0, 1, 0, 0, 1, 0], dtype=torch.bool)  # rows of 7, 2 and 1 tokens
OFFSETS = torch.tensor([0, 7, 9, 10])


def test_gae_by_hand_passes_over_observations() -> None:
    # arXiv 1506.02438, eq. 16: row 0 samples tokens 1, 2 and 5; those between are a tool's, with a value of no meaning.
    rewards = vector(0, 0, 0, 0, 0, 1.0, 0, 0, 2.0, 0)
    values = vector(9, 0.5, 0.25, 9, 9, 0.75, 9, 9, 1.0, 9)
    gamma, gae_lambda = 0.5, 0.5
    third = 1.0 - 0.75
    second = 0.5 * 0.75 - 0.25 + 0.25 * third
    first = 0.5 * 0.25 - 0.5 + 0.25 * second
    advantages, returns = gae(rewards, values, MASK, OFFSETS, gamma, gae_lambda)
    assert advantages[MASK].tolist() == [first, second, third, 1.0]
    assert returns[MASK].tolist() == [first + 0.5, second + 0.25, 1.0, 2.0]
    assert not advantages[~MASK].any() and not returns[~MASK].any()


@given(
    rows=st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=5),
    gamma=st.sampled_from([1.0, 0.9]),
    gae_lambda=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 99),
)
def test_gae_is_the_sum_of_its_definition(rows: list[list[bool]], gamma: float, gae_lambda: float, seed: int) -> None:
    mask = torch.tensor([bit for row in rows for bit in row])
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, len(mask), dtype=DOUBLE, generator=generator)
    advantages, returns = gae(rewards, values, mask, offsets, gamma, gae_lambda)
    for start, end in itertools.pairwise(offsets.tolist()):
        sampled = [t for t in range(start, end) if mask[t]]
        following = [float(values[t]) for t in sampled[1:]] + [0.0][: len(sampled)]
        errors = [float(rewards[t] - values[t]) + gamma * after for t, after in zip(sampled, following, strict=True)]
        for place, t in enumerate(sampled):
            expected = sum((gamma * gae_lambda) ** ahead * error for ahead, error in enumerate(errors[place:]))
            assert float(advantages[t]) == pytest.approx(expected, abs=1e-12)
            if gamma == gae_lambda == 1.0:  # then the critic cancels: what is left is the reward to go
                assert float(returns[t]) == pytest.approx(float(rewards[sampled[place:]].sum()), abs=1e-12)
    assert not advantages[~mask].any()


def test_gae_is_linear_and_differentiable_in_rewards_and_values() -> None:
    rewards, values = torch.randn(2, 10, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    # A_t changes by (gamma lambda)^l with a reward l sampled tokens later, and by -1 with its own value.
    base, _ = gae(rewards, values, MASK, OFFSETS, 0.9, 0.5)
    later, _ = gae(rewards + torch.eye(10, dtype=DOUBLE)[5], values, MASK, OFFSETS, 0.9, 0.5)
    assert torch.allclose((later - base)[[1, 2, 5, 8]], vector(0.45**2, 0.45, 1, 0))
    own, _ = gae(rewards, values + torch.eye(10, dtype=DOUBLE)[1], MASK, OFFSETS, 0.9, 0.5)
    assert torch.allclose((own - base)[[1, 2, 5, 8]], vector(-1, 0, 0, 0))


def test_discounted_sums_by_hand() -> None:
    found = discounted_sums(vector(1, 2, 4, 8, 16), torch.tensor([2, 0, 3]), 0.5)
    assert found.tolist() == [2, 2, 12, 16, 16]
    assert discounted_sums(vector(), torch.tensor([], dtype=torch.long), 0.5).tolist() == []
    assert discounted_sums(vector(), torch.tensor([0, 0]), 0.5).tolist() == []


# ---- whole batches, by name


def make_batch(seed: int = 0) -> RolloutBatch:
    """Return two groups of three; one response is empty, one was cut off."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 1, 0, 2, 5, 4]
    batch = batch_from_rows(
        [[1, 2]] * 6,
        [[7] * length for length in lengths],
        group_id=[0, 0, 0, 1, 1, 1],
        rewards=[1.0, 0.0, 0.5, 0.0, 1.0, 3.0],
        truncated=[False] * 5 + [True],
    )
    return batch.with_fields(
        values=torch.randn(len(batch.tokens), generator=generator),
        penalties=torch.rand(len(batch.tokens), generator=generator) * batch.response_mask,
        baseline_rewards=torch.tensor([0.5, 0.5, 0.5, 1.0, 1.0, 1.0]),
    )


@pytest.mark.parametrize("name", sorted({*OF_ROWS, *OF_TOKENS}))
def test_every_estimator_gives_finite_advantages_that_follow_their_rows(name: str) -> None:
    settings, batch = AlgorithmSection(advantage=name), make_batch()
    found = with_estimates(batch, settings)
    assert found.advantages is not None and found.advantages.dtype == torch.float32
    assert torch.isfinite(found.advantages).all() and found.advantages[batch.response_mask].any()
    assert not found.advantages[~batch.response_mask].any()
    order = [4, 2, 0, 5, 1, 3]
    again = with_estimates(batch.select(order), settings)
    assert torch.allclose(again.advantages, found.select(order).advantages, atol=1e-6)
    if name == "gae":
        assert torch.allclose(again.returns, found.select(order).returns, atol=1e-6)


def test_rewards_of_tokens_lie_on_the_last_sampled_one() -> None:
    batch = make_batch()
    expected = torch.zeros(len(batch.tokens), dtype=DOUBLE)
    for row, end in enumerate(batch.cu_seqlens[1:].tolist()):
        if row != 2:  # the empty response has no token for its reward
            expected[end - 1] += float(batch.rewards[row])
    assert torch.allclose(rewards_of_tokens(batch), expected - batch.penalties.double())
    assert torch.equal(rewards_of_tokens(batch.with_fields(penalties=None)), expected)


def turns_batch() -> RolloutBatch:
    """Return rows of three, one and two turns, whose rewards are partly theirs."""
    marks = [[True, True, False, True, False, False, True], [True], [True, False, True, True]]
    return batch_from_rows(
        [[1], [1, 2], [3]],
        [[9] * len(row) for row in marks],
        sampled=marks,
        turn_rewards=[[1.0, 2.0, 4.0], [math.nan], [-1.0]],
        rewards=[7.5, 3.0, 0.0],
    ).with_fields(values=torch.arange(16.0) / 7)


def test_rewards_of_turns_lie_on_their_last_tokens_and_the_rest_on_the_last() -> None:
    found = rewards_of_tokens(turns_batch())
    expected = [0, 0, 1, 0, 2, 0, 0, 4.5, 0, 0, 3, 0, -1, 0, 0, 1]
    assert found.tolist() == expected


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_a_discount_per_turn_counts_the_turns_that_follow(name: str) -> None:
    settings = AlgorithmSection(advantage=name, gamma=0.5, discount_per="turn")
    batch, gamma = turns_batch(), 0.5
    # What is left of each turn's reward at the turns before it, whatever their lengths.
    sums = [1 + gamma * 2 + gamma**2 * 4.5, 2 + gamma * 4.5, 4.5, 3, -1 + gamma, 1]
    tokens = torch.tensor([sums[turn] for turn in (0, 0, 1, 2, 3, 4, 5, 5)], dtype=DOUBLE)
    found = with_estimates(batch, settings)
    if name == "gae":
        assert torch.allclose(found.returns[batch.response_mask].double(), tokens)
    whitened = (tokens - tokens.mean()) / tokens.std()
    if name == "reinforce_plus_plus":
        assert torch.allclose(found.advantages[batch.response_mask].double(), whitened, atol=1e-5)


def test_gae_per_turn_is_that_of_tokens_where_turns_are_tokens() -> None:
    batch = turns_batch()
    alone = batch_from_rows(
        [[1], [2]], [[9] * 5] * 2, sampled=[[True, False, True, False, True]] * 2, turn_rewards=[[1.0, 2.0], [3.0]]
    ).with_fields(values=torch.arange(12.0) / 5)
    for rows, equal in ((alone, True), (batch, False)):
        per_turn, per_token = (
            with_estimates(rows, AlgorithmSection(advantage="gae", gamma=0.9, gae_lambda=0.7, discount_per=per))
            for per in ("turn", "token")
        )
        assert torch.allclose(per_turn.advantages, per_token.advantages) is equal


def test_last_turns_alone_are_credited() -> None:
    found = on_last_turns(torch.arange(1.0, 17.0), turns_batch())
    assert found[turns_batch().response_mask].tolist() == [0, 0, 0, 8, 11, 0, 15, 16]


def test_penalties_are_summed_where_the_advantage_is_per_response() -> None:
    batch = make_batch()
    less = [float(batch.penalties[start:end].double().sum()) for start, end in itertools.pairwise(batch.cu_seqlens)]
    expected = rloo_advantages(batch.rewards.double() - vector(*less), batch.group_id)
    found = with_estimates(batch, AlgorithmSection(advantage="rloo")).advantages
    assert torch.allclose(found, batch.spread(expected).float())


def test_reinforce_plus_plus_counts_the_penalties_that_follow() -> None:
    # arXiv 2501.03262, section 3: A_t = r - beta * sum of the KL from t on, then whitened over the batch's tokens.
    batch = make_batch()
    following = []
    for row, (start, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        for token in range(start + 2, end):
            following.append(float(batch.rewards[row]) - float(batch.penalties[token:end].double().sum()))
    values = vector(*following)
    expected = (values - values.mean()) / values.std()
    found = with_estimates(batch, AlgorithmSection(advantage="reinforce_plus_plus")).advantages
    assert torch.allclose(found[batch.response_mask].double(), expected, atol=1e-5)


def test_gae_is_whitened_if_asked_and_its_returns_never_are() -> None:
    batch = make_batch()
    plain = with_estimates(batch, AlgorithmSection(advantage="gae", whiten_advantages=False))
    white = with_estimates(batch, AlgorithmSection(advantage="gae"))
    sampled = plain.advantages[batch.response_mask]
    assert torch.allclose(white.advantages[batch.response_mask], (sampled - sampled.mean()) / sampled.std(), atol=1e-5)
    assert torch.equal(white.returns, plain.returns)
    # With gamma = lambda = 1 the return is the reward to go, whatever the critic says.
    assert plain.returns[2].item() == pytest.approx(1.0 - float(batch.penalties[2:5].sum()), rel=1e-5)
