"""Forward and backward by a role, beside calling Megatron directly for the same rows on the same model.

    python launch/torchrun.py --nproc-per-node 1 tools/bench/train_step.py recipes/models/qwen2.5-7b [--output FILE]

MODEL needs only a config.json: the weights are random. The direct way is Megatron's model, its cross entropy and
backward(), over the same micro-batches: what a training loop without reinforcement learning would do. The role computes
logprobs and entropy besides. With --responses there is no direct way: the role computes a prompt for each of its rows,
and once for those of a micro-batch. With --compile the role's decoder layers are also compiled by torch, and cuDNN also
chooses its algorithms by trial. With --fp8 the role multiplies in 8 bits; with --kernels one repeat more says where the
GPU's time goes. Optimizer steps are left out of all: their state would not fit beside a 7B model.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import raw_engines
import torch
from kernel_times import kernel_times
from random_role import make_parser, random_batch, random_role, run, timed

from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.gpu_kinds import peak_flops
from rlhf_megatron.models.flops import training_flops
from rlhf_megatron.recipe.role_sections import Fp8Recipe
from rlhf_megatron.rollout.vllm.process_environment import has_gpu
from rlhf_megatron.runtime.command import command

if TYPE_CHECKING:
    from rlhf_megatron.roles.role import Role

WARM_UPS, REPEATS = 2, 5


@command
def main() -> int:
    """Return the exit status."""
    parser = make_parser(__doc__ or "", length=2048)
    parser.add_argument("--tokens-per-gpu", type=int, default=4096, help="of a micro-batch; default: %(default)s")
    parser.add_argument("--responses", type=int, default=1, help="to each prompt; default: %(default)s")
    parser.add_argument(
        "--prompt", type=int, default=1, help="tokens of a row that are its prompt; default: %(default)s"
    )
    parser.add_argument("--compile", action="store_true", help="beside torch.compile and cuDNN's benchmark")
    parser.add_argument("--fp8", choices=get_args(Fp8Recipe), help="recipe of Transformer Engine for the role")
    parser.add_argument("--kernels", action="store_true", help="milliseconds of a micro-batch by kernel too")
    options = parser.parse_args()
    if options.compile and not has_gpu() and os.environ.get("TORCHDYNAMO_DISABLE") != "0":
        parser.error("--compile: nothing is compiled on CPUs, but with TORCHDYNAMO_DISABLE=0")
    return run(options, measure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time all ways in turn, so that all meet the same machine."""
    shares = options.responses > 1
    section = {"fp8": options.fp8} if options.fp8 else {}
    role = random_role(options.model, options.tokens_per_gpu, shares_prompts=shares, **section)
    shape = options.rows, options.length, options.prompt, options.responses
    batch, fields = random_batch(role.architecture.vocabulary, *shape)
    ways: dict[str, Callable[[], None]] = {"role": by_role(role, batch, fields)}
    if shares:
        ways["shared_prompts"] = by_role(role, batch, fields, shares_prompts=True)
    else:
        micros = raw_engines.micro_batches(role, batch)
        ways["megatron"] = functools.partial(raw_engines.forward_and_backward, role, micros)
    if options.compile:
        ways["compiled"] = with_compiled_layers(role, ways["role"])
        ways["cudnn_benchmark"] = with_cudnn_benchmark(ways["role"])
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}
    for repeat in range(WARM_UPS + REPEATS):
        for name, way in ways.items():
            taken, peak = timed(way)
            if repeat >= WARM_UPS:
                seconds[name].append(taken)
                peaks[name] = peak
    tokens = options.rows * options.length
    sampled = options.rows * (options.length - options.prompt)
    operations = training_flops(role.architecture, batch.lengths.tolist(), sampled)
    possible = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in role.parameters().values()), "tokens": tokens}
    for name, times in seconds.items():
        median = statistics.median(times)
        result[name] = {
            "seconds": median,
            "spread": [min(times), max(times)],
            "tokens_per_second": tokens / median,
            "tflops": operations / median / 1e12,
            "mfu": operations / median / possible if possible else None,
            "peak_memory_gb": peaks[name] / 1e9,
        }
    if options.kernels:
        pieces = -(-tokens // options.tokens_per_gpu)
        result["kernels"] = {name: kernel_times(way, pieces) for name, way in ways.items()}
    speeds = {name: result[name]["tokens_per_second"] for name in ways}
    result |= {
        f"{name}_over_role": speeds[name] / speeds["role"] for name in ways if name in ("compiled", "cudnn_benchmark")
    }
    if not shares:
        return result | {"role_over_megatron": speeds["role"] / speeds["megatron"]}
    names = ("rows", "length", "prompt", "responses", "tokens_per_gpu")
    result["shape"] = {name: getattr(options, name) for name in names}
    return result | {"shared_over_role": speeds["shared_prompts"] / speeds["role"]}


def by_role(
    role: Role, batch: RolloutBatch, fields: dict[str, torch.Tensor], shares_prompts: bool = False
) -> Callable[[], None]:
    """Return forward and backward as in ``Role.update``."""

    def forward_and_backward() -> None:
        assert role.trainer is not None
        role._passes._shares_prompts = shares_prompts
        role.trainer.chunks[0].zero_grad_buffer()
        role._passes.run(
            batch, fields, role.section.update_tokens, role.output,
            lambda parts, micro: -(parts[0] * micro.fields["weights"]).sum(), forward_only=False,
        )  # fmt: skip

    return forward_and_backward


def with_compiled_layers(role: Role, way: Callable[[], None]) -> Callable[[], None]:
    """Return the same way while torch.compile's code runs in place of the decoder layers' own."""
    layers = [layer for chunk in role.trainer.chunks for layer in chunk.module.decoder.layers] if role.trainer else []
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # one code for all layers, whose numbers differ
    for layer in layers:
        layer.compile()
    compiled = [layer._compiled_call_impl for layer in layers]

    def use(implementations: Sequence[Any]) -> None:
        for layer, implementation in zip(layers, implementations, strict=True):
            layer._compiled_call_impl = implementation

    def run_compiled() -> None:
        use(compiled)
        way()
        use([None] * len(layers))

    use([None] * len(layers))
    return run_compiled


def with_cudnn_benchmark(way: Callable[[], None]) -> Callable[[], None]:
    """Return the same way while cuDNN tries its algorithms of each convolution."""

    def run_by_trial() -> None:
        with torch.backends.cudnn.flags(benchmark=True):
            way()

    return run_by_trial


if __name__ == "__main__":
    sys.exit(main())
