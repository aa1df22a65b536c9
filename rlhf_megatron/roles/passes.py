"""Passes over a batch: its rows in micro-batches through a model's schedule, forward and, if asked, backward.

What is read of the model and what becomes of it are given; this knows the packing and the layout alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhf_megatron.compat.transformer_engine import forget_quantized_weights
from rlhf_megatron.data.context_parallel import part_of
from rlhf_megatron.data.packing import (
    MicroBatch,
    assign_rows,
    make_micro_batch,
    one_token_later,
    plan_for_all,
    plan_micro_batches,
    row_costs,
)
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.data.shared_prompts import SharedPrefixes
from rlhf_megatron.models import fp8
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.build import deterministic_kernels
from rlhf_megatron.models.flops import attention_cost
from rlhf_megatron.models.packed_sequences import PackedSequences
from rlhf_megatron.monitor.stopwatch import Stopwatch
from rlhf_megatron.roles.beside import Beside
from rlhf_megatron.roles.outputs import Output, Scalars, joined
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.pipeline import PipelineLinks


class Passes:
    """Those of one rank's part of a model. ``run`` is collective over the model's ranks; those of a data-parallel rank
    have the same batch, its share of the rows."""

    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        config: TransformerConfig,
        groups: Any,
        chunks: Sequence[Any],
        replayed_layers: Sequence[int] = (),
        shares_prompts: bool = False,
    ) -> None:
        """Set up; ``chunks``: the model's pieces on this rank, one for each virtual pipeline stage.
        ``replayed_layers``: whose routers replay the batch's expert choices (``install_replay``). ``shares_prompts``: a
        prefix that rows of a micro-batch share is computed once (``install_shared_prompts``).
        """
        assert not shares_prompts or layout.context == 1, "context parallelism would cut rows in the middle of a prompt"
        self._replayed_layers, self._shares_prompts = replayed_layers, shares_prompts
        self._architecture, self._layout, self._config, self._groups = architecture, layout, config, groups
        self._chunks = list(chunks)
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self._attention_cost = attention_cost(architecture)
        self._row_alignment = 2 * layout.context if layout.context > 1 else 1
        of_rank = fp8.TOKENS if config.fp8 else self._row_alignment // layout.context
        self._alignment = of_rank * layout.context * (layout.tensor if config.sequence_parallel else 1)
        self._communicator = PipelineLinks(groups, config)
        self._training, self._forward = Stopwatch(), Stopwatch()  # of passes with gradients, and their forward part

    def run(
        self,
        batch: RolloutBatch,
        fields: dict[str, Tensor],
        tokens_per_gpu: int,
        output: Output,
        loss_of: Callable[[tuple[Tensor, ...], MicroBatch], Tensor],
        *,
        rows_together: int = 1,
        forward_only: bool,
        beside: Beside | None = None,
    ) -> dict[str, float]:
        """Run all micro-batches of ``batch`` through Megatron's schedule for the pipeline's depth.

        ``loss_of`` gets what ``output`` reads of each, on the last stage; before that, ``beside`` learns of it. Returns
        ``imbalance``, the largest cost of a data-parallel rank over the mean, and that of micro-batches; where prefixes
        are shared, which fraction of the rows' tokens that saves.
        """
        assert (self._architecture.head == "scalar") == isinstance(output, Scalars), "the model has another head"
        budget = tokens_per_gpu * self._layout.context
        chunks = len(self._chunks)
        # The interleaved schedule deals micro-batches of one length out, as many at a time as there are stages.
        multiple = self._layout.pipeline if chunks > 1 else 1
        assert rows_together == 1 or not self._shares_prompts, "rows of a prompt are in no order of their own"
        prefixes = SharedPrefixes.of_batch(batch) if self._shares_prompts else None
        own = self._plan(batch, budget, rows_together, multiple, prefixes)
        length = self._common_length(batch, own, prefixes) if chunks > 1 else self._alignment
        schedule = get_forward_backward_func(pp_size=self._layout.pipeline, vp_size=chunks if chunks > 1 else None)
        prepare = functools.partial(
            self._micro_batch,
            batch,
            fields=fields,
            per_row=output.per_row,
            alignment=length,
            prefixes=prefixes,
            follows=beside is not None,
        )
        iterators = [map(prepare, own) for _ in range(chunks)]
        step = functools.partial(
            self._forward_step, output=output, loss_of=loss_of, is_timed=not forward_only, beside=beside
        )
        with deterministic_kernels(self._config.deterministic_mode), _timed(self._training, not forward_only):
            schedule(
                forward_step_func=step,
                data_iterator=iterators if chunks > 1 else iterators[0],
                model=self._chunks,
                num_microbatches=len(own),
                seq_length=length,  # of one chunk a hint only: shapes travel with the activations
                micro_batch_size=1,
                forward_only=forward_only,
                pg_collection=self._groups,
                p2p_communicator=self._communicator,
            )
        if self._config.fp8:
            for chunk in self._chunks:
                forget_quantized_weights(chunk)
        return self._imbalance(batch, own, prefixes)

    def take_times_ms(self) -> tuple[float, float]:
        """Return this rank's milliseconds since the last call in the forward part of passes with gradients, and in
        the rest of them: backward, gradient reduction, waits for other pipeline stages. Waits for the device."""
        forward = self._forward.take()
        return forward, max(0.0, self._training.take() - forward)

    def own_rows(self, lengths: Tensor, rows_together: int = 1) -> list[int]:
        """Return this data-parallel rank's share of rows of which every rank has all, of these lengths."""
        owner = assign_rows(lengths, self._layout.data, None, rows_together, self._attention_cost)
        rows: list[int] = (owner == self._groups.dp.rank()).nonzero().squeeze(1).tolist()
        return rows

    def _plan(
        self,
        batch: RolloutBatch,
        budget: int,
        rows_together: int,
        multiple: int,
        prefixes: SharedPrefixes | None = None,
    ) -> list[list[int]]:
        """Return the rows of each micro-batch, as many as those of every other data-parallel rank."""

        def plan_of(at_least: int) -> list[list[int]]:
            if prefixes is not None:
                return prefixes.plan(budget, multiple, self._attention_cost, at_least)
            lengths = batch.lengths.tolist()
            return plan_micro_batches(lengths, budget, rows_together, multiple, self._attention_cost, at_least)

        return plan_for_all(plan_of, lambda count: int(self._over_shares([count], dist.ReduceOp.MAX)[0]))

    def _imbalance(
        self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], prefixes: SharedPrefixes | None
    ) -> dict[str, float]:
        if prefixes is None:
            costs = torch.from_numpy(row_costs(batch.lengths, self._attention_cost))
            of_micros, computed = [float(costs[list(rows)].sum()) for rows in micro_batches], len(batch.tokens)
        else:
            of_micros = [prefixes.cost(rows, self._attention_cost) for rows in micro_batches]
            computed = sum(map(prefixes.tokens, micro_batches))
        sums = [sum(of_micros), float(computed), float(len(batch.tokens))]
        total, computed_by_all, tokens = self._over_shares(sums, dist.ReduceOp.SUM)
        largest, largest_micro = self._over_shares([sum(of_micros), max(of_micros)], dist.ReduceOp.MAX)
        mean = max(total, 1.0) / self._layout.data
        metrics = {"imbalance": largest / mean, "imbalance_micro_batch": largest_micro / (mean / len(of_micros))}
        saved = {"shared_prompt_fraction": 1 - computed_by_all / max(tokens, 1.0)}
        return metrics if prefixes is None else metrics | saved

    def _over_shares(self, values: Sequence[float], operation: Any) -> list[float]:
        """Return ``values`` reduced over the data-parallel ranks."""
        reduced = torch.tensor(values, dtype=torch.float64, device=self._device)
        if self._layout.data > 1:
            dist.all_reduce(reduced, operation, self._groups.dp)
        result: list[float] = reduced.tolist()
        return result

    def _common_length(
        self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], prefixes: SharedPrefixes | None
    ) -> int:
        """Return a multiple of the alignment that the rows of every micro-batch fit into."""
        padded = -(-batch.lengths // self._row_alignment) * self._row_alignment
        longest = max(
            int(padded[list(rows)].sum()) if prefixes is None else prefixes.tokens(rows) for rows in micro_batches
        )
        return max(1, -(-longest // self._alignment)) * self._alignment

    def _micro_batch(
        self,
        batch: RolloutBatch,
        rows: Sequence[int],
        fields: dict[str, Tensor],
        per_row: bool,
        alignment: int,
        prefixes: SharedPrefixes | None = None,
        follows: bool = False,
    ) -> MicroBatch:
        """Return this rank's part of the micro-batch of ``rows``, padded to a multiple of ``alignment``; with
        ``follows`` also what it is one token later."""
        whole = make_micro_batch(
            batch,
            rows,
            fields,
            per_row=per_row,
            pad_token_id=self._architecture.pad_token_id,
            row_alignment=self._row_alignment,
            alignment=alignment,
            device=self._device,
            replayed_layers=self._replayed_layers,
            prefixes=prefixes,
        )
        parts, part = self._layout.context, self._groups.cp.rank()
        micro = part_of(whole, parts, part)
        return dataclasses.replace(micro, following=part_of(one_token_later(whole), parts, part)) if follows else micro

    def _choices_of_rank(self, micro: MicroBatch) -> Tensor | None:
        """Return the choices of the tokens that this rank's routers see: with sequence parallelism a part."""
        choices, groups = micro.expert_choices, self._groups
        if choices is None or not self._config.sequence_parallel:
            return choices
        return choices.chunk(groups.tp.size())[groups.tp.rank()]

    def _forward_step(
        self,
        micro_batches: Iterator[MicroBatch],
        model: Any,
        output: Output,
        loss_of: Callable[..., Tensor],
        is_timed: bool,
        beside: Beside | None,
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        micro = next(micro_batches)
        # Transformer Engine's context parallelism asks for the boundaries with padding, which here are the boundaries.
        padded = micro.cu_seqlens if self._layout.context > 1 else None
        keys = micro.keys
        packed = PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=micro.cu_seqlens,
            cu_seqlens_kv=micro.cu_seqlens if keys is None else keys.boundaries,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=micro.longest,
            max_seqlen_kv=micro.longest if keys is None else keys.longest,
            expert_choices=self._choices_of_rank(micro),
            positions=micro.positions,
            repeated=keys,
            parts=self._layout.context,
        )

        def read(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Tensor:
            if beside is not None and micro.following is not None:
                columns = output_layer.weight if output_weight is None else output_weight
                beside.learn(hidden_states.detach(), columns.detach(), micro.following, packed)
            return torch.stack(output(hidden_states, output_layer, output_weight, micro))

        def finish(parts: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            # Megatron wants a count of tokens too; the loss carries its weights already.
            with _timed(self._forward, is_timed):
                whole = joined(parts.unbind(), micro, self._groups.cp)
                return loss_of(whole, micro), torch.zeros([], dtype=torch.int), {}

        with _timed(self._forward, is_timed):
            of_model = model(
                micro.tokens[None], micro.positions[None], None, packed_seq_params=packed, output_processor=read
            )
        return of_model, finish


def _timed(stopwatch: Stopwatch, is_timed: bool) -> contextlib.AbstractContextManager[None]:
    return stopwatch.running() if is_timed else contextlib.nullcontext()
