"""Times vLLM's scheduler and output processor alone, with and without ours in them, by one thread of a CPU.

    python tools/bench/scheduling.py [--sequences 256] [--steps 2400] [--output docs/results/scheduling.json]

All sequences are in the cache and sample a token at each step; there is no model, and what it would have sampled is
made up. The two take turns of 100 steps, and a ratio is that of a pair of turns. Seconds are those of the processor,
which others on the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reports import spread, write_report
from rich.console import Console
from rich.table import Table

from rlhf_megatron.compat.vllm import block_allocation, logprobs, steady_steps
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

MODEL = Path(__file__).resolve().parents[2] / "recipes" / "models" / "qwen2.5-0.5b"
BLOCK_SIZE, TURN, PROMPT = 16, 100, 64
PARTS = ("schedule", "update_from_output", "process_outputs")


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=2400, help="of each of the two (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    prepare_environment()
    rows = [measure(options.sequences, options.steps, caches) for caches in (True, False)]
    show(rows)
    if options.output:
        settings = {"sequences": options.sequences, "steps": options.steps, "block_size": BLOCK_SIZE}
        write_report(options.output, {"settings": settings, "rows": rows})
    return 0


class LoneScheduler:
    """vLLM's scheduler and output processor without an engine around them.

    Attributes:
        own: vLLM's scheduler.
        states: what vLLM's output processor has of each request.
        seconds: of the processor, spent in ``PARTS``.
    """

    def __init__(
        self,
        sequences: int,
        blocks: int,
        caches: bool,
        ahead: bool = True,
        tokens: int = 8192,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """Make one that takes so many ``sequences`` at a time, and ``tokens`` in a step.

        Args:
            sequences: the most that run.
            blocks: those of the cache, with the one that vLLM leaves empty.
            caches: share blocks of equal prefixes.
            ahead: plan a step before the tokens of the one before are there.
            tokens: the most in a step, and of a sequence.
            windows: of each kind of layer the tokens that it attends to; None for all.
        """
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = EngineArgs(
            model=str(MODEL),
            skip_tokenizer_init=True,
            max_model_len=tokens,
            max_num_seqs=sequences,
            max_num_batched_tokens=tokens,
            enable_prefix_caching=caches,
            async_scheduling=ahead,
            block_size=BLOCK_SIZE,
        ).create_engine_config()
        groups = [KVCacheGroupSpec([f"layer {row}"], _cache_of(window)) for row, window in enumerate(windows)]
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        config.cache_config.num_gpu_blocks = blocks
        init_none_hash(sha256)
        self._hashes = get_request_block_hasher(BLOCK_SIZE, sha256) if caches else None
        kind = AsyncScheduler if ahead else Scheduler
        self.own: Any = kind(config, cache, StructuredOutputManager(config), block_size=BLOCK_SIZE)
        self._processor = OutputProcessor(None, log_stats=False)
        self.states: dict[str, Any] = self._processor.request_states
        self._begun: deque[Any] = deque()
        self._ahead = int(ahead)
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def add(self, name: str, prompt: Sequence[int], most: int, stops: Sequence[int] = ()) -> None:
        """Have a request wait that samples ``most`` tokens, or up to one of ``stops``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request

        parameters = SamplingParams(
            max_tokens=most, ignore_eos=True, stop_token_ids=list(stops), detokenize=False, logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        request = EngineCoreRequest(
            request_id=name, external_req_id=name, prompt_token_ids=list(prompt), mm_features=None,
            sampling_params=parameters, pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
            data_parallel_rank=None,
        )  # fmt: skip
        self._processor.add_request(request, None)
        self.states[name].logprobs_processor = logprobs.SampledLogprobs()
        self.own.add_request(Request.from_engine_core_request(request, self._hashes))

    def abort(self, name: str) -> None:
        """Have no more of a request."""
        from vllm.v1.request import RequestStatus

        self._processor.abort_requests([name], internal=True)
        self.own.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, sample: Callable[[Any, str], list[int]]) -> tuple[Any, list[Any]]:
        """Return what vLLM plans, and vLLM's outputs of requests that end in the step whose tokens are there.

        ``sample`` gives the tokens of a request by a plan of vLLM's. Parts of a prompt have none. A logprob is a
        hundredth of the token.
        """
        planned = self._timed(0, self.own.schedule)
        whole = {name for name in planned.num_scheduled_tokens if not self.own.requests[name].is_prefill_chunk}
        self._begun.append((planned, whole))
        if len(self._begun) <= self._ahead:
            return planned, []
        of_step, whole = self._begun.popleft()
        tokens = {name: sample(of_step, name) if name in whole else [] for name in of_step.num_scheduled_tokens}
        outputs = self._timed(1, self.own.update_from_output, of_step, _output_of(tokens))
        of_requests = outputs[0].outputs if outputs else []
        return planned, self._timed(2, self._processor.process_outputs, of_requests).request_outputs

    def _timed(self, part: int, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()
        result = call(*arguments)
        self.seconds[PARTS[part]] += time.thread_time() - began
        return result


def _cache_of(window: int | None) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**sizes, sliding_window=window) if window else FullAttentionSpec(**sizes)


