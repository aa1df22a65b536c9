"""RolloutBatch: the trajectories of one step, packed without padding. ``packing`` cuts it into micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.expert_choices import ChoiceShape


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """R trajectories with T tokens in all. Row r of every field is the same trajectory.

    A per-token value at position t belongs to token t as the predicted one; it is 0 where ``response_mask`` is False.
    """

    tokens: Tensor  # [T] int64: prompt, then response, of each row in turn
    cu_seqlens: Tensor  # [R + 1] int64: row r is tokens[cu_seqlens[r] : cu_seqlens[r + 1]]
    response_mask: Tensor  # [T] bool: this token was sampled (or, in supervised training, is to be trained on)
    rollout_logprobs: Tensor  # [T] float32: as the rollout engine reported it
    rewards: Tensor  # [R] float32; NaN where the row could not be scored and is to be left out
    group_id: Tensor  # [R] int64: responses to the same prompt share it
    row_id: Tensor  # [R] int64: unique in the step, the same in every layout
    weight_version: Tensor  # [R] int64: of the weights that sampled the row; the oldest, where it was resumed
    truncated: Tensor  # [R] bool: cut off at the length limit
    trajectory_id: Tensor | None = None  # [R] int64: rows of one trajectory share it; None: each row is a whole one
    scores: Tensor | None = None  # [R] float32: rewards before penalties; None: the same as rewards
    turn_rewards: Tensor | None = None  # [T] float32: of each turn on its last token, parts of its row's reward
    old_logprobs: Tensor | None = None  # [T] float32: under the actor before this step's updates
    reference_logprobs: Tensor | None = None  # [T] float32
    advantages: Tensor | None = None  # [T] float32
    values: Tensor | None = None  # [T] float32: what the critic expected of the row before the token was sampled
    returns: Tensor | None = None  # [T] float32: what the critic is to expect there
    penalties: Tensor | None = None  # [T] float32: taken from the reward at each token, such as a KL divergence
    correction: Tensor | None = None  # [T] float32: factor of the loss weights against mismatch with the rollout
    baseline_rewards: Tensor | None = None  # [R] float32: of a greedy response to the row's prompt
    expert_choices: Tensor | None = None  # [T, layers, chosen]: which experts the rollout took (``expert_choices``)

    @property
    def rows(self) -> int:
        """The number of trajectories."""
        return len(self.row_id)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.group_id.unique())

    @property
    def lengths(self) -> Tensor:
        """[R] int64: tokens of each row, prompt and response."""
        return self.cu_seqlens.diff()

    @property
    def response_lengths(self) -> Tensor:
        """[R] int64: sampled tokens of each row."""
        return marked_in_rows(self.response_mask, self.cu_seqlens)

    @property
    def completion_lengths(self) -> Tensor:
        """[R] int64: tokens of each row from the first sampled one on, those of others between its turns too."""
        rows = zip(self.lengths.tolist(), self.response_mask.split(self.lengths.tolist()), strict=True)
        return torch.tensor([size - int(mask.int().argmax()) if mask.any() else 0 for size, mask in rows])

    @property
    def row_of_token(self) -> Tensor:
        """[T] int64: which row each token belongs to, counted from 0."""
        return on_tokens(torch.arange(self.rows), self.lengths)

    @property
    def row_of_sampled(self) -> Tensor:
        """[n] int64: the same of the sampled tokens alone."""
        return on_tokens(torch.arange(self.rows), self.response_lengths)

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        """Return the batch of these rows, in this order; ``row_id`` says who is who. All in order: itself."""
        if list(rows) == list(range(self.rows)):
            return self
        index = torch.as_tensor(list(rows), dtype=torch.int64)
        lengths = self.lengths.tolist()
        chosen = {
            name: in_order([value], [lengths], rows) if name in TOKEN_FIELDS else value[index]
            for name, value in self._tensors().items()
            if name != "cu_seqlens"
        }
        return dataclasses.replace(self, cu_seqlens=boundaries(self.lengths[index]), **chosen)

    def with_fields(self, **values: Any) -> RolloutBatch:
        """Return the same batch with these fields set."""
        return dataclasses.replace(self, **values)

    def fields(self, weights: Tensor) -> dict[str, Tensor]:
        """Return inputs of an objective for each token, with the ``weights`` [T] that its loss is summed with."""
        names = ("rollout_logprobs", "old_logprobs", "reference_logprobs", "advantages", "values", "returns")
        present = {name: value for name, value in self._tensors().items() if name in names}
        return present | {"weights": weights}

    def spread(self, per_row: Tensor) -> Tensor:
        """Map [R] -> [T]: each row's value on its sampled tokens, 0 on the others."""
        return on_marked(per_row, self.response_mask, self.cu_seqlens)

    def _tensors(self) -> dict[str, Tensor]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if value is not None}


