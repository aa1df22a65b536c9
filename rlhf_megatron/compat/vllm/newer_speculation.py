"""Speculative decoding by vLLM's newer model runner: drafts of text among its speculators, and samples.

Drafts of text are made on the host, from the scheduler's tokens, between two steps; those of a model stay on the GPU.
The runner draws by noise of seed and position, so only its verification of drafts is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.compat.patches import patch, replacement
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES
from rlhf_megatron.compat.vllm.seeded_draw import draw_as_newer_runner
from rlhf_megatron.compat.vllm.verification import NO_DRAFT, REJECTED, Draft, TextDrafts, Verification

_OURS = "custom_class"  # the method of speculation.configuration


@patch(
    *PACKAGES,
    **KNOWN,
    why="vLLM's newer runner drafts by models alone (later versions also by n-grams), and a start with other drafts "
    "falls back to the older runner",
    upstream="https://github.com/vllm-project/vllm/issues/45397",
)
def take_drafts_of_text() -> None:
    """Have vLLM's newer runner take drafts of ours, which it gets between steps."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import model_runner

    unsupported, init = VllmConfig._get_v2_model_runner_unsupported_features, model_runner.init_speculator

    def unsupported_but_ours(config: Any) -> list[str]:
        return [feature for feature in unsupported(config) if feature != f"speculative method '{_OURS}'"]

    def init_speculator(vllm_config: Any, device: torch.device, *more: Any) -> Any:
        if vllm_config.speculative_config.method == _OURS:
            return _text_speculator()(vllm_config, device)
        return init(vllm_config, device, *more)

    VllmConfig._get_v2_model_runner_unsupported_features = unsupported_but_ours
    model_runner.init_speculator = init_speculator


@patch(
    *PACKAGES,
    **KNOWN,
    why="vLLM 0.25 fails as it captures graphs of a model that drafts, where there are no drafts for some numbers of "
    "sequences: it takes the tokens of a drafting step for those of a verification, less the drafts",
    upstream="https://github.com/vllm-project/vllm/issues/48494",
)
def capture_drafting_steps() -> None:
    """Have the graphs of steps that draft, which take a token of each sequence, not follow the schedule of drafts."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    init = CudaGraphManager._init_candidates

    def init_candidates(manager: Any) -> None:
        speculative = manager.vllm_config.speculative_config
        if speculative is None or manager.decode_query_len > speculative.num_speculative_tokens:
            init(manager)
            return
        schedule = speculative.num_speculative_tokens_per_batch_size
        speculative.num_speculative_tokens_per_batch_size = None
        try:
            init(manager)
        finally:
            speculative.num_speculative_tokens_per_batch_size = schedule

    CudaGraphManager._init_candidates = init_candidates


def _text_speculator() -> type:
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class TextSpeculator(BaseSpeculator):  # type: ignore[misc]
        """Speculator that proposes nothing in a step; drafts are put in its place afterwards."""

        supports_mm_inputs, draft_logits = False, None
        model = torch.nn.Module()  # vLLM 0.25 looks at its layers

        def __init__(self, vllm_config: Any, device: torch.device) -> None:
            """Take vLLM's settings."""
            count = vllm_config.speculative_config.num_speculative_tokens
            most = vllm_config.scheduler_config.max_num_seqs
            self._nothing = torch.zeros(most, count, dtype=torch.int64, device=device)

        def init_cudagraph_manager(self, *_: Any, **__: Any) -> None:
            """Do nothing: there are no graphs."""

        def capture(self, *_: Any, **__: Any) -> None:
            """Do nothing: there are no graphs."""

        def propose(self, input_batch: Any, *_: Any, **__: Any) -> Tensor:
            """Return as many tokens [sequences, longest draft] as drafts have."""
            return self._nothing[: input_batch.num_reqs]

    return TextSpeculator


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM verifies drafts by other noise than it draws with, so that what a seed samples depends on the drafts",
    upstream="https://github.com/vllm-project/vllm/issues/6038",
)
def speculate(
    runner: Any, scheduler: Any, draft: Draft | None, max_running: int, synthetic_length: float | None
) -> SeededVerification:
    """Have a new runner speculate; see ``speculation.install``. ``scheduler`` is vLLM's, with the requests' tokens."""
    if draft is None:
        runner.take_draft_token_ids = drafts = ModelDrafts(runner, max_running)
        runner.speculator.propose = drafts.propose
    else:
        count, longest = runner.num_speculative_steps, runner.max_model_len
        text = TextDrafts(draft, max_running, count, longest, pads=synthetic_length is not None)
        runner.take_draft_token_ids = HostDrafts(runner, scheduler, text)
    runner.rejection_sampler = verification = SeededVerification(runner, synthetic_length)
    return verification


