"""The raw engines as an expert would run them, swept, and our whole step beside the best of each.

    python tools/bench/raw_sweep.py [--models 0.5B 7B] [--repeats 3] [--output docs/results/raw_sweep.json]

The shapes are those of ``step_shapes.yaml`` for one GPU. vLLM (``raw_vllm.py``) answers as many prompts as a step has,
at the same lengths, without seeds and logprobs: once by each setting that differs from the first in one thing, then by
all of these together that were faster. Megatron (``raw_megatron.py``) computes the gradients of the same rows. Each
engine is in a process of its own with all of the GPU's memory, the best of each is measured ``--repeats`` times, and is
the ceiling of a phase, unless ours took less: then ours counts. All settings and times are in the output, where rows of
other shapes stay.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from launching import run
from reports import exit_status, missed_by, model_and_gpus, rows_with, write_report
from step import folder_with_model, measured, prepare

from rlhf_megatron.recipe import RLRecipe
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.runtime.command import command

HERE = Path(__file__).resolve().parent
SECONDS_FOR_ONE_PROCESS = 900.0
OF_CEILING_WANTED = 0.85
_FASTER = 0.99  # of the first setting's time; what is within that is noise
_ENGINE = {"max_num_seqs": 256, "max_num_batched_tokens": 16384}
# What is other than in the first setting: of the engine, of the environment.
VLLM: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "first": ({}, {}),
    "512 sequences": ({"max_num_seqs": 512}, {}),
    "batches of 8192 tokens": ({"max_num_batched_tokens": 8192}, {}),
    "batches of 32768 tokens": ({"max_num_batched_tokens": 32768}, {}),
    "older model runner": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "newer model runner": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "FlashInfer's sampler": ({}, {"VLLM_USE_FLASHINFER_SAMPLER": "1"}),
    "one process": ({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
}
LOSSES = ("plain", "fused", "te", "our head")
# Tokens of a micro-batch, by shape: up to what fits with recomputation of nothing.
TOKENS = {"0.5B": (16384, 32768, 65536), "7B": (4608, 9216)}


@command
def main() -> int:
    """Measure one shape after the other; return 1 where one failed or missed its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shapes = {shape["model"]: shape for shape in shapes_of_one_gpu()}
    on_gpu = torch.cuda.is_available()
    models = [name for name in shapes if (name != "toy") == on_gpu]
    parser.add_argument("--models", nargs="+", choices=list(shapes), default=models, metavar="MODEL")
    parser.add_argument("--steps", type=int, default=6, help="of ours, but for the first; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="of each engine's best; default: %(default)s")
    parser.add_argument("--vllm", nargs="+", choices=list(VLLM), default=list(VLLM), help="settings; default: all")
    parser.add_argument("--output", type=Path, default=Path("docs/results/raw_sweep.json"), help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_raw_sweep"), help="default: %(default)s")
    options = parser.parse_args()
    if options.repeats < 1 or options.steps < 2:
        parser.error(f"--repeats {options.repeats} --steps {options.steps}: give at least 1 and 2")
    if "first" not in options.vllm:
        parser.error("--vllm: the others are compared with first, which must be among them")
    environment = dict(os.environ)  # the engines get none of what ours sets
    prepare_environment()
    rows = []
    for model in options.models:
        rows.append(swept(shapes[model], options, environment))
        print(json.dumps(rows[-1]), flush=True)
        write_report(options.output, {"rows": rows_with(options.output, rows[-1])})
    return exit_status(missed_by(rows, model_and_gpus, misses))


def shapes_of_one_gpu() -> list[dict[str, Any]]:
    """Return those of ``step_shapes.yaml`` that are swept."""
    shapes = yaml.safe_load((HERE / "step_shapes.yaml").read_text(encoding="utf-8"))
    return [shape for shape in shapes if shape["gpus"] == 1 and shape["model"] in ("toy", *TOKENS)]


def swept(shape: Mapping[str, Any], options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the row of one shape: ours, all ways of vLLM and of Megatron, the ceiling and our share of it."""
    ours = measured(shape, options.work, options.steps, 0)
    row: dict[str, Any] = {"model": shape["model"], "gpus": 1, "ours": ours}
    folder = folder_with_model(options.work / "raw")
    recipe = prepare(shape, folder, 1)
    with (folder / "model" / "config.json").open(encoding="utf-8") as file:
        config = json.load(file)
    prompts, lengths = work_of(recipe, config["vocab_size"])
    work = {"prompts": prompts, "lengths": lengths}
    row["vllm"] = ways_of_vllm(folder, recipe, work, options, environment)
    rows = [len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)]
    row["megatron"] = ways_of_megatron(folder, shape["model"], config, recipe, rows, options.repeats, environment)
    return row | of_ceiling(row)


def work_of(recipe: RLRecipe, vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Return a step's prompts, of random tokens, one for each response, and how long the responses are."""
    draw, batch, drawn = random.Random(recipe.seed), recipe.batch, recipe.rollout.drawn_lengths
    assert drawn is not None
    prompts = [
        [draw.randrange(vocabulary) for _ in range(recipe.data.max_prompt_length)]
        for _ in range(batch.prompts_per_step)
    ]
    rows = range(batch.prompts_per_step * batch.responses_per_prompt)
    lengths = [min(drawn.of_row(row), recipe.rollout.max_response_length) for row in rows]
    return [prompts[row // batch.responses_per_prompt] for row in rows], lengths


def ways_of_vllm(
    folder: Path,
    recipe: RLRecipe,
    work: Mapping[str, Any],
    options: argparse.Namespace,
    environment: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Return vLLM's settings with their ``seconds``, or why one ``failed``; the fastest with all repeats."""
    on_gpu = torch.cuda.is_available()
    base: dict[str, Any] = {
        "model": str(folder / "model"), "load_format": "dummy", "dtype": recipe.model.dtype,
        "max_model_len": recipe.data.max_prompt_length + recipe.rollout.max_response_length,
        "disable_log_stats": True, **_ENGINE,
        **({"gpu_memory_utilization": 0.9} if on_gpu else {"enforce_eager": True, "kv_cache_memory_bytes": 2**26}),
    }  # fmt: skip
    found: list[dict[str, Any]] = []

    def add(name: str, engine: Mapping[str, Any], variables: Mapping[str, str], repeats: int) -> dict[str, Any]:
        of_engine = {**base, **engine}
        settings = {"engine": of_engine, "environment": variables, "repeats": repeats, **work}
        measured = of_process("raw_vllm.py", settings, folder, {**environment, **variables})
        described = {key: value for key, value in of_engine.items() if key != "model"}
        found.append({"name": name, "engine": described, "environment": dict(variables), **measured})
        return found[-1]

    for name in options.vllm:
        add(name, *VLLM[name], 1)
    first = found[0].get("seconds", [float("inf")])[0]
    faster = [one["name"] for one in found[1:] if "seconds" in one and one["seconds"][0] < _FASTER * first]
    engine, variables = together(faster, found)
    add(" and ".join(faster) or "first", engine, variables, options.repeats)
    return found


def together(names: Sequence[str], found: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what is other in any of these settings; where they differ in the same thing, as the fastest has it."""
    engine: dict[str, Any] = {}
    variables: dict[str, str] = {}
    seconds = {one["name"]: one["seconds"][0] for one in found if "seconds" in one}
    for name in sorted(names, key=lambda each: seconds[each], reverse=True):
        engine |= VLLM[name][0]
        variables |= VLLM[name][1]
    return engine, variables


def ways_of_megatron(
    folder: Path,
    model: str,
    config: Mapping[str, Any],
    recipe: RLRecipe,
    rows: Sequence[int],
    repeats: int,
    environment: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Return Megatron's ways with their ``seconds``, or why one ``failed``; the fastest with all repeats."""
    tokens = TOKENS.get(model, (1024,))
    kinds = [[{"tokens": most, "loss": loss, "graph": False} for most in tokens for loss in LOSSES]]
    if torch.cuda.is_available():  # in a process of their own, which a capture that fails leaves of no use
        kinds.append([{"tokens": most, "loss": "fused", "graph": True} for most in tokens])
    found: list[dict[str, Any]] = []
    for ways in kinds:
        settings = {"config": config, "dtype": recipe.model.dtype, "rows": rows, "ways": ways, "repeats": repeats}
        result = of_process("raw_megatron.py", settings, folder, environment)
        found += [{"ways": ways, **result}] if "failed" in result else result["seconds"]
    return found


def of_process(
    script: str, settings: Mapping[str, Any], folder: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return what a script leaves as ``seconds``, or why it ``failed``."""
    path, output = folder / "settings.json", folder / "result.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    output.unlink(missing_ok=True)
    failed = run(
        script, ["-P", str(HERE / script), str(path), str(output)], SECONDS_FOR_ONE_PROCESS, folder, environment
    )
    return {"failed": failed} if failed else {"seconds": json.loads(output.read_text(encoding="utf-8"))}


def of_ceiling(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``ceiling`` of each phase, the engines' share of it, and ``of_ceiling``: what the best engines need
    for a step, over ours; or why there is none."""
    if "failed" in row["ours"]:
        return {"failed": row["ours"]["failed"]}
    ceiling, share = {}, {}
    for phase, engine in (("generate", "vllm"), ("update", "megatron")):
        times = [statistics.median(way["seconds"]) for way in row[engine] if "seconds" in way]
        if not times:
            return {"failed": f"{engine}: {row[engine][0]['failed']}"}
        own = row["ours"]["phase_seconds"][phase]["median"]
        ceiling[phase], share[phase] = min(times), min(times) / own
    needed = sum(min(ceiling[phase], row["ours"]["phase_seconds"][phase]["median"]) for phase in ceiling)
    step: float = row["ours"]["step_seconds"]["median"]
    return {"ceiling": ceiling, "of_ceiling_by_phase": share, "of_ceiling": needed / step}


def misses(row: Mapping[str, Any]) -> list[str]:
    """Return missed targets, in words; the toy has none."""
    if row["model"] == "toy" or row["of_ceiling"] >= OF_CEILING_WANTED:
        return []
    return [f"{row['of_ceiling']:.0%} of the best engines' speed, below {OF_CEILING_WANTED:.0%}"]


if __name__ == "__main__":
    sys.exit(main())
