"""Keeping of a step's rows in rollouts/step-N.parquet, and in the trackers that show tables."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.data.row_numbers import RowNumbers, SpreadRows
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.durable import whole_file
from rlhf_megatron.generation.score_notes import ScoreNotes
from rlhf_megatron.monitor.kept_rows import HELD, NUMBERS, OUTPUTS, digest_of, kept_table
from rlhf_megatron.recipe import RLRecipe
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.exchange import from_rank, gather_bytes


def keep_rollouts(
    context: RunContext[RLRecipe],
    tokenizer: Tokenizer,
    rows: SpreadRows,
    outputs: Sequence[RolloutBatch],
    notes: ScoreNotes,
    step: int,
) -> pa.Table | None:
    """Write the chosen rows of a step and return them, on the rank that reports; collective over the world.

    ``outputs``: what the actor made of rows, on the ranks that answer for a data-parallel rank; of the same row the
    latest counts.
    """
    chosen = chosen_rows(rows.numbers, context.recipe.monitor.rollouts.rows)
    held = _gathered(held_table(rows.select(chosen).here()))
    wanted = set(rows.numbers.row_id[chosen].tolist())
    computed = _gathered(
        pa.concat_tables([OUTPUTS.empty_table(), *(outputs_table(_only(each, wanted)) for each in outputs)])
    )
    digests = from_rank(held["digest"].to_pylist() if held else [])
    noted = _gathered(notes.table(digests))
    if held is None or computed is None or noted is None:
        return None
    table = kept_table(held, computed, noted, step, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    path = context.folder.rollout_file(step)
    try:
        path.parent.mkdir(exist_ok=True)
        with whole_file(path) as partial:
            pq.write_table(table, partial, compression="zstd")
    except OSError as error:  # a full disk costs what people read, not the run
        context.say(f"warning: no rollouts of step {step} were written: {error.strerror or error}")
    return table


def chosen_rows(numbers: RowNumbers, most: int) -> Tensor:
    """Return [R] bool: the first groups that have together at most so many rows, and the first one in any case."""
    groups = numbers.group_id
    ids, sizes = groups.unique(return_counts=True)
    first = int((sizes.cumsum(0) <= most).sum().clamp(min=1))
    return torch.isin(groups, ids[:first])


def held_table(batch: RolloutBatch) -> pa.Table:
    """Return the rows of a batch, in the columns of ``HELD``; lists have a value for each token, prompts included."""
    tokens, of_turns = _by_row(batch.tokens, batch), batch.turn_rewards
    columns = {
        **{name: getattr(batch, name).tolist() for name in NUMBERS},
        "digest": [digest_of(row) for row in tokens],
        "reward": batch.rewards.tolist(),
        "truncated": batch.truncated.tolist(),
        "tokens": tokens,
        "sampled": _by_row(batch.response_mask, batch),
        "rollout_logprobs": _by_row(batch.rollout_logprobs, batch),
        "turn_rewards": [None] * batch.rows if of_turns is None else _by_row(of_turns, batch),
    }
    return pa.table(columns, schema=HELD)


def outputs_table(batch: RolloutBatch) -> pa.Table:
    """Return outputs of the actor for rows, in the columns of ``OUTPUTS``: logprobs from before the update,
    advantages."""
    logprobs, advantages = (
        _by_row(values, batch) if values is not None else [None] * batch.rows
        for values in (batch.old_logprobs, batch.advantages)
    )
    columns = {"row_id": batch.row_id.tolist(), "trainer_logprobs": logprobs, "advantages": advantages}
    return pa.table(columns, schema=OUTPUTS)


def _by_row(values: Tensor, batch: RolloutBatch) -> list[list[Any]]:
    return [row.tolist() for row in values.cpu().split(batch.lengths.tolist())]


def _only(batch: RolloutBatch, row_ids: set[int]) -> RolloutBatch:
    """Return those rows of a batch that have these ids."""
    return batch.select([index for index, row_id in enumerate(batch.row_id.tolist()) if row_id in row_ids])


def _gathered(table: pa.Table) -> pa.Table | None:
    """Return all ranks' rows in the order of the ranks, on rank 0; collective."""
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    parts = [pa.ipc.open_stream(part).read_all() for part in gather_bytes(stream.getvalue())]
    return pa.concat_tables(parts) if parts else None