class HostDrafts:
    """Function that stands in for ``take_draft_token_ids`` of a runner, and makes drafts of text then."""

    def __init__(self, runner: Any, scheduler: Any, drafts: TextDrafts) -> None:
        """Make ``drafts`` for ``runner``."""
        self._runner, self._scheduler, self.drafts = runner, scheduler, drafts

    def __call__(self) -> Any:
        """Return vLLM's DraftTokenIds for the requests of the last step, after bringing them to the GPU."""
        taken = self._runner.draft_tokens_handler.get_draft_tokens()
        drafts: dict[str, list[int]] = {}
        if len(taken.req_ids) <= self.drafts.max_running:
            drafts = self._drafts({name: self._scheduler.requests.get(name) for name in taken.req_ids})
        taken.draft_token_ids = [drafts.get(name, []) for name in taken.req_ids]
        self._bring(drafts)
        return taken

    def _drafts(self, requests: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return a draft for each request that samples, all of full length: a CUDA graph takes rows of one length."""
        tokens = {
            name: request.all_token_ids
            for name, request in requests.items()
            if request is not None and not request.is_finished() and not request.is_prefill_chunk
        }
        drafts = {name: self.drafts.of(name, of_request) for name, of_request in tokens.items()}
        if not any(drafts.values()):
            return {}
        return {name: self.drafts.padded(draft, tokens[name]) for name, draft in drafts.items()}

    def _bring(self, drafts: Mapping[str, list[int]]) -> None:
        states = self._runner.req_states
        drafted = [(states.req_id_to_index[name], draft) for name, draft in drafts.items() if draft]
        if not drafted:
            return
        rows = torch.tensor([row for row, _ in drafted])
        table = torch.zeros(len(drafted), self.drafts.count, dtype=torch.int64)
        for place, (_, draft) in enumerate(drafted):
            table[place, : len(draft)] = torch.tensor(draft)
        tokens: Tensor = states.draft_tokens
        tokens[rows.to(tokens.device, non_blocking=True)] = table.to(tokens.device, non_blocking=True)


class ModelDrafts:
    """Function that stands in for ``take_draft_token_ids`` of a runner whose drafts a model makes, while few sequences
    run."""

    def __init__(self, runner: Any, max_running: int) -> None:
        """Take drafts of ``runner`` for at most ``max_running`` sequences."""
        self._take: Callable[[], Any] = runner.take_draft_token_ids
        self._speculator, self._propose, self.max_running = runner.speculator, runner.speculator.propose, max_running
        self._has_count = "num_speculative_tokens" in inspect.signature(self._propose).parameters

    def __call__(self) -> Any:
        """Return vLLM's DraftTokenIds; while more run there are none."""
        taken = self._take()
        if len(taken.req_ids) > self.max_running:
            taken.draft_token_ids = [[] for _ in taken.req_ids]
        return taken

    def propose(self, input_batch: Any, *arguments: Any, **named: Any) -> Tensor:
        """Stand in for the speculator's; while more sequences run, its cache is kept up, and one token drafted."""
        if input_batch.num_reqs <= self.max_running:
            drafts: Tensor = self._propose(input_batch, *arguments, **named)
            return drafts
        if self._has_count:
            return self._propose(input_batch, *arguments, **named | {"num_speculative_tokens": 1})
        steps = self._speculator.num_speculative_steps
        self._speculator.num_speculative_steps = 1
        try:
            return self._propose(input_batch, *arguments, **named)
        finally:
            self._speculator.num_speculative_steps = steps


class SeededVerification(Verification):
    """Verification in a runner; stands in for its ``rejection_sampler``."""

    def __init__(self, runner: Any, synthetic_length: float | None = None) -> None:
        """Verify for ``runner``."""
        super().__init__(runner.device, synthetic_length)
        self._of_vllm = runner.rejection_sampler

    def __call__(self, logits: Tensor, input_batch: Any, *more: Any, **named: Any) -> Any:
        """Return vLLM's SamplerOutput for ``logits`` [positions, vocabulary] of each row's drafts and one more."""
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        drafted = input_batch.num_draft_tokens_per_req.tolist()
        original = rejection_sampler.rejection_sample
        rejection_sampler.rejection_sample = self._verify
        try:
            output = self._of_vllm(logits, input_batch, *more, **named)
        finally:
            rejection_sampler.rejection_sample = original
        self.count(drafted, output.sampled_token_ids)
        return output

    def _verify(
        self,
        scores: Tensor,
        draft_logits: Tensor | None,
        inputs: Tensor,
        begins: Tensor,
        positions: Tensor,
        rows: Tensor,
        row_of_each: Tensor,
        place_of_each: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        longest: int,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return (tokens [rows, longest draft + 1], how many of each row count), as vLLM's ``rejection_sample``.

        Args:
            scores: [positions, vocabulary] of the distributions to draw from.
            inputs: [positions], the token before each: behind a row's first it is a draft.
            begins: [rows + 1], where a row's positions begin.
        """
        drawn = draw_as_newer_runner(scores, temperature, seeds, row_of_each, positions)
        places = begins[:-1, None] + torch.arange(longest + 1, device=begins.device)
        within = places.clamp(max=len(drawn) - 1)
        drafts = torch.where(places[:, 1:] < begins[1:, None], inputs[within[:, 1:]].long(), NO_DRAFT)
        table = self.verified(drawn[within], drafts)
        return table, (table != REJECTED).sum(1, dtype=torch.int32)
