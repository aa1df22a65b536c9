"""Speculative decoding in vLLM: our drafts behind its interface of custom drafters, and samples that no draft changes.

vLLM verifies drafts by rejection sampling with a request's generator, so what a seed samples depends on the drafts.
Here a token is drawn as without drafts, by noise of seed and position (``seeded_draw``), and a draft is accepted if it
is that token. The distribution is the target's, and a draft is accepted as often as by rejection sampling (with
probability p(draft), https://arxiv.org/abs/2211.17192). vLLM's older model runner, which alone takes custom drafters,
needs several kernels for each seeded request; this takes a few for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_megatron.compat.patches import replacement
from rlhf_megatron.compat.vllm import draft_models, internals
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES
from rlhf_megatron.compat.vllm.seeded_draw import draw
from rlhf_megatron.kernels.token_logprob import token_logprobs

Draft = Callable[[str, NDArray[np.int32]], list[int]]
"""From vLLM's name of a request, and its tokens so far, to those that may follow."""
_REJECTED, _NO_DRAFT = -1, -2  # the first is vLLM's own


def configuration(count: int) -> dict[str, Any]:
    """Return vLLM's speculative_config for ``count`` drafted tokens."""
    return {
        "method": "custom_class",
        "model": f"{CustomDrafter.__module__}.{CustomDrafter.__qualname__}",
        "num_speculative_tokens": count,
    }


def model_configuration(method: str, count: int, folder: str | None) -> dict[str, Any]:
    """Return vLLM's speculative_config for ``count`` tokens drafted by a model: that of ``folder``, or a layer of the
    target's."""
    model = {} if folder is None else {"model": folder}
    return {"method": method, "num_speculative_tokens": count, **model}


@dataclasses.dataclass
class SpeculationCounts:
    """Outcome of drafts."""

    verifications: int = 0  # of a sequence with a draft, in a step
    drafted: int = 0  # tokens
    accepted: int = 0


class CustomDrafter:
    """Speculator that vLLM makes of ``configuration``; it drafts nothing until ``bind``."""

    def __init__(self, vllm_config: Any) -> None:
        """Take vLLM's settings."""
        self._count = vllm_config.speculative_config.num_speculative_tokens
        self._longest = vllm_config.model_config.max_model_len
        self._draft: Draft | None = None

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: there are no weights."""

    def bind(self, runner: Any, draft: Draft, max_running: int, pads: bool = False) -> None:
        """Have ``draft`` asked while at most ``max_running`` sequences run; with ``pads`` each draft has its full
        length."""
        self._runner, self._draft, self._max_running, self._pads = runner, draft, max_running, pads
        # vLLM would leave out all drafts where one sequence is near its end; ``propose`` looks at each.
        runner.effective_drafter_max_model_len = self._longest + self._count

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each row of the batch; none for a prompt that is not whole yet."""
        if self._draft is None or len(sampled_token_ids) > self._max_running:
            return [[] for _ in sampled_token_ids]
        names = self._runner.input_batch.req_ids
        return [
            self._drafted(names[row], token_ids_cpu[row, : num_tokens_no_spec[row]]) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def _drafted(self, name: str, tokens: NDArray[np.int32]) -> list[int]:
        assert self._draft is not None
        draft = self._draft(name, tokens)
        if self._pads:
            draft = draft + [int(tokens[-1])] * (self._count - len(draft))
        return draft[: max(self._longest - len(tokens) - 1, 0)]


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM verifies drafts by numbers of the request's generator, so that what a seed samples depends on the drafts",
    upstream="https://github.com/vllm-project/vllm/issues/6038",
)
def install(engine: Any, draft: Draft | None, max_running: int, synthetic_length: float | None = None) -> SeededSampler:
    """Have a new LLMEngine speculate, by ``draft`` where it was made with ``configuration``; see
    ``CustomDrafter.bind`` and ``SeededSampler``."""
    runner = internals.model_runner(engine)
    if draft is None:
        draft_models.draft_while_few_run(runner, max_running)
    else:
        runner.drafter.bind(runner, draft, max_running, pads=synthetic_length is not None)
    runner._sample = sampler = SeededSampler(runner, synthetic_length)
    return sampler


class SeededSampler:
    """Sampling of a model runner of vLLM's by noise of seed and position, which verifies drafts by comparison."""

    def __init__(self, runner: Any, synthetic_length: float | None = None) -> None:
        """Sample for ``runner``.

        For benchmarks, ``synthetic_length`` is how many tokens a drafted sequence gets of a step on average, as if so
        many drafts were right; what is sampled after a wrong one is then nobody's distribution.
        """
        self._runner, self._synthetic_length, self._steps = runner, synthetic_length, 0
        self._counts, self._accepted = SpeculationCounts(), torch.zeros((), dtype=torch.int64, device=runner.device)

    def take_counts(self) -> SpeculationCounts:
        """Return the counts since the last call."""
        counts = dataclasses.replace(self._counts, accepted=int(self._accepted))
        self._counts = SpeculationCounts()
        self._accepted.zero_()
        return counts

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
        table = places.table(tokens, _REJECTED)
        if spec_decode_metadata is not None:
            drafts = _Places.of(drafted, logits.device).table(spec_decode_metadata.draft_token_ids.long(), _NO_DRAFT)
            table = self._verified(table, drafts)
            self._count(drafted, table)
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

    def _verified(self, drawn: Tensor, drafts: Tensor) -> Tensor:
        """Return the tokens ``drawn`` [rows, longest draft + 1] up to the first of each row that is not its draft."""
        if self._synthetic_length is None:
            agrees = drawn[:, :-1] == drafts
        else:
            columns = torch.arange(drafts.shape[1], device=drafts.device)
            agrees = (columns < self._synthetic_drafts()) & (drafts != _NO_DRAFT)
        agreed = agrees.cumprod(1)
        return torch.cat((drawn[:, :1], torch.where(agreed == 1, drawn[:, 1:], _REJECTED)), 1)

    def _synthetic_drafts(self) -> int:
        """Return how many drafted tokens are to be accepted in this step."""
        assert self._synthetic_length is not None
        self._steps += 1
        return int(self._steps * (self._synthetic_length - 1)) - int((self._steps - 1) * (self._synthetic_length - 1))

    def _count(self, drafted: Sequence[int], table: Tensor) -> None:
        self._counts.verifications += sum(count > 0 for count in drafted)
        self._counts.drafted += sum(drafted)
        self._accepted += (table[:, 1:] != _REJECTED).sum()


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
