"""Rollout throughput: beside vLLM's own LLM.generate on one replica, and with replicas beside a static split.

    python tools/bench/rollout.py [--replicas 4] [--model recipes/models/qwen2.5-7b] [--output FILE.json]

Random weights, prompts of several lengths, and responses whose lengths are drawn from a lognormal distribution with a
tenfold spread (the 95th percentile over the 5th), half of it common to the responses to one prompt. In one run:

- one replica: our ``generate`` and LLM.generate on the same requests, in turn;
- all replicas, in turn: a static split, the queue, and the queue with over-sampling and resumed partial rollouts. The
  last is measured in its steady state: what one round leaves, the next goes on with, so no token is counted twice.

Where replicas share cores, seconds say little; the tokens for each engine step of the busiest replica do not depend on
that.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import raw_engines
import torch
import torch.distributed as dist
from launching import main_or_rank, measured_on_ranks
from reports import exit_status, write_report

if TYPE_CHECKING:
    from rlhf_megatron.generation.prompt_groups import Group
    from rlhf_megatron.rollout.engine import Request, Sampling
    from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine

WARM_UPS = 1
# ln(10) over the distance of the 5th and 95th percentile of a normal distribution, in standard deviations.
SIGMA = math.log(10.0) / (2 * 1.6449)
TOY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
# prompts of a step, responses to each, longest prompt, median response, sequences at a time
SIZES = {"toy": (16, 4, 64, 48, 16), "gpu": (128, 8, 512, 160, 256)}
TARGETS = {"ours_over_llm_generate": 0.97, "resumed_over_static": 1.3}


def main() -> int:
    """Start a rank for each replica; return 1 where they fail or a target is missed on GPUs."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=torch.cuda.device_count() or 2, help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="folder with a config.json; default: Qwen2.5-7B, on CPUs a toy")
    parser.add_argument("--repeats", type=int, default=4 if on_gpu else 5, help="default: %(default)s")
    parser.add_argument("--oversample", type=float, default=1.25, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("docs/results/rollout.json"), help="default: %(default)s")
    options = parser.parse_args()
    with model_or_toy(options.model) as model:
        settings = {
            "model": str(model),
            "size": "gpu" if options.model or on_gpu else "toy",
            "repeats": options.repeats,
            "oversample": options.oversample,
        }
        failed, result = measured_on_ranks(options.replicas, Path(__file__), settings)
    if failed:
        return 1
    print(json.dumps(result, indent=1))
    write_report(options.output, result)
    return exit_status(misses(result, TARGETS if on_gpu else {}))


@contextlib.contextmanager
def model_or_toy(given: Path | None) -> Iterator[Path]:
    """Give a model's folder within the block: the ``given`` one, else Qwen2.5-7B's, on CPUs that of a toy."""
    with tempfile.TemporaryDirectory() as folder:
        toy = Path(folder) / "toy"
        toy.mkdir()
        (toy / "config.json").write_text(json.dumps(TOY), encoding="utf-8")
        yield given or (Path("recipes/models/qwen2.5-7b") if torch.cuda.is_available() else toy)


def misses(report: dict[str, Any], targets: dict[str, float]) -> list[str]:
    """Return the ratios of a report that are below their targets."""
    ratios = {**report["one_replica"], **report.get("replicas", {})}
    return [
        f"{name}: {ratios[name]['median']:.3f}, below {least}"
        for name, least in targets.items()
        if name in ratios and ratios[name]["median"] < least
    ]


