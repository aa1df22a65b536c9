"""The common part of the benchmarks of a role: a random role and rows, from a config.json alone; their report."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from reports import write_report
from rich.console import Console

from rlhf_megatron.compat import megatron
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.recipe import ActorSection, OptimizerSection
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.world import join_world

if TYPE_CHECKING:
    from rlhf_megatron.roles.role import Role


def make_parser(description: str, length: int) -> argparse.ArgumentParser:
    """Return arguments of every benchmark of a role: the model, the rows of a step, the result's file."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--rows", type=int, default=8, help="of a step; default: %(default)s")
    parser.add_argument("--length", type=int, default=length, help="tokens of a row; default: %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    return parser


def run(options: argparse.Namespace, measure: Callable[[argparse.Namespace], dict[str, Any]]) -> int:
    """Join the world, measure, print the result and write it with its surroundings. Returns the exit status."""
    prepare_environment()
    join_world()
    megatron.install()
    result = measure(options)
    Console().print_json(json.dumps(result))
    if options.output:
        write_report(options.output, result)
    return 0


def random_role(
    model: Path, tokens_per_gpu: int, tensor: int = 1, shares_prompts: bool = False, **section: Any
) -> Role:
    """Return a learning role on ``tensor`` devices with random weights, which torch's seed decides; on CPUs in float32.

    ``section``: more keys of its section in a recipe.
    """
    from rlhf_megatron.roles.role import Role

    optimizer = OptimizerSection(learning_rate=1e-6)
    role = Role(
        "actor", read_architecture(model), Layout(tensor), range(tensor),
        ActorSection(tokens_per_gpu=tokens_per_gpu, optimizer=optimizer, **section),
        dtype="bfloat16" if torch.cuda.is_available() else "float32", seed=1,
        optimizer=optimizer, shares_prompts=shares_prompts,
    )  # fmt: skip
    for parameter in role.parameters().values():
        parameter.normal_(std=0.02)
    return role


def random_batch(
    vocabulary: int, rows: int, length: int, prompt: int = 1, responses: int = 1
) -> tuple[RolloutBatch, dict[str, torch.Tensor]]:
    """Return rows of random tokens, sampled but for the ``prompt`` that each ``responses`` rows begin with; and weights
    of their logprobs in a loss.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(vocabulary, (length,), generator=generator).tolist() for _ in range(rows)]
    prompts = [tokens[row - row % responses][:prompt] for row in range(rows)]
    batch = batch_from_rows(prompts, [row[prompt:] for row in tokens])
    return batch, {"weights": torch.full((len(batch.tokens),), 1 / len(batch.tokens))}


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """Return (seconds, bytes at the peak of what torch has allocated on a GPU)."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    action()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began, float(torch.cuda.max_memory_allocated()) if cuda else 0.0
