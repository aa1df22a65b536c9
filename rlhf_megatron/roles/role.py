"""A role: one Megatron model in its layout, which computes per-token or per-row outputs and, if it learns, takes steps.

What is read of the model is an ``Output`` (``outputs.py``), what it is trained towards an ``Objective`` given by the
caller, so nothing here knows an algorithm. Every rank of a role calls every method, with the same batch; outputs for
the whole batch come back on every rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.packing import MicroBatch
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.build import build_model, choose_implementation
from rlhf_megatron.models.hf_files import WeightSource, load_blocks
from rlhf_megatron.models.transformer_config import transformer_config
from rlhf_megatron.models.weight_map import Block, megatron_blocks
from rlhf_megatron.monitor.stopwatch import Stopwatch
from rlhf_megatron.recipe import OptimizerSection, RoleSection
from rlhf_megatron.regather.plan import ShardSpec
from rlhf_megatron.regather.shard_specs import trainer_shards
from rlhf_megatron.roles.adapters import Adapters
from rlhf_megatron.roles.learning import make_learning
from rlhf_megatron.roles.learning_rate import learning_rate
from rlhf_megatron.roles.loss_scale import LossScale
from rlhf_megatron.roles.offload import RoleMemory
from rlhf_megatron.roles.outputs import SCORES, VALUES, Objective, Output, TokenLogprobs, TokenOutputs
from rlhf_megatron.roles.passes import Passes
from rlhf_megatron.runtime import faults
from rlhf_megatron.runtime.finite import describe_nonfinite, nonfinite_gradients
from rlhf_megatron.topology.layout import Layout, make_groups


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
        deterministic: bool = False,
        span: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
    ) -> None:
        """Without ``optimizer`` the model is frozen. Weights are unset until ``load``.

        ``deterministic``: kernels that give the same bits each time, where ``prepare_environment`` was told so too.
        ``span``: what the parts of an update are recorded by.
        """
        self.name, self.architecture, self.layout, self.section = name, architecture, layout, section
        architecture.check_layout(layout)
        groups = make_groups(layout, ranks)
        assert groups is not None, "a role on a part of the world is built by its own ranks only"
        self.groups: Any = groups
        self.ranks = list(ranks)
        self.position = self.ranks.index(dist.get_rank())
        kept_bytes = int(section.kept_logits * 2**30)
        self._output: Output = (
            VALUES
            if architecture.head == "scalar"
            else TokenLogprobs(self.groups.tp, architecture.vocabulary, temperature, kept_bytes)
        )
        self.steps_taken = 0
        self.bad_gradients = ""
        self._training_steps = training_steps
        self._span = span
        self._optimizer_section = optimizer
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.implementation = choose_implementation(section.transformer_implementation, name, layout, dtype)
        self.config = transformer_config(
            architecture,
            layout,
            dtype,
            sequence_parallel=section.sequence_parallel,
            cp_comm_type=section.cp_comm_type,
            recompute_granularity=section.recompute.granularity,
            recompute_layers=section.recompute.layers,
            fused=self.implementation == "transformer_engine",
            deterministic=deterministic,
        )
        self._chunks: list[Any] = list(build_model(architecture, self.config, groups, self.implementation, seed))
        # Parameters of several chunks are named by the chunk's number first.
        self.module: torch.nn.Module = self._chunks[0] if len(self._chunks) == 1 else torch.nn.ModuleList(self._chunks)
        self.adapters = self._make_adapters(seed)
        self._learning: list[Any] = []  # Megatron's DistributedDataParallel, of the chunks or of their adapters
        self._optimizer: Any = None
        self.loss_scale = LossScale() if dtype == "float16" and optimizer is not None else None
        self._gradient_sync = Stopwatch()
        if optimizer is None or self.adapters:
            self.module.requires_grad_(False).eval()
        if optimizer is not None:
            self._make_trainable(optimizer, dtype)
        self._passes = Passes(architecture, layout, self.config, groups, self._chunks)
        self._memory = RoleMemory(section.offload, self._chunks, self._learning, self._optimizer)

    def _make_adapters(self, seed: int) -> Adapters | None:
        """What learns in place of the weights, where the recipe asks for that."""
        lora = self.section.adapters
        if lora is None:
            return None
        return Adapters(
            lora,
            self.architecture,
            self.layout,
            self.ranks,
            self.position,
            self._chunks,
            self.blocks(),
            seed,
            self.groups,
        )

    def _make_trainable(self, section: OptimizerSection, dtype: str) -> None:
        self.module.train()
        adapters = self.adapters
        self._learning, self._optimizer = make_learning(
            section,
            self.config,
            adapters.chunks if adapters else self._chunks,
            self.learning_groups,
            "float32" if adapters else dtype,
            self._gradient_sync,
            adapters is not None,
        )
        if adapters is None:
            self._chunks = self._learning
        self.config.grad_scale_func = self.loss_scale.scaled if self.loss_scale else None

    @property
    def learning(self) -> torch.nn.Module:
        """What holds the parameters that learn: the model, or its adapters."""
        return self.adapters.module if self.adapters else self.module

    def learning_blocks(self) -> list[Block]:
        """As ``blocks``, of what learns: rectangles of Hugging Face tensors, or of the adapters' A and B."""
        return self.adapters.blocks() if self.adapters else self.blocks()

    @property
    def learning_layout(self) -> Layout:
        """The layout of what learns on the role's ranks."""
        return self.adapters.layout if self.adapters else self.layout

    @property
    def learning_groups(self) -> Any:
        """The process groups of ``learning_layout``."""
        return self.adapters.groups if self.adapters else self.groups

    def take_gradient_sync_ms(self) -> float:
        """For how long this rank did nothing but sum its gradients with others', the wait for these included, since
        the last call; waits for the device."""
        return self._gradient_sync.take()

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer, or None where the role does not learn; for ``state`` alone. All of it is on the device
        but what is streamed (see ``master_weights``)."""
        self._memory.come_back()
        self._memory.park()
        return self._optimizer

    def master_weights(self, main: Tensor) -> Tensor:
        """What has the content of one of the optimizer's parameters between steps: itself, or a tensor of the host."""
        return self._memory.master_weights(main)

    def offload(self) -> None:
        """Frees the device of what ``section.offload`` names, until a method of the role needs it."""
        self._memory.leave()

    # ---- weights

    def parameters(self) -> dict[str, Tensor]:
        """This rank's live parameters by Megatron's names."""
        self._memory.come_back("parameters")
        return {name: parameter.data for name, parameter in self.module.named_parameters()}

    def blocks(self, position: int | None = None) -> list[Block]:
        """Which rectangles of which Hugging Face tensors the rank at ``position`` (default: this one) holds."""
        place = self.position if position is None else position
        return megatron_blocks(self.architecture, self.layout, place, self.implementation)

    def side(self) -> ShardSpec:
        """What all ranks of the role hold, as one end of a regathering."""
        return trainer_shards(self.architecture, self.layout, self.ranks, self.implementation)

    def load(self, source: WeightSource, adapters: WeightSource | None = None) -> None:
        """Fills this rank's parameters; the optimizer's own copies follow.

        Where the role has adapters they are filled from ``adapters``, by default with new ones, and merged.
        """
        self.read(source, adapters)
        self.begin()

    def read(self, source: WeightSource, adapters: WeightSource | None = None) -> None:
        """The first half of ``load``, in which this rank exchanges nothing.

        Raises ModelError where what is read cannot be this rank's, or is not finite in the role's type.
        """
        self._memory.come_back()
        load_blocks(self.blocks(), self.parameters(), source)
        if self.adapters:
            self.adapters.read(adapters)

    def begin(self) -> None:
        """The second half of ``load``: adapters and the optimizer's own copies follow what was read."""
        if self.adapters:
            self.adapters.begin(self.parameters())
        if self._optimizer is not None:
            self._memory.unpark()
            self._optimizer.reload_model_params()

    def merge_adapters(self) -> None:
        """Has the weights follow adapters that were written to; nothing where there are none."""
        if self.adapters:
            self.adapters.merge(self.parameters())

    # ---- computing

    def base_logprobs(self, batch: RolloutBatch) -> TokenOutputs:
        """``logprobs`` of the model without its adapters."""
        assert self.adapters is not None, f"{self.name} has no adapters"
        with self.adapters.left_out(self.parameters()):
            return self.logprobs(batch)

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
        self._memory.come_back("parameters")
        budget = self.section.logprob_tokens_per_gpu or self.section.tokens_per_gpu
        found: list[tuple[Tensor, Tensor]] = []

        def collect(parts: tuple[Tensor, ...], micro: MicroBatch) -> Tensor:
            found.append((micro.places, torch.stack(parts)))
            return parts[0].sum() * 0

        with torch.no_grad():
            self._passes.run(batch, {}, budget, output, collect, forward_only=True)
        return self._on_all_ranks(found, output.count, batch.rows if output.per_row else len(batch.tokens))

    def _on_all_ranks(self, found: Sequence[tuple[Tensor, Tensor]], count: int, size: int) -> Tensor:
        """[count, size]: what the ranks at the end of the model have ``found``, on the CPU of every rank of the role.

        Of each micro-batch: the places [n] and what belongs there, [count, n].
        """
        everywhere = torch.zeros(count, size, device=self.device)
        if self._speaks():  # each token counts once in the sum below
            for places, values in found:
                everywhere[:, places] = values
        dist.all_reduce(everywhere, group=self.groups.intra_dist_opt)
        return everywhere.cpu()

    def update(
        self,
        batch: RolloutBatch,
        fields: dict[str, Tensor],
        objective: Objective,
        *,
        output: Output | None = None,
        rows_together: int = 1,
        outputs: Tensor | None = None,
    ) -> dict[str, float]:
        """One optimizer step on ``batch``; ``fields`` are the objective's inputs, [T] each ([R] for scores).

        ``output``: what the objective gets; default: logprobs and entropy of a language head, values of a scalar one.
        ``rows_together``: so many rows that follow each other reach the objective together and in order, such as the
        two of a pair.
        ``outputs``: [count, T] on the CPU, to be filled with what this step's forward passes say.

        Returns the objective's metrics over the whole batch (sum / count), ``loss``, ``grad_norm``, ``learning_rate``,
        and ``imbalance`` of its packing.
        A step whose gradient is not finite, or whose norm is above ``skip_grad_norm``, is skipped and reported as
        ``skipped`` = 1; ``bad_gradients`` then says why, or which parameters' gradients on which ranks. In float16 the
        passes are made again where the loss's scale was too high, which ``loss_scale`` is.
        """
        assert self._optimizer is not None and self._optimizer_section is not None, f"{self.name} does not learn"
        totals: dict[str, Tensor] = {}
        found: list[tuple[Tensor, Tensor]] = []

        def loss_of(parts: tuple[Tensor, ...], micro: MicroBatch) -> Tensor:
            if outputs is not None:  # of this rank's tokens: a large cluster's would take the activations' room
                found.append((micro.places, torch.stack(parts).detach()))
            loss, metrics = objective(*parts, micro.fields)
            for name, pair in (metrics | {"loss": (loss.detach(), torch.zeros_like(loss))}).items():
                value = torch.stack([part.detach().double() for part in pair])
                totals[name] = totals[name] + value if name in totals else value
            return loss

        self._memory.come_back("parameters", "gradients")
        self._memory.fetch("optimizer")
        rate = learning_rate(self.steps_taken, self._optimizer_section, self._training_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        read, budget = output or self._output, self.section.tokens_per_gpu
        finite = False
        while not finite:
            totals.clear()
            found.clear()
            self._forget_gradients()
            with self._span("gradients"):
                balance = self._passes.run(
                    batch, fields, budget, read, loss_of, rows_together=rows_together, forward_only=False
                )
            with self._span("optimizer"):
                self._memory.come_back("optimizer")
                grad_norm = self._gradient_norm()
                finite = self.loss_scale is None or not self.loss_scale.was_too_high(grad_norm)
                if finite:
                    taken = self._step(grad_norm)
        if outputs is not None:  # not before: it waits for the GPU
            outputs.copy_(self._on_all_ranks(found, *outputs.shape))
        step = {"grad_norm": grad_norm, "learning_rate": rate, "skipped": float(not taken)}
        if self.loss_scale:
            step["loss_scale"] = self.loss_scale.value
        return self._reduced(totals) | balance | step

    def _forget_gradients(self) -> None:
        for chunk in self._learning:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        faults.spoil(self.learning.parameters())

    def _gradient_norm(self) -> float:
        """Of all gradients, which the optimizer has then; not finite where one is not."""
        if self.loss_scale:
            self.loss_scale.unscale(self._learning)
        # Megatron looks for infinities under a loss scale of its own only.
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def _step(self, grad_norm: float) -> bool:
        """Whether the optimizer took its step: not where the gradients' norm is not finite or too high."""
        assert self._optimizer_section is not None
        highest = self._optimizer_section.skip_grad_norm or math.inf
        taken = math.isfinite(grad_norm) and grad_norm <= highest
        if taken:
            self._optimizer.step()
            faults.spoil_weights(self.learning.parameters())
            self.merge_adapters()
        elif math.isfinite(grad_norm):
            self.bad_gradients = f"its norm {grad_norm:.4g} is above optimizer.skip_grad_norm={highest:g}"
        else:
            self.bad_gradients = "not finite: " + describe_nonfinite(
                nonfinite_gradients((name.replace("/", "."), each) for name, each in self.learning.named_parameters()),
                self.groups.intra_dist_opt,
            )
        self.steps_taken += 1
        return taken

    def _speaks(self) -> bool:
        """Whether what this rank has at the end of the model counts: others of its model have the same, or nothing."""
        last_stage = self.groups.pp.rank() == self.layout.pipeline - 1
        return bool(last_stage and self.groups.tp.rank() == self.groups.cp.rank() == 0)

    def _reduced(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """(sum, count) pairs, which only the last stage has, to means over the role, equal on all its ranks."""
        names: list[Any] = [sorted(totals)]
        dist.broadcast_object_list(names, src=self.ranks[-1], group=self.groups.intra_dist_opt)
        values = torch.zeros(len(names[0]), 2, dtype=torch.float64, device=self.device)
        if self._speaks():
            for index, name in enumerate(names[0]):
                values[index] = totals[name]
        dist.all_reduce(values, group=self.groups.intra_dist_opt)
        return {
            name: float(total / count) if count else float(total)
            for name, (total, count) in zip(names[0], values.tolist(), strict=True)
        }
