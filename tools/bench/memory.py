"""Memory of a learning role in each phase, with each switch that saves some, beside what --dry-run reckons.

    python tools/bench/memory.py recipes/models/qwen2.5-7b [--output docs/results/memory.json]

MODEL needs only a config.json: the weights are random. With each switch a role takes whole steps with AdamW, in a
process of its own; what is given is of the last. "rollout": what stays while vLLM generates, after the role was
offloaded; "logprobs" and "update": the most that is allocated in a pass without gradients and in a step. The seconds
are those of leaving the GPU, and of a step, which begins with coming back.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from launching import run_on_ranks
from random_role import make_parser, random_batch, random_role, run, timed
from reports import exit_status, missed_by, write_report

from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.planning.memory import estimate
from rlhf_megatron.planning.model_folders import role_architectures
from rlhf_megatron.planning.stage_memory import GB
from rlhf_megatron.recipe import Recipe, load_recipe
from rlhf_megatron.runtime.command import command

# Names of switches, and the keys of a role's section that they are.
SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "recompute selective": {"recompute": {"granularity": "selective"}},
    "recompute 14 layers": {"recompute": {"granularity": "full", "layers": 14}},
    "recompute full": {"recompute": {"granularity": "full"}},
    "offload optimizer": {"offload": {"optimizer": True}},
    "offload gradients": {"offload": {"gradients": True}},
    "offload parameters": {"offload": {"parameters": True}},
    "optimizer streamed": {"offload": {"streamed_optimizer": 1.0}},
    "offload all, recompute full": {
        "offload": {"parameters": True, "gradients": True, "optimizer": True},
        "recompute": {"granularity": "full"},
    },
}
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "qwen7b_grpo.yaml"
SECONDS_FOR_ONE = 180.0


@command
def main() -> int:
    """Measure one switch after the other; return 1 where a process failed otherwise than for lack of memory."""
    parser = make_parser(__doc__ or "", length=512)
    parser.add_argument("--tokens-per-gpu", type=int, default=1024, help="of a micro-batch; default: %(default)s")
    parser.add_argument("--switches", nargs="+", choices=list(SWITCHES), default=list(SWITCHES), metavar="NAME")
    parser.add_argument("--one", choices=list(SWITCHES), help=argparse.SUPPRESS)  # of the rank that this starts
    options = parser.parse_args()
    if options.one:
        return run(options, measure)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.switches:
            output = Path(folder) / f"{len(rows)}.json"
            arguments = [str(options.model), f"--one={name}", f"--output={output}", f"--rows={options.rows}"]
            arguments += [f"--length={options.length}", f"--tokens-per-gpu={options.tokens_per_gpu}"]
            failed = run_on_ranks(1, Path(__file__), arguments, SECONDS_FOR_ONE)
            result = {"failed": failed} if failed else json.loads(output.read_text(encoding="utf-8"))["found"]
            rows.append({"switch": name} | result)
            if options.output:
                settings = {"model": options.model.name, "tokens_per_gpu": options.tokens_per_gpu}
                write_report(options.output, settings | {"rows": rows})
    return exit_status(missed_by(rows, lambda row: row["switch"], lambda _: []))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what one switch does, beside the estimate."""
    section = SWITCHES[options.one]
    return {"found": measured(options, section) | reckoned(options, section)}


def measured(options: argparse.Namespace, section: dict[str, Any]) -> dict[str, Any]:
    """Return GB of 2^30 bytes, and seconds; or that the role does not fit."""
    try:
        return _phases(options, section)
    except torch.OutOfMemoryError:
        return {"does_not_fit": True}


def _phases(options: argparse.Namespace, section: dict[str, Any]) -> dict[str, Any]:
    role = random_role(options.model, options.tokens_per_gpu, **section)
    batch, fields = random_batch(role.architecture.vocabulary, options.rows, options.length)

    def update() -> None:
        role.update(batch, fields, lambda logprobs, _entropy, given: (-(logprobs * given["weights"]).sum(), {}))

    update()
    role.offload()  # the first time, it gets host memory
    update()
    leaving, _ = timed(role.offload)
    rollout = _allocated()
    _, logprobs = timed(lambda: role.logprobs(batch))
    role.offload()
    updating, peak = timed(update)
    return {
        "rollout_gb": rollout / GB,
        "logprobs_gb": logprobs / GB,
        "update_gb": peak / GB,
        "leaving_seconds": leaving,
        "update_seconds": updating,
    }


def reckoned(options: argparse.Namespace, section: dict[str, Any]) -> dict[str, float]:
    """Return the same by the estimate, without what it sets aside for the CUDA context and for vLLM."""
    recipe = _recipe(options, section)
    architectures = role_architectures(recipe, read_architecture(options.model))
    [actor] = estimate(recipe, architectures, 1).roles["actor"]
    return {
        "reckoned_rollout_gb": actor.resident,
        "reckoned_logprobs_gb": actor.resident + actor.forward,
        "reckoned_update_gb": actor.update,
    }


def _recipe(options: argparse.Namespace, section: dict[str, Any]) -> Recipe:
    """Return one that has a micro-batch as here and rows that are no longer."""
    values: dict[str, Any] = {"layout": {"tensor": 1}, "sequence_parallel": False, **section}
    given = {f"actor.{key}": value for key, value in values.items()} | {
        "actor.tokens_per_gpu": options.tokens_per_gpu,
        "data.max_prompt_length": options.length // 2,
        "rollout.max_response_length": options.length // 2,
    }
    return load_recipe(RECIPE, [f"{key}={json.dumps(value)}" for key, value in given.items()])


def _allocated() -> float:
    return float(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0.0


if __name__ == "__main__":
    sys.exit(main())
