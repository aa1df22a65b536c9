"""A role: one Megatron model in its layout, which computes per-token or per-row outputs and, if it learns, takes steps.

What is read of the model is an ``Output`` (``outputs.py``), what it is trained towards an ``Objective`` given by the
caller, so nothing here knows an algorithm. Every rank of a role calls every method, with the same batch; outputs for
the whole batch come back on every rank.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from rlhf_megatron.data.batch import RolloutBatch
from rlhf_megatron.data.packing import MicroBatch, make_micro_batch, plan_micro_batches
from rlhf_megatron.models.architecture import Architecture, transformer_config
from rlhf_megatron.models.build import build_model, choose_implementation
from rlhf_megatron.models.hf_files import WeightSource, load_blocks
from rlhf_megatron.models.weight_map import Block, Implementation, megatron_blocks
from rlhf_megatron.recipe import OptimizerSection, RoleSection
from rlhf_megatron.recipe.errors import UserError
from rlhf_megatron.roles.outputs import SCORES, VALUES, Output, Scalars, TokenLogprobs
from rlhf_megatron.roles.schedule import learning_rate
from rlhf_megatron.runtime import faults
from rlhf_megatron.runtime.health import describe_nonfinite_gradients
from rlhf_megatron.topology.layout import Layout, make_groups
from rlhf_megatron.topology.megatron_groups import as_world

# (each tensor [n] of the output, fields [n]) -> (loss, summed over tokens or rows that carry their global weight;
# metrics as (sum, count) pairs). A policy's objective gets (logprobs, entropy, fields), a critic's (values, fields).
Objective = Callable[..., tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]]


@dataclasses.dataclass(frozen=True)
class TokenOutputs:
    """Per-token results for a whole batch, on the CPU of every rank; 0 on tokens that were not sampled."""

    logprobs: Tensor  # [T] float32
    entropy: Tensor  # [T] float32


class Role:
    """One model over the role's ranks; made on all of them together, as is every call of its methods."""

    def __init__(
        self,
        name: str,
        architecture: Architecture,
        layout: Layout,
        ranks: Sequence[int],
        section: RoleSection,
        *,
        dtype: str,
        seed: int,
        temperature: float = 1.0,
        optimizer: OptimizerSection | None = None,
        training_steps: int = 1,
    ) -> None:
        """Without ``optimizer`` the model is frozen. Weights are unset until ``load``."""
        self.name, self.architecture, self.layout, self.section = name, architecture, layout, section
        architecture.check_layout(layout)
        groups = make_groups(layout, ranks)
        assert groups is not None, "a role on a part of the world is built by its own ranks only"
        self.groups: Any = groups
        self.ranks = list(ranks)
        self.position = self.ranks.index(dist.get_rank())
        self._output: Output = (
            VALUES
            if architecture.head == "scalar"
            else TokenLogprobs(self.groups.tp, architecture.vocabulary, temperature)
        )
        self.steps_taken = 0
        self.bad_gradients = ""
        self._training_steps = training_steps
        self._optimizer_section = optimizer
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.implementation = self._choose_implementation()
        self.config = transformer_config(
            architecture,
            layout,
            dtype,
            sequence_parallel=section.sequence_parallel,
            recompute_granularity=section.recompute.granularity,
            recompute_layers=section.recompute.layers,
            fused=self.implementation == "transformer_engine",
        )
        self._alignment = layout.tensor if self.config.sequence_parallel else 1
        self.module = build_model(architecture, self.config, groups, self.implementation, seed)
        self._model: Any = self.module
        self._optimizer: Any = None
        if optimizer is None:
            self.module.requires_grad_(False).eval()
        else:
            self._make_trainable(optimizer, dtype)
        self._communicator = P2PCommunicator(pp_group=self.groups.pp, config=self.config)

    def _choose_implementation(self) -> Implementation:
        """Whose layers; raises UserError where the section needs Transformer Engine's and they are not there."""
        section, advice = self.section, "; it is not installed here, or there is no GPU"
        chosen = choose_implementation(section.transformer_implementation)
        if chosen == "transformer_engine" and choose_implementation("auto") != chosen:
            raise UserError(f"{self.name}.transformer_implementation needs Transformer Engine{advice}: set it to auto")
        if section.sequence_parallel and self.layout.tensor > 1 and chosen == "local":
            raise UserError(f"{self.name}.sequence_parallel needs Transformer Engine's layers{advice}: set it to false")
        return chosen

    def _make_trainable(self, section: OptimizerSection, dtype: str) -> None:
        self.module.train()
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=section.distributed, check_for_nan_in_grad=False
        )
        self._model = DistributedDataParallel(self.config, ddp_config, self.module, pg_collection=self.groups)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=section.learning_rate,
            min_lr=section.min_learning_rate,
            weight_decay=section.weight_decay,
            adam_beta1=section.beta1,
            adam_beta2=section.beta2,
            adam_eps=section.epsilon,
            clip_grad=section.clip_grad,
            params_dtype=getattr(torch, dtype),
            bf16=dtype == "bfloat16",
            use_distributed_optimizer=section.distributed,
        )
        with as_world(self.groups.intra_dist_opt):
            self._optimizer = get_megatron_optimizer(
                settings,
                [self._model],
                config_overrides=get_standard_config_overrides(settings),  # no weight decay on norms and biases
                use_gloo_process_groups=False,
                pg_collection=self.groups,
            )
        self.config.grad_scale_func = self._optimizer.scale_loss
        # Losses carry their global weights already, so the token count that Megatron would divide by is left out.
        self.config.finalize_model_grads_func = lambda model, _tokens, **kwargs: finalize_model_grads(
            model, None, **kwargs
        )

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer, or None where the role does not learn; for ``state`` alone."""
        return self._optimizer

    # ---- weights

    def parameters(self) -> dict[str, Tensor]:
        """This rank's live parameters by Megatron's names."""
        return {name: parameter.data for name, parameter in self.module.named_parameters()}

    def blocks(self, position: int | None = None) -> list[Block]:
        """Which rectangles of which Hugging Face tensors the rank at ``position`` (default: this one) holds."""
        place = self.position if position is None else position
        return megatron_blocks(self.architecture, self.layout, place, self.implementation)

    def load(self, source: WeightSource) -> None:
        """Fills this rank's parameters; the optimizer's own copies follow."""
        load_blocks(self.blocks(), self.parameters(), source)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    # ---- computing

    def logprobs(self, batch: RolloutBatch) -> TokenOutputs:
        """Logprob and entropy of every sampled token of ``batch``, without gradients; of a language head."""
        return TokenOutputs(*self._compute(batch, self._output))

    def values(self, batch: RolloutBatch) -> Tensor:
        """[T] float32 on the CPU of every rank, without gradients, 0 on tokens that were not sampled; of a scalar head.

        As with logprobs, the value at position t belongs to token t as the predicted one: it is what the model says of
        the row up to token t - 1, before token t was sampled.
        """
        return self._compute(batch, VALUES)[0]

    def scores(self, batch: RolloutBatch) -> Tensor:
        """[R] float32 on the CPU of every rank, without gradients: what a scalar head says at each row's last token.

        A row that ends with the padding token (where it is also the end token) is read before it: so do Hugging Face's
        classes for sequence classification, which look for the last token that is not padding.
        """
        return self._compute(batch, SCORES)[0]

    def _compute(self, batch: RolloutBatch, output: Output) -> Tensor:
        """[count, T], or [count, R] of an output per row, on the CPU of every rank."""
        budget = self.section.logprob_tokens_per_gpu or self.section.tokens_per_gpu
        found = torch.zeros(output.count, batch.rows if output.per_row else len(batch.tokens), device=self.device)

        def collect(parts: tuple[Tensor, ...], micro: MicroBatch) -> Tensor:
            found[:, micro.places.to(self.device)] = torch.stack(parts)
            return parts[0].sum() * 0

        with torch.no_grad():
            self._run(batch, {}, budget, output, collect, forward_only=True)
        if self.groups.tp.rank() or not self._is_last_stage():
            found.zero_()  # each token counts once in the sum below
        dist.all_reduce(found, group=self.groups.intra_dist_opt)
        return found.cpu()

    def update(
        self,
        batch: RolloutBatch,
        fields: dict[str, Tensor],
        objective: Objective,
        *,
        output: Output | None = None,
        rows_together: int = 1,
    ) -> dict[str, float]:
        """One optimizer step on ``batch``; ``fields`` are the objective's inputs, [T] each ([R] for scores).

        ``output``: what the objective gets; default: logprobs and entropy of a language head, values of a scalar one.
        ``rows_together``: so many rows that follow each other reach the objective together and in order, such as the
        two of a pair.

        Returns the objective's metrics over the whole batch (sum / count), ``loss``, ``grad_norm``, ``learning_rate``.
        A step whose gradient is not finite is skipped and reported as ``skipped`` = 1; ``bad_gradients`` then says
        which parameters' gradients on which ranks.
        """
        assert self._optimizer is not None and self._optimizer_section is not None, f"{self.name} does not learn"
        totals: dict[str, Tensor] = {}

        def loss_of(parts: tuple[Tensor, ...], micro: MicroBatch) -> Tensor:
            loss, metrics = objective(*parts, micro.fields)
            for name, pair in (metrics | {"loss": (loss.detach(), torch.zeros_like(loss))}).items():
                value = torch.stack([part.detach().double() for part in pair])
                totals[name] = totals[name] + value if name in totals else value
            return loss

        rate = learning_rate(self.steps_taken, self._optimizer_section, self._training_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        faults.spoil(self.module.parameters())
        self._run(
            batch,
            fields,
            self.section.tokens_per_gpu,
            output or self._output,
            loss_of,
            rows_together=rows_together,
            forward_only=False,
        )
        # Megatron looks for infinities under fp16's loss scaling only.
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        finite = math.isfinite(grad_norm)
        if finite:
            self._optimizer.step()
        else:
            self.bad_gradients = describe_nonfinite_gradients(
                self.module.named_parameters(), self.groups.intra_dist_opt
            )
        self.steps_taken += 1
        return self._reduced(totals) | {
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "skipped": float(not finite),
        }

    def _run(
        self,
        batch: RolloutBatch,
        fields: dict[str, Tensor],
        tokens_per_gpu: int,
        output: Output,
        loss_of: Callable[[tuple[Tensor, ...], MicroBatch], Tensor],
        *,
        rows_together: int = 1,
        forward_only: bool,
    ) -> None:
        """All micro-batches of this data-parallel rank through Megatron's schedule for the pipeline's depth.

        ``loss_of`` gets what ``output`` reads of each, on the last stage.
        """
        assert (self.architecture.head == "scalar") == isinstance(output, Scalars), f"{self.name} has another head"
        plan = plan_micro_batches(batch.lengths.tolist(), tokens_per_gpu, self.layout.data, rows_together)
        mine = plan[self.groups.dp.rank()]
        schedule = get_forward_backward_func(pp_size=self.layout.pipeline, vp_size=None)
        schedule(
            forward_step_func=functools.partial(self._forward_step, output=output, loss_of=loss_of),
            data_iterator=(
                make_micro_batch(
                    batch,
                    rows,
                    fields,
                    per_row=output.per_row,
                    pad_token_id=self.architecture.pad_token_id,
                    alignment=self._alignment,
                    device=self.device,
                )
                for rows in mine
            ),
            model=[self._model],
            num_microbatches=len(mine),
            seq_length=tokens_per_gpu,  # a hint only: shapes travel with the activations
            micro_batch_size=1,
            forward_only=forward_only,
            pg_collection=self.groups,
            p2p_communicator=self._communicator,
        )

    def _forward_step(
        self, micro_batches: Iterator[MicroBatch], model: Any, output: Output, loss_of: Callable[..., Tensor]
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        micro = next(micro_batches)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=micro.cu_seqlens,
            cu_seqlens_kv=micro.cu_seqlens,
            max_seqlen_q=micro.longest,
            max_seqlen_kv=micro.longest,
        )

        def finish(of_model: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            # Megatron wants a count of tokens too; the loss carries its weights already.
            return loss_of(output(of_model, micro), micro), torch.zeros([], dtype=torch.int), {}

        return model(micro.tokens[None], micro.positions[None], None, packed_seq_params=packed), finish

    def _is_last_stage(self) -> bool:
        return bool(self.groups.pp.rank() == self.layout.pipeline - 1)

    def _reduced(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """(sum, count) pairs, which only the last stage has, to means over the role, equal on all its ranks."""
        names: list[Any] = [sorted(totals)]
        dist.broadcast_object_list(names, src=self.ranks[-1], group=self.groups.intra_dist_opt)
        values = torch.zeros(len(names[0]), 2, dtype=torch.float64, device=self.device)
        if self._is_last_stage() and self.groups.tp.rank() == 0:
            for index, name in enumerate(names[0]):
                values[index] = totals[name]
        dist.all_reduce(values, group=self.groups.intra_dist_opt)
        return {
            name: float(total / count) if count else float(total)
            for name, (total, count) in zip(names[0], values.tolist(), strict=True)
        }