def measure(model: str, size: str, repeats: int, oversample: float) -> dict[str, Any]:
    """Measure everything of one engine on each rank; the same on every rank, collective."""
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.rollout.engine import Sampling
    from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine

    prompts, responses, longest_prompt, middle, sequences = SIZES[size]
    longest = middle * 8
    section = RolloutSection(
        max_response_length=longest, max_num_seqs=sequences, gpu_memory_utilization=0.8, sleep=False
    )
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    engine = VllmEngine(model, section, dtype, longest_prompt, seed=1)
    sampling = Sampling(1.0, 1.0, -1, longest, ())
    load = Load(prompts, responses, longest_prompt, middle, longest)
    result: dict[str, Any] = {
        "prompts": prompts,
        "responses": responses,
        "prompt_tokens": [longest_prompt // 4, longest_prompt],
        "response_tokens": {"median": middle, "longest": longest, "sigma": SIGMA},
        "replicas_measured": dist.get_world_size(),
        "repeats": repeats,
    }
    share = load.requests(load.draw(prompts // max(4, dist.get_world_size())))  # a replica's, in a minute or two
    if dist.get_rank() == 0:
        result["one_replica"] = beside_llm_generate(engine, sampling, share, repeats)
    dist.barrier()
    if dist.get_world_size() > 1:
        result["replicas"] = beside_a_static_split(engine, sampling, load, repeats, oversample)
    return result


class Load:
    """Prompts without end, and how long each response will be; the same on every rank."""

    def __init__(self, prompts: int, responses: int, longest_prompt: int, middle: int, longest: int) -> None:
        self.prompts, self.responses = prompts, responses
        self._longest_prompt, self._middle, self._longest = longest_prompt, middle, longest
        self._drawn = 0

    def draw(self, count: int) -> list[Group]:
        """Return the next prompts."""
        from rlhf_megatron.data.prompts import Prompt
        from rlhf_megatron.generation.prompt_groups import Group

        numbers = range(self._drawn, self._drawn + count)
        self._drawn += count
        return [Group(Prompt(number, "", self._tokens(number), "", {})) for number in numbers]

    def requests(self, groups: Sequence[Group]) -> list[Request]:
        """Return the requests that are still to be generated for ``groups``, each response to its own length."""
        from rlhf_megatron.generation.prompt_groups import requests_for

        requests = requests_for(groups, self.responses, lambda _: self._longest, lambda row: row, dist.get_rank())
        return [
            dataclasses.replace(
                request,
                max_tokens=self._length(groups[request.group_id].prompt.row, request.row_id % self.responses),
                seed=groups[request.group_id].prompt.row * self.responses + request.row_id % self.responses,
            )
            for request in requests
        ]

    def _tokens(self, number: int) -> tuple[int, ...]:
        random = Random(number)
        count = random.randint(self._longest_prompt // 4, self._longest_prompt)
        return tuple(random.randrange(2, 500) for _ in range(count))

    def _length(self, number: int, response: int) -> int:
        common, own = Random(f"{number}").gauss(), Random(f"{number}/{response}").gauss()
        tokens = self._middle * math.exp(SIGMA * math.sqrt(0.5) * (common + own))
        return max(1, min(self._longest, round(tokens)))


def beside_llm_generate(
    engine: VllmEngine, sampling: Sampling, requests: Sequence[Request], repeats: int
) -> dict[str, Any]:
    """Return tokens per second of both on the same requests."""
    from rlhf_megatron.rollout.vllm.engine_arguments import sampling_params

    tokens = sum(request.max_tokens or 0 for request in requests)
    given = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
    parameters = [sampling_params(sampling, request.seed, request.max_tokens or 0) for request in requests]
    for request_parameters in parameters:
        request_parameters.flat_logprobs = True  # the quicker of the two forms that vLLM has

    def ours() -> int:
        return sum(len(completion.token_ids) for completion in engine.generate(requests, sampling))

    def llm_generate() -> int:
        outputs = raw_engines.answers_of(engine, given, parameters)
        for output in outputs:  # what a trainer needs of them
            flat = output.outputs[0].logprobs
            assert len([flat.logprobs[start] for start in flat.start_indices]) == len(output.outputs[0].token_ids)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    speeds: dict[str, list[float]] = defaultdict(list)
    for repeat in range(WARM_UPS + repeats):
        ways: list[Callable[[], int]] = [ours, llm_generate]
        for way in ways if repeat % 2 else reversed(ways):  # neither is always the first
            engine.weights_updated(0)  # empties the prefix cache
            started = time.perf_counter()
            generated = way()
            seconds = time.perf_counter() - started
            assert generated == tokens, f"{way.__name__}: {generated} tokens instead of {tokens}"
            if repeat >= WARM_UPS:
                speeds[way.__name__].append(tokens / seconds)
    return {
        "tokens": tokens,
        **{f"{name}_tokens_per_second": spread(values) for name, values in speeds.items()},
        "ours_over_llm_generate": spread([a / b for a, b in zip(speeds["ours"], speeds["llm_generate"], strict=True)]),
    }


def beside_a_static_split(
    engine: VllmEngine, sampling: Sampling, load: Load, repeats: int, oversample: float
) -> dict[str, Any]:
    """Return tokens per second, and for each engine step of the busiest replica, of all replicas together."""
    rounds = {
        "static": Round(engine, sampling, load, "static"),
        "queue": Round(engine, sampling, load, "queue"),
        "resumed": Round(engine, sampling, load, "queue", oversample),
    }
    measured: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in rounds}
    for repeat in range(WARM_UPS + repeats):
        drawn = load.draw(load.prompts)
        for name, one_round in rounds.items():
            metrics = one_round.run(drawn)
            if repeat >= WARM_UPS:
                for metric, value in metrics.items():
                    measured[name][metric].append(value)
    result: dict[str, Any] = {
        name: {metric: spread(values) for metric, values in metrics.items()} for name, metrics in measured.items()
    }
    for name in ("queue", "resumed"):
        for metric, ending in (("tokens_per_second", ""), ("tokens_per_engine_step", "_in_engine_steps")):
            pairs = zip(measured[name][metric], measured["static"][metric], strict=True)
            result[f"{name}_over_static{ending}"] = spread([a / b for a, b in pairs])
    return result


class Round:
    """One way of answering a step's prompts on all replicas, again and again."""

    def __init__(
        self, engine: VllmEngine, sampling: Sampling, load: Load, scheduling: str, oversample: float = 1.0
    ) -> None:
        from rlhf_megatron.rollout.work_queue import WorkQueues

        self._engine, self._sampling, self._load, self._oversample = engine, sampling, load, oversample
        self._queues = WorkQueues(scheduling, dist.get_rank(), dist.get_world_size(), name=f"{scheduling}{oversample}")
        self._waiting: list[Group] = []

    def run(self, drawn: Sequence[Group]) -> dict[str, float]:
        """Answer as many groups as were ``drawn``: these, or with over-sampling what waits and others of its own."""
        from rlhf_megatron.generation.prompt_groups import groups_left
        from rlhf_megatron.generation.replica import Replica
        from rlhf_megatron.topology.exchange import gather_objects

        responses, wanted, groups = self._load.responses, None, list(drawn)
        if self._oversample > 1:
            wanted = len(drawn)
            more = math.ceil(wanted * self._oversample) - len(self._waiting)
            groups = [*self._waiting, *self._load.draw(more)]
        requests = self._load.requests(groups)
        whole = [index for index, group in enumerate(groups) if group.is_whole]
        asked = {request.group_id for request in requests}
        own = sum(groups[index].home is not None for index in asked)
        queue = self._queues.open(len(asked) - own, None if wanted is None else max(wanted - len(whole), 0), own)
        self._engine.weights_updated(0)
        dist.barrier()
        started = time.perf_counter()
        completions = self._engine.generate(requests, self._sampling, queue=queue)
        records = gather_objects(self._engine.record)
        seconds = time.perf_counter() - started
        if wanted is not None:
            replica = Replica(list(range(dist.get_world_size())), dist.get_world_size(), dist.get_rank())
            ended = groups_left(groups, [], completions, responses, discard=False, replica=replica)
            whole = [index for index, group in enumerate(ended) if group.is_whole][:wanted]
            self._waiting = [group for index, group in enumerate(ended) if index not in whole]
        tokens = sum(record.sampled_tokens for record in records)
        times = [record.seconds for record in records]
        return {
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "tokens_per_engine_step": tokens / max(record.steps for record in records),
            "replica_imbalance": max(times) * len(times) / sum(times),
            "resumed": sum(record.resumed for record in records),
            "aborted": sum(record.aborted for record in records),
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": median(values), "least": min(values), "most": max(values)}


if __name__ == "__main__":
    sys.exit(main_or_rank(main, measure))
