"""Steps in which each running request samples one token and nothing else happens: most steps, where responses are long.

For each running request vLLM's scheduler plans a step in three loops, takes its token in by a fourth, and its output
processor has a fifth: some hundred lines of Python, which cost more than the GPU's part where a model is small or many
requests run. What is here does the same in two short loops. vLLM plans and takes in what is anything else: prompts,
preemption, drafts, the last token of a response.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rlhf_megatron.compat.patches import is_known, replacement
from rlhf_megatron.compat.vllm.block_allocation import CacheBlocks, keeps_all_tokens
from rlhf_megatron.compat.vllm.logprobs import SampledLogprobs
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES

# Fields of a plan that differ between steady steps; all others are empty in one.
_OF_STEP = {
    "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens", "num_common_prefix_blocks",
    "finished_req_ids", "free_encoder_mm_hashes",
}  # fmt: skip


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM goes through each running request in five loops of a step, also where each samples one token",
    upstream="https://github.com/vllm-project/vllm/issues/26114",
)
@contextlib.contextmanager
def taken_at_once(scheduler: Any, states: Mapping[str, Any]) -> Iterator[None]:
    """Have vLLM's ``scheduler`` plan steady steps, and take in what they sample, in one loop each.

    It plans the same steps with the same blocks. Tokens and logprobs go straight to ``states``, which vLLM's output
    processor has of requests and would put them into; requests must have ``SampledLogprobs``, and
    ``logprobs.kept_as_numbers`` is entered behind this. In a version that is not known, with drafts, with connectors,
    and for caches that are not of one kind that keeps all tokens, all is vLLM's own.
    """
    if not is_known(PACKAGES, **KNOWN) or not _is_plain(scheduler):
        yield
        return
    planner, taker = _Planner(scheduler), _Taker(scheduler, states)
    scheduler.schedule, scheduler.update_from_output = planner.schedule, taker.update_from_output
    try:
        yield
    finally:
        for name in ("schedule", "update_from_output"):
            vars(scheduler).pop(name, None)  # the class's own are there again


def _is_plain(scheduler: Any) -> bool:
    """Say whether nothing has a part in steps but the requests, their tokens and one kind of cache."""
    has_parts = (
        "num_spec_tokens", "connector", "ec_connector", "aux_output_connector", "enable_return_routed_experts",
        "return_sampling_mask", "defer_block_free", "use_pp", "needs_kv_cache_zeroing", "log_stats",
    )  # fmt: skip
    has_any = any(getattr(scheduler, each, None) for each in has_parts)
    return not has_any and keeps_all_tokens(scheduler.kv_cache_manager)


def _ahead_of_tokens(scheduler: Any) -> int:
    """Return how many tokens of a request are planned before the one before is there."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return int(isinstance(scheduler, AsyncScheduler))


def _counts_in_flight() -> bool:
    """Say whether this version counts tokens of a request that are planned and have not come back."""
    from vllm.v1.request import Request

    return "num_in_flight_tokens" in Request.__init__.__code__.co_names


