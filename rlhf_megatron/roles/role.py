"""A role: one Megatron model in its layout, which computes per-token or per-row outputs and, if it learns, takes steps.

What is read of the model is an ``Output`` (``outputs.py``), what it is trained towards an ``Objective`` given by the
caller, so nothing here knows an algorithm. Every rank of a role calls every method, with its data-parallel rank's share
of the rows; the share's outputs come back on every rank that has it.

Here: the order in which the parts of a role act. The parts are the model (``model_shard``), passes over a batch
(``passes``), the optimizer (``trainer``), memory off the device (``offload``) and sums over ranks (``reduction``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.packing import MicroBatch
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.repeated_keys import install_shared_prompts
from rlhf_megatron.models.router_replay import install_replay
from rlhf_megatron.models.weight_source import WeightSource
from rlhf_megatron.recipe import OptimizerSection, RoleSection
from rlhf_megatron.regather.plan import ShardSpec
from rlhf_megatron.roles.beside import Beside
from rlhf_megatron.roles.model_shard import ModelShard
from rlhf_megatron.roles.offload import RoleMemory
from rlhf_megatron.roles.outputs import SCORES, VALUES, Objective, Output, TokenLogprobs, TokenOutputs
from rlhf_megatron.roles.passes import Passes
from rlhf_megatron.roles.reduction import CollectedOutputs, RoleReduction, StepLoss
from rlhf_megatron.roles.trainer import Trainer
from rlhf_megatron.topology.layout import Layout


class Role:
    """One model over the role's ranks; made on all of them together, as is every call of its methods.

    Attributes:
        shard: this rank's part of the model.
        trainer: its optimizer, or None where the role does not learn.
        memory: brings back what is off the device, for those who read the optimizer's state.
        totals: of what its data-parallel ranks have shares of.
        output: of its model by default: values of a scalar head, logprobs and entropy of a language head.
    """

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
        replays_experts: bool = False,
        shares_prompts: bool = False,
        span: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
    ) -> None:
        """Set up; without ``optimizer`` the model is frozen. Weights are unset until ``load``.

        ``deterministic``: kernels that give the same bits each time, where ``prepare_environment`` was told so too.
        ``replays_experts``: routers take the experts that a batch's ``expert_choices`` name.
        ``shares_prompts``: rows that begin with one prompt compute it once where they go together.
        ``span``: records the parts of an update.
        """
        self.name, self.architecture, self.layout, self.section = name, architecture, layout, section
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.shard = shard = ModelShard(
            name, architecture, layout, ranks, section, dtype, seed, deterministic, shares_prompts, optimizer=optimizer
        )
        self.ranks, self.groups = shard.ranks, shard.groups
        self.trainer = Trainer(optimizer, shard, dtype, training_steps) if optimizer is not None else None
        chunks = self.trainer.chunks if self.trainer and not shard.adapters else shard.chunks
        replayed = install_replay(architecture, shard.chunks) if replays_experts else ()
        if shares_prompts:
            install_shared_prompts(shard.chunks)
        self._passes = Passes(architecture, layout, shard.config, shard.groups, chunks, replayed, shares_prompts)
        self.memory = RoleMemory(section.offload, chunks, self.trainer)
        self.totals = self._reduction = RoleReduction(shard.groups, shard.ranks, self.device)
        self.output = _default_output(shard, temperature, section)
        self._span = span

    def offload(self) -> None:
        """Free the device of what ``section.offload`` names, until a method of the role needs it."""
        self.memory.leave()

    # ---- weights

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's live parameters by Megatron's names."""
        self.memory.come_back("parameters")
        self.memory.settle()
        return self.shard.parameters()

    def shard_spec(self) -> ShardSpec:
        """Return the rectangles that each rank of the role holds, as one end of a regathering."""
        return self.shard.spec()

    def load(self, source: WeightSource, adapters: WeightSource | None = None) -> None:
        """Fill this rank's parameters; the optimizer's own copies follow.

        Where the role has adapters they are filled from ``adapters``, by default with new ones, and merged.
        """
        self.read_weights(source, adapters)
        self.apply_weights()

    def read_weights(self, source: WeightSource, adapters: WeightSource | None = None) -> None:
        """Do the first half of ``load``, in which this rank exchanges nothing.

        Raises ModelError where what is read cannot be this rank's, or is not finite in the role's type.
        """
        self.memory.come_back()
        self.shard.read(source, adapters)

    def apply_weights(self) -> None:
        """Do the second half of ``load``: merge adapters, and update the optimizer's own copies."""
        if self.shard.adapters:
            self.shard.adapters.begin(self.parameters())
        if self.trainer is not None:
            self.memory.unpark()
            self.trainer.optimizer.reload_model_params()

    def merge_adapters(self) -> None:
        """Update the weights to adapters that were written to; nothing where there are none."""
        if self.shard.adapters:
            self.shard.adapters.merge(self.parameters())

    # ---- computing

    def own_rows(self, lengths: Tensor, rows_together: int = 1) -> list[int]:
        """Return this data-parallel rank's share of rows of these lengths, of which every rank has all."""
        return self._passes.own_rows(lengths, rows_together)

    def base_logprobs(self, batch: RolloutBatch) -> TokenOutputs:
        """Return ``logprobs`` of the model without its adapters, by its own choice of experts: it is a reference."""
        assert self.shard.adapters is not None, f"{self.name} has no adapters"
        with self.shard.adapters.left_out(self.parameters()):
            return self.logprobs(batch.with_fields(expert_choices=None))

    def logprobs(self, batch: RolloutBatch) -> TokenOutputs:
        """Return logprob and entropy of every sampled token of ``batch``, without gradients; of a language head."""
        return TokenOutputs(*self._compute(batch, self.output))

    def values(self, batch: RolloutBatch) -> Tensor:
        """Return [T] float32 on the CPU, without gradients, 0 on tokens that were not sampled; of a scalar head.

        As with logprobs, the value at position t belongs to token t as the predicted one: it is what the model says of
        the row up to token t - 1, before token t was sampled.
        """
        return self._compute(batch, VALUES)[0]

    def scores(self, batch: RolloutBatch) -> Tensor:
        """Return [R] float32 on the CPU, without gradients: what a scalar head says at each row's last token.

        A row that ends with the padding token (where it is also the end token) is read before it: so do Hugging Face's
        classes for sequence classification, which look for the last token that is not padding.
        """
        return self._compute(batch, SCORES)[0]

    def _compute(self, batch: RolloutBatch, output: Output) -> Tensor:
        """Return [count, T], or [count, R] of an output per row, on the CPU."""
        self.memory.come_back("parameters")
        self.memory.expect_passes()
        budget = self.section.forward_tokens
        collected: CollectedOutputs = []

        def collect(outputs: tuple[Tensor, ...], micro: MicroBatch) -> Tensor:
            collected.append((micro.batch_indices, torch.stack(outputs)))
            return outputs[0].sum() * 0

        with torch.no_grad():
            self._passes.run(batch, {}, budget, output, collect, forward_only=True)
        size = batch.rows if output.per_row else len(batch.tokens)
        return self._reduction.gather_outputs(collected, output.count, size)

    # ---- learning

    def update(
        self,
        batch: RolloutBatch,
        fields: dict[str, Tensor],
        objective: Objective,
        *,
        output: Output | None = None,
        rows_together: int = 1,
        outputs: Tensor | None = None,
        beside: Beside | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step on all shares; ``fields`` are the objective's inputs, [T] each ([R] for scores).

        ``output``: the objective's input; default: logprobs and entropy of a language head, values of a scalar one.
        ``rows_together``: so many rows that follow each other reach the objective together and in order, such as the
        two of a pair.
        ``outputs``: [count, T] on the CPU, filled with the outputs of this step's forward passes.
        ``beside``: learns in the same forward passes from what they give, and takes its own step; its metrics come with
        these.

        Returns the objective's metrics over all shares (sum / count), ``loss``, ``grad_norm``, ``learning_rate``, and
        ``imbalance`` of its packing.
        A step whose gradient is not finite, or whose norm is above ``skip_grad_norm``, is skipped and reported as
        ``skipped`` = 1; ``trainer.take_bad_gradients`` then says why, or which parameters' gradients on which ranks.
        In float16 the passes are made again where the loss's scale was too high, which ``loss_scale`` is.
        """
        budget, loss = self.section.update_tokens, StepLoss(objective, keeps_outputs=outputs is not None)
        read = output or self.output
        run_passes = functools.partial(
            self._passes.run,
            batch,
            fields,
            budget,
            read,
            loss,
            rows_together=rows_together,
            forward_only=False,
            beside=beside,
        )
        if beside:
            beside.begin(batch)
        step = self._take_step(run_passes, loss, beside)
        metrics = loss.metrics | (beside.take_step() if beside else {})
        if outputs is not None:  # not before: it waits for the GPU
            outputs.copy_(self._reduction.gather_outputs(loss.outputs, *outputs.shape))
        return self._reduction.mean_metrics(metrics) | step

    def take_times_ms(self) -> dict[str, float]:
        """Return this rank's milliseconds in updates since the last call, by part: ``forward_time``,
        ``backward_time`` (``Passes.take_times_ms``) and ``gradient_sync`` (``Trainer.take_gradient_sync_ms``)."""
        forward, backward = self._passes.take_times_ms()
        sync = self.trainer.take_gradient_sync_ms() if self.trainer else 0.0
        return {"gradient_sync_ms": sync, "forward_time_ms": forward, "backward_time_ms": backward}

    def begin_step(self) -> float:
        """Have all on the device that a step needs, or on its way; return the step's learning rate."""
        assert self.trainer is not None, f"{self.name} does not learn"
        self.memory.come_back("parameters", "gradients")
        self.memory.expect_passes()
        self.memory.fetch("optimizer")
        return self.trainer.set_learning_rate()

    def end_step(self) -> tuple[float, bool]:
        """Sum gradients over ranks and take the optimizer's step; return (the norm, whether the step was taken).

        For gradients that Megatron's schedule, which sums them in ``update``, has not made.
        """
        assert self.trainer is not None, f"{self.name} does not learn"
        config: Any = self.shard.config
        config.finalize_model_grads_func(self.trainer.chunks, None, pg_collection=self.groups)
        self.memory.come_back("optimizer")
        norm = self.trainer.gradient_norm()
        return norm, self.trainer.step(norm)

    def _take_step(
        self, run_passes: Callable[[], dict[str, float]], loss: StepLoss, beside: Beside | None
    ) -> dict[str, float]:
        """Run the passes of a step and the optimizer; return their metrics, without those of the objective."""
        rate, trainer = self.begin_step(), self.trainer
        assert trainer is not None
        is_accepted = False
        while not is_accepted:
            loss.clear()
            trainer.zero_gradients()
            if beside:
                beside.clear()
            with self._span("gradients"):
                balance = run_passes()
            with self._span("optimizer"):
                self.memory.come_back("optimizer")
                grad_norm = trainer.gradient_norm()
                is_accepted = not trainer.scale_was_too_high(grad_norm)
                if is_accepted:
                    is_taken = trainer.step(grad_norm)
                    if is_taken:
                        self.merge_adapters()
        step = {"grad_norm": grad_norm, "learning_rate": rate, "skipped": float(not is_taken)}
        if trainer.loss_scale:
            step["loss_scale"] = trainer.loss_scale.value
        return balance | step


def _default_output(shard: ModelShard, temperature: float, section: RoleSection) -> Output:
    """Return values of a scalar head, logprobs and entropy of a language head."""
    if shard.architecture.head == "scalar":
        return VALUES
    kept_bytes = int(section.kept_logits * 2**30)
    vocabulary, scales = shard.architecture.vocabulary, shard.architecture.scales
    divisor = temperature / (scales.logits or 1.0)
    return TokenLogprobs(shard.groups.tp, vocabulary, divisor, kept_bytes, scales.logit_cap)