TOKEN_FIELDS = frozenset(
    [
        "tokens",
        "response_mask",
        "rollout_logprobs",
        "turn_rewards",
        "old_logprobs",
        "reference_logprobs",
        "advantages",
        "values",
        "returns",
        "penalties",
        "correction",
        "expert_choices",
    ]
)


_WHOLE_NUMBERS = frozenset(["tokens", "cu_seqlens", "group_id", "row_id", "weight_version", "trajectory_id"])
_FLAGS = frozenset(["response_mask", "truncated"])


def checked_batch(fields: Mapping[str, Any], vocabulary: int, choices: ChoiceShape | None = None) -> RolloutBatch:
    """Return the batch with these fields, which were read from a file; with ``choices``, those of experts included.

    Raises ValueError or TypeError where they are not those of one batch, or a token is none of the ``vocabulary``.
    """
    fields = dict(fields)
    of_experts = fields.pop("expert_choices", None)
    if choices:
        of_experts = choices.unknown(len(fields["tokens"])) if of_experts is None else of_experts
        choices.check(of_experts, len(fields["tokens"]))
    batch = RolloutBatch(**fields, expert_choices=of_experts if choices else None)
    sizes = {"cu_seqlens": len(batch.row_id) + 1}
    for name, value in fields.items():
        wanted = sizes.get(name, len(batch.tokens) if name in TOKEN_FIELDS else len(batch.row_id))
        dtype = torch.int64 if name in _WHOLE_NUMBERS else torch.bool if name in _FLAGS else None
        if value.shape != (wanted,) or not (value.dtype == dtype if dtype else value.is_floating_point()):
            raise ValueError(
                f"{name} is a tensor of {list(value.shape)} {value.dtype}, and not one for {wanted} values"
            )
        if not dtype and not bool(value.isfinite().all()):
            raise ValueError(f"{name} is not finite")
    tokens, ends = batch.tokens, batch.cu_seqlens
    if int(ends[0]) or int(ends[-1]) != len(tokens) or bool((batch.lengths < 1).any()):
        raise ValueError("cu_seqlens are not where rows begin and end")
    if bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        raise ValueError(f"tokens are beyond the vocabulary of {vocabulary}")
    return batch


def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Return the rows of all batches, in order; ids stay as they are. One alone: itself.

    Raises ValueError where some lack a field.
    """
    if len(batches) == 1:
        return batches[0]
    names = [sorted(batch._tensors()) for batch in batches]
    if any(of_batch != names[0] for of_batch in names):
        raise ValueError(f"batches with different fields: {names}")
    fields = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names[0] if name != "cu_seqlens"}
    lengths = torch.cat([batch.lengths for batch in batches])
    return dataclasses.replace(batches[0], cu_seqlens=boundaries(lengths), **fields)


def turn_ends(mask: Tensor, lengths: Tensor) -> Tensor:
    """Map [T] bool, [R] -> [T] bool: the last token of each run of marked ones within a row: each turn's."""
    following = torch.cat([mask[1:], mask.new_zeros(1)])[: len(mask)]
    following[lengths.cumsum(0)[lengths > 0] - 1] = False
    return mask & ~following


def _on_turns(mask: Tensor, lengths: Tensor, rewards: Sequence[Sequence[float] | None]) -> Tensor:
    """Return [T] float32: the rewards of each row's turns on their last tokens; of a turn that failed 0."""
    values = torch.zeros(len(mask))
    ends = turn_ends(mask, lengths).split(lengths.tolist())
    for of_row, own, of_turns in zip(ends, values.split(lengths.tolist()), rewards, strict=True):
        places = of_row.nonzero().squeeze(1)[: len(of_turns or ())]
        own[places] = torch.tensor(list(of_turns or ())[: len(places)]).nan_to_num(0.0)
    return values


# Every rank has all tokens of a step, hundreds of millions on a large cluster, and does these with one thread of a CPU:
# an index for each token would take ten times as long as a row at a time.