def _output_of(tokens: Mapping[str, list[int]]) -> Any:
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    sampled = np.array([[token] for row in tokens.values() for token in row])
    begins = np.cumsum([0, *map(len, tokens.values())]).tolist()
    return ModelRunnerOutput(
        req_ids=list(tokens),
        req_id_to_index={name: row for row, name in enumerate(tokens)},
        sampled_token_ids=list(tokens.values()),
        logprobs=LogprobsLists(sampled, sampled / 100, sampled[:, 0], begins) if len(sampled) else None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def measure(sequences: int, steps: int, caches: bool) -> dict[str, Any]:
    """Return microseconds of a step by vLLM's own and by ours, and how many times as fast ours is."""
    length = PROMPT + steps + 2 * TURN
    blocks = sequences * (length // BLOCK_SIZE + 1) + 1
    with contextlib.ExitStack() as stack:
        both = []
        for ours in (False, True):
            both.append(LoneScheduler(sequences, blocks, caches, tokens=max(length, sequences * PROMPT)))
            for row in range(sequences):  # begun at different places of a block
                both[-1].add(str(row), [row % 7 + 1] * (PROMPT - row % BLOCK_SIZE), length)
            if ours:
                stack.enter_context(block_allocation.only_where_needed(both[-1].own))
                stack.enter_context(steady_steps.taken_at_once(both[-1].own, both[-1].states))
            stack.enter_context(logprobs.kept_as_numbers(both[-1].own, on_gpu=False))
        gc.collect()
        gc.freeze()  # as a run's start does
        turns = [[_turn(each) for each in both] for _ in range(steps // TURN + 1)][1:]  # without the prompts'
    report: dict[str, Any] = {"prefix_caching": caches}
    for part in (*PARTS, "all"):
        taken = [[_microseconds(of, part) for of in pair] for pair in turns]
        vllm, ours = (statistics.median(column) for column in zip(*taken, strict=True))
        report[part] = {"vllm": vllm, "ours": ours, "times_as_fast": spread([theirs / own for theirs, own in taken])}
    return report


def _turn(scheduler: LoneScheduler) -> dict[str, float]:
    scheduler.seconds = dict.fromkeys(PARTS, 0.0)
    for _ in range(TURN):
        scheduler.step(lambda *_: [5])
    return scheduler.seconds


def _microseconds(seconds: Mapping[str, float], part: str) -> float:
    return 1e6 / TURN * (sum(seconds.values()) if part == "all" else seconds[part])


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table on stdout."""
    table = Table("prefix caching", "part", "vLLM's, µs", "ours, µs", "times as fast", "least", "most")
    for row in rows:
        for part in (*PARTS, "all"):
            times = [f"{row[part]['times_as_fast'][name]:.2f}" for name in ("median", "min", "max")]
            table.add_row(
                str(row["prefix_caching"]), part, *(f"{row[part][name]:.0f}" for name in ("vllm", "ours")), *times
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