class _Planner:
    """Plans of steady steps, each made of the one before."""

    def __init__(self, scheduler: Any) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self._scheduler, self._manager = scheduler, scheduler.kv_cache_manager
        self._blocks, self._unpaused = CacheBlocks(self._manager), PauseState.UNPAUSED
        self._ahead, self._counts_in_flight = _ahead_of_tokens(scheduler), _counts_in_flight()
        self._last_place = scheduler.max_model_len - scheduler.num_sampled_tokens_per_step - 1
        self._vllms = scheduler.schedule
        self._before: Any = None  # the plan before, if it was steady

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        """Return the plan of the next step, as vLLM's method of this name does."""
        planned = self._next() if self._before is not None else None
        if planned is None:
            planned = self._vllms(*arguments, **named)
            self._before = planned if _is_steady(planned) else None
        else:
            self._before = planned
        return planned

    def _next(self) -> Any:
        """Return the next plan, or None, and nothing has changed, where it is not steady."""
        scheduler = self._scheduler
        running, waiting = scheduler.get_request_counts()
        if waiting or running > scheduler.max_num_scheduled_tokens or scheduler.pause_state != self._unpaused:
            return None
        if scheduler.reset_preempted_req_ids:
            return None
        chosen = self._chosen(self._before.num_scheduled_tokens)
        if chosen is None:
            return None
        requests, places, counts = chosen
        new_blocks = self._allocate(requests, places)
        if new_blocks is None:
            return None
        scheduler.current_step += 1
        self._manager.new_step_starts()
        for request in requests:
            request.num_computed_tokens += 1
            request.num_output_placeholders += self._ahead
        if self._counts_in_flight:
            for request in requests:
                request.num_in_flight_tokens += 1
        return self._plan([request.request_id for request in requests], places, counts, new_blocks)

    def _chosen(self, before: Collection[str]) -> tuple[list[Any], list[int], list[int]] | None:
        """Return requests that sample a token, with how many are computed and how many it has sampled of each.

        None where there are none, or where one was not planned ``before`` or has more or less to compute than a token.
        """
        requests, places, counts = [], [], []
        for request in self._scheduler.running:
            pending, place = request.num_output_placeholders, request.num_computed_tokens
            if pending and place + 2 - pending >= request.num_prompt_tokens + request.max_tokens:
                continue  # its last token is on the way
            if request.request_id not in before or place > self._last_place or request.spec_token_ids:
                return None
            if request.num_tokens + pending - place != 1:
                return None
            requests.append(request)
            places.append(place)
            counts.append(request.num_output_tokens + pending)
        return (requests, places, counts) if requests else None

    def _allocate(self, requests: list[Any], places: list[int]) -> list[Any] | None:
        """Return new blocks of each request, None for none; None and nothing allocated where too few are free."""
        blocks, due, lacking = self._blocks, [], 0
        for row, (request, place) in enumerate(zip(requests, places, strict=True)):
            lacks = blocks.lack(request.request_id, place + 1)
            if lacks or blocks.end(request.request_id, place + 1):
                due.append(row)
                lacking += lacks
        if lacking > self._manager.block_pool.get_num_free_blocks():
            return None
        new_blocks: list[Any] = [None] * len(requests)
        for row in due:
            allocated = self._manager.allocate_slots(requests[row], 1)
            assert allocated is not None, "vLLM found no block where one was free"
            new_blocks[row] = allocated.get_block_ids(allow_none=True)
        return new_blocks

    def _plan(self, names: list[str], places: list[int], counts: list[int], new_blocks: list[Any]) -> Any:
        scheduler, before = self._scheduler, self._before
        more: dict[str, Any] = {}
        if getattr(before, "num_common_prefix_blocks", None):  # not in all versions
            first = scheduler.running[0].request_id
            more["num_common_prefix_blocks"] = self._manager.get_num_common_prefix_blocks(first)
        planned = dataclasses.replace(
            before,
            scheduled_cached_reqs=dataclasses.replace(
                before.scheduled_cached_reqs,
                req_ids=names,
                new_block_ids=new_blocks,
                num_computed_tokens=places,
                num_output_tokens=counts,
                all_token_ids={},
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            finished_req_ids=scheduler.finished_req_ids,
            free_encoder_mm_hashes=scheduler.encoder_cache_manager.get_freed_mm_hashes(),
            **more,
        )
        scheduler.finished_req_ids = set()
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.clear()
            scheduler.prev_step_scheduled_req_ids.update(names)
        return planned


def _is_steady(planned: Any) -> bool:
    """Say whether each request of a plan samples one token, and nothing else is in it."""
    if planned.total_num_scheduled_tokens != len(planned.num_scheduled_tokens) or not planned.num_scheduled_tokens:
        return False
    if planned.scheduled_cached_reqs.resumed_req_ids or planned.scheduled_cached_reqs.new_token_ids:
        return False
    return not any(getattr(planned, field.name) for field in dataclasses.fields(planned) if field.name not in _OF_STEP)


@dataclasses.dataclass(slots=True)
class _Followed:
    """A request whose tokens are taken in here.

    Attributes:
        request: vLLM's own.
        tokens: those that its output has.
        logprobs: likewise.
        stops: tokens that end it.
        most: tokens, with the prompt's, at which it ends.
    """

    request: Any
    tokens: list[int]
    logprobs: list[float]
    stops: frozenset[int]
    most: int


class _Taker:
    """Takes in the tokens of steps."""

    def __init__(self, scheduler: Any, states: Mapping[str, Any]) -> None:
        from vllm.v1.request import RequestStatus

        self._scheduler, self._states, self._vllms = scheduler, states, scheduler.update_from_output
        self._manager, self._running = scheduler.kv_cache_manager, RequestStatus.RUNNING
        self._ahead, self._counts_in_flight = _ahead_of_tokens(scheduler), _counts_in_flight()
        # Tokens on the way to a request that was preempted meanwhile.
        self._stale = "num_stale_output_tokens" if self._counts_in_flight else "async_tokens_to_discard"
        self._followed: dict[str, _Followed] = {}

    def update_from_output(self, planned: Any, output: Any) -> Any:
        """Take in what a step sampled, and return what vLLM's method of this name does of requests that need more."""
        if planned.scheduled_spec_decode_tokens or output.pooler_output or output.num_nans_in_logits:
            return self._vllms(planned, output)
        rest = {
            name: count
            for name, count in planned.num_scheduled_tokens.items()
            if not (count == 1 and self._takes(name, output))
        }
        return self._vllms(dataclasses.replace(planned, num_scheduled_tokens=rest), output)

    def _takes(self, name: str, output: Any) -> bool:
        """Take in a token of a request that goes on, and return True; else do nothing."""
        followed = self._followed.get(name) or self._follow(name)
        if followed is None:
            return False
        request, row = followed.request, output.req_id_to_index[name]
        sampled: Sequence[int] = output.sampled_token_ids[row] if output.sampled_token_ids else ()
        if (
            len(sampled) != 1
            or sampled[0] in followed.stops
            or request.num_tokens + 1 >= followed.most
            or request.status is not self._running
            or getattr(request, self._stale)
            or self._scheduler.requests.get(name) is not request
        ):
            del self._followed[name]
            return False
        request.append_output_token_ids(sampled[0])
        request.num_output_placeholders -= self._ahead
        if self._counts_in_flight:
            request.num_in_flight_tokens -= 1
        if self._manager.enable_caching:
            self._manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
        followed.tokens.append(sampled[0])
        if output.logprobs:
            followed.logprobs += output.logprobs.slice_request(row, 1)
        return True

    def _follow(self, name: str) -> _Followed | None:
        """Return a request from its second token on, None for one of which something else is wanted than its tokens."""
        request, state = self._scheduler.requests.get(name), self._states.get(name)
        if request is None or state is None or state.is_prefilling or not _wants_tokens_alone(request, state):
            return None
        sampling = request.sampling_params
        most = min(self._scheduler.max_model_len, request.num_prompt_tokens + request.max_tokens)
        stops = frozenset({sampling.eos_token_id, *(sampling.stop_token_ids or ())})
        logprobs = state.logprobs_processor.logprobs
        followed = _Followed(request, state.detokenizer.token_ids, logprobs, stops, most)
        self._followed[name] = followed
        return followed


def _wants_tokens_alone(request: Any, state: Any) -> bool:
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    sampling = request.sampling_params
    return (
        sampling is not None
        and not getattr(sampling, "repetition_detection", None)
        and not request.use_structured_output
        and not request.has_encoder_inputs
        and state.output_kind is RequestOutputKind.FINAL_ONLY
        and state.queue is None
        and type(state.detokenizer) is IncrementalDetokenizer
        and type(state.logprobs_processor) is SampledLogprobs
    )