def boundaries(lengths: Tensor) -> Tensor:
    """Map [R] -> [R + 1] int64: where each row begins, and the last one ends."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def on_tokens(per_row: Tensor, lengths: Tensor) -> Tensor:
    """Map [R], [R] int64 -> [T]: each row's value on each of its tokens."""
    return torch.from_numpy(per_row.numpy().repeat(lengths.numpy()))


def on_marked(per_row: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Map [R], [T] bool -> [T]: each row's value on its marked tokens, 0 on the others."""
    return on_tokens(per_row, cu_seqlens.diff()).masked_fill_(~mask, 0)


def marked_in_rows(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Map [T] bool -> [R] int64: how many tokens of each row are marked."""
    rows = mask.split(cu_seqlens.diff().tolist())
    return torch.tensor([int(row.count_nonzero()) for row in rows], dtype=torch.int64)


def in_order(parts: Sequence[Tensor], lengths: Sequence[Sequence[int]], rows: Sequence[int]) -> Tensor:
    """Return the tokens of ``rows`` in this order, out of ``parts`` with rows of these ``lengths``, counted through
    all."""
    every = [row for part, of_part in zip(parts, lengths, strict=True) for row in part.split(of_part)]
    return torch.cat([parts[0][:0], *(every[row] for row in rows)])


def batch_from_rows(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]] | None = None,
    *,
    group_id: Sequence[int] | None = None,
    row_id: Sequence[int] | None = None,
    trajectory_id: Sequence[int] | None = None,
    weight_version: int | Sequence[int] = 0,
    truncated: Sequence[bool] | None = None,
    rewards: Sequence[float] | None = None,
    sampled: Sequence[Sequence[bool] | None] | None = None,
    turn_rewards: Sequence[Sequence[float] | None] | None = None,
    expert_choices: Sequence[Tensor | None] | None = None,
    choices: ChoiceShape | None = None,
) -> RolloutBatch:
    """Pack rows given as lists. Rewards default to 0; without ``group_id`` or ``row_id`` each row is on its own, and
    without ``trajectory_id`` a trajectory.

    ``sampled``: which tokens of a response were; None: all. ``turn_rewards``: of each row's first turns, where
    batches have them. With ``choices`` the batch has ``expert_choices``.
    """
    count = len(prompts)
    lengths = torch.tensor([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)], dtype=torch.int64)
    tokens = [token for p, r in zip(prompts, responses, strict=True) for token in (*p, *r)]
    marks = sampled or [None] * count
    of_responses = [of_row or [True] * len(r) for of_row, r in zip(marks, responses, strict=True)]
    mask = [flag for p, flags in zip(prompts, of_responses, strict=True) for flag in (*[False] * len(p), *flags)]
    given = logprobs if logprobs is not None else [[0.0] * len(r) for r in responses]
    reported = [value for p, row in zip(prompts, given, strict=True) for value in [0.0] * len(p) + list(row)]
    of_turns = None
    if turn_rewards is not None:
        of_turns = _on_turns(torch.tensor(mask, dtype=torch.bool), lengths, turn_rewards)
    versions = [weight_version] * count if isinstance(weight_version, int) else list(weight_version)
    return RolloutBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        cu_seqlens=boundaries(lengths),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_logprobs=torch.tensor(reported, dtype=torch.float32),
        rewards=torch.tensor([0.0] * count if rewards is None else list(rewards), dtype=torch.float32),
        group_id=torch.tensor(range(count) if group_id is None else group_id, dtype=torch.int64),
        row_id=torch.tensor(range(count) if row_id is None else row_id, dtype=torch.int64),
        weight_version=torch.tensor(versions, dtype=torch.int64),
        truncated=torch.tensor([False] * count if truncated is None else truncated, dtype=torch.bool),
        trajectory_id=None if trajectory_id is None else torch.tensor(trajectory_id, dtype=torch.int64),
        turn_rewards=of_turns,
        expert_choices=choices.of_rows(lengths.tolist(), expert_choices or [None] * count) if choices else None,
    )


def no_rows(choices: ChoiceShape | None, has_turn_rewards: bool) -> RolloutBatch:
    """Return a batch without rows, with the fields of those that have some."""
    return batch_from_rows([], [], [], turn_rewards=[] if has_turn_rewards else None, choices=choices)
