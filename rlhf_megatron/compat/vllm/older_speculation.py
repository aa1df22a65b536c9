"""Speculative decoding by vLLM's older model runner: our drafts behind its interface of custom drafters, and samples.

It needs several kernels for each seeded request; this takes a few for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_megatron.compat.patches import replacement
from rlhf_megatron.compat.vllm import draft_models
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES
from rlhf_megatron.compat.vllm.seeded_draw import draw
from rlhf_megatron.compat.vllm.verification import NO_DRAFT, REJECTED, Draft, TextDrafts, Verification
from rlhf_megatron.kernels.token_logprob import token_logprobs


class CustomDrafter:
    """Speculator that vLLM makes of ``speculation.configuration``; it drafts nothing until ``bind``."""

    def __init__(self, vllm_config: Any) -> None:
        """Take vLLM's settings."""
        self.count = vllm_config.speculative_config.num_speculative_tokens
        self.longest = vllm_config.model_config.max_model_len
        self.drafts: TextDrafts | None = None

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: there are no weights."""

    def bind(self, runner: Any, drafts: TextDrafts) -> None:
        """Have ``drafts`` asked."""
        self._runner, self.drafts = runner, drafts
        # vLLM would leave out all drafts where one sequence is near its end; ``TextDrafts`` looks at each.
        runner.effective_drafter_max_model_len = self.longest + self.count

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each row of the batch; none for a prompt that is not whole yet."""
        drafts = self.drafts
        if drafts is None or len(sampled_token_ids) > drafts.max_running:
            return [[] for _ in sampled_token_ids]
        names = self._runner.input_batch.req_ids
        return [
            drafts.of(names[row], token_ids_cpu[row, : num_tokens_no_spec[row]]) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM verifies drafts by numbers of the request's generator, so that what a seed samples depends on the drafts",
    upstream="https://github.com/vllm-project/vllm/issues/6038",
)
def speculate(runner: Any, draft: Draft | None, max_running: int, synthetic_length: float | None) -> SeededSampler:
    """Have a new runner speculate; see ``speculation.install``."""
    if draft is None:
        draft_models.draft_while_few_run(runner, max_running)
    else:
        drafter = runner.drafter
        pads = synthetic_length is not None
        drafter.bind(runner, TextDrafts(draft, max_running, drafter.count, drafter.longest, pads))
    runner._sample = sampler = SeededSampler(runner, synthetic_length)
    return sampler


class SeededSampler(Verification):
    """Sampling of vLLM's older model runner by noise of seed and position, which verifies drafts by comparison."""

    def __init__(self, runner: Any, synthetic_length: float | None = None) -> None:
        """Sample for ``runner``; ``synthetic_length`` is that of ``Verification``."""
        super().__init__(runner.device, synthetic_length)
        self._runner = runner

    def __call__(self, logits: Tensor, spec_decode_metadata: Any) -> Any:
        """Stand in for the runner's ``_sample``: ``logits`` [positions, vocabulary] of each row's drafts and one
        more."""
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        batch = self._runner.input_batch
        batch.generators.clear()  # unused, and vLLM would set them back where a prompt is not whole yet
        drafted = [0] * batch.num_reqs if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        places = _Places.of([count + 1 for count in drafted], logits.device)
        scores, temperature = _scores(logits.float(), batch.sampling_metadata, places)
        tokens = draw(scores, temperature, self._seeds(logits.device), places.rows, self._positions(places))
        table = places.table(tokens, REJECTED)
        if spec_decode_metadata is not None:
            drafts = _Places.of(drafted, logits.device).table(spec_decode_metadata.draft_token_ids.long(), NO_DRAFT)
            table = self.verified(table, drafts)
            self.count(drafted, table)
        logprobs = places.table(token_logprobs(scores, places.values(table).clamp(min=0)), 0)
        sampled = table.to(torch.int32)
        columns = sampled.view(-1, 1), logprobs.view(-1, 1), torch.zeros_like(sampled).view(-1)  # no ranks
        return SamplerOutput(sampled, LogprobsTensors(*columns))

    def _seeds(self, device: torch.device) -> Tensor:
        """Return [rows] int64; requests that are not ours may have none."""
        requests = self._runner.requests
        seeds = [requests[name].sampling_params.seed or 0 for name in self._runner.input_batch.req_ids]
        return torch.tensor(seeds, dtype=torch.int64).to(device, non_blocking=True)

    def _positions(self, places: _Places) -> Tensor:
        """Return [positions] int64: of the tokens whose logits these are."""
        batch = self._runner.input_batch
        known = torch.from_numpy(batch.num_tokens_no_spec[: batch.num_reqs].astype("int64"))
        return known.to(places.rows.device, non_blocking=True)[places.rows] + places.columns - 1


@dataclasses.dataclass(frozen=True)
class _Places:
    """Rows and columns, in a table of rows, of values that lie one after the other: [values] int64 each."""

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]

    @staticmethod
    def of(counts: Sequence[int], device: torch.device) -> _Places:
        """Return those of rows with ``counts`` values."""
        each = torch.tensor(counts, dtype=torch.int64)
        rows = torch.arange(len(each)).repeat_interleave(each)
        columns = torch.arange(len(rows)) - (each.cumsum(0) - each)[rows]
        return _Places(
            rows.to(device, non_blocking=True), columns.to(device, non_blocking=True), (len(each), max(counts))
        )

    def table(self, values: Tensor, padding: int) -> Tensor:
        """Return [rows, columns] of ``values``."""
        table = torch.full(self.shape, padding, dtype=values.dtype, device=values.device)
        table[self.rows, self.columns] = values
        return table

    def values(self, table: Tensor) -> Tensor:
        """Return [values] of ``table`` [rows, columns]."""
        return table[self.rows, self.columns]


def _scores(logits: Tensor, metadata: Any, places: _Places) -> tuple[Tensor, Tensor]:
    """Return (logits of the distribution to draw from, temperature of each row); may overwrite ``logits``."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    if metadata.all_greedy:
        return logits, torch.zeros(places.shape[0], device=logits.device)
    temperature, rows = metadata.temperature, places.rows
    logits.div_(torch.where(temperature == 0, 1.0, temperature)[rows, None])
    top_k, top_p = (None if limit is None else limit[rows] for limit in (metadata.top_k, metadata.top_p))
    return apply_top_k_top_p(logits, top_k, top_p), temperature
