"""Whole GRPO steps beside those of TRL's GRPOTrainer with colocated vLLM: same model, tokens and update, in turn.

    python tools/bench/peer.py [--models 0.5B 7B] [--output docs/results/peer.json]

The shapes are those of ``step_shapes.yaml`` for one GPU, the responses all as long as their mean there, whatever their
tokens are: no padding for TRL, which does not pack. Both sides start from the same random weights and take the same
prompts, as many responses to each, the same reward (``peer_reward.py``) and one AdamW step for each batch of
responses, with GRPO's loss clipped on tokens and a mean over all tokens of the batch, without a reference model.
Old logprobs are as each has them by default: ours come from the update itself, TRL computes them in a pass of its own
to correct for vLLM's being different. ``trl_without_correction`` switches that off, and computes what ours computes.

Each side trains in a process of its own (``peer_ours.py``, ``peer_trl.py``), in turn for as many rounds as asked. A
step is the time from the end of the step before to its own end; the first of each process do not count. Tokens are
those of prompts and responses as each side counts them itself. CPU seconds are those of the process that trains: they
stay comparable where others share the cores. Rows of other shapes in the output stay there.

Needs TRL, which is no requirement of the project: pip install -e ".[peer]".
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from launching import run, run_on_ranks
from reports import exit_status, missed_by, model_and_gpus, rows_with, spread, write_report
from step import folder_with_model, write_prompts

from rlhf_megatron.monitor.environment_report import package_versions
from rlhf_megatron.recipe import RLRecipe, load_rl
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

HERE = Path(__file__).resolve().parent
SIDES = ("ours", "trl", "trl_without_correction")
TARGET = 2.0
SECONDS_FOR_ONE_PROCESS = 570.0
# Of a GPU of 141 GB, about what ours gives its engine: TRL has a share for weights and cache together. Whether the
# engine's memory is given back while the model learns: where the rest would not fit beside it.
ENGINE_MEMORY = {"0.5B": (0.35, False), "7B": (0.42, True)}
# Of a micro-batch of TRL's: our choice, not its limit, since it computes logprobs in chunks; ours may be larger.
TRL_TOKENS_AT_ONCE = 16384


def main() -> int:
    """Measures one shape after the other; returns 1 where one failed or missed its target, 2 where TRL lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shapes = {shape["model"]: shape for shape in shapes_of_one_gpu()}
    default = list(ENGINE_MEMORY) if torch.cuda.is_available() else ["toy"]
    parser.add_argument("--models", nargs="+", choices=list(shapes), default=default)
    parser.add_argument("--steps", type=int, default=6, help="of each process; default: %(default)s")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that do not count; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side; default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on in --work: what has been measured there stays")
    parser.add_argument("--ours", nargs="+", default=[], metavar="KEY=VALUE", help="replace values of our recipe")
    parser.add_argument("--trl", nargs="+", default=[], metavar="KEY=JSON", help="replace arguments of GRPOConfig")
    parser.add_argument("--output", type=Path, default=Path("docs/results/peer.json"), help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_peer"), help="for runs; default: %(default)s")
    options = parser.parse_args()
    if options.steps <= options.warm_up:
        parser.error(f"--steps {options.steps} leaves none to count behind --warm-up {options.warm_up}")
    if importlib.util.find_spec("trl") is None:
        print('TRL is not installed: pip install -e ".[peer]"', file=sys.stderr)
        return 2
    prepare_environment()
    rows = []
    for model in options.models:
        rows.append(measured(shapes[model], options))
        print(json.dumps(rows[-1]), flush=True)
        write(options.output, rows[-1])
    return exit_status(misses(rows))


def shapes_of_one_gpu() -> list[dict[str, Any]]:
    """Those of ``step_shapes.yaml`` that TRL can have too: models without experts, whose rollout is of their type."""
    shapes = yaml.safe_load((HERE / "step_shapes.yaml").read_text(encoding="utf-8"))
    return [shape for shape in shapes if shape["gpus"] == 1 and shape["model"] in ("toy", *ENGINE_MEMORY)]


def measured(shape: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The row of one shape, from all sides in turn."""
    folder = (options.work / shape["model"]).resolve()
    if not (options.resume and (folder / "model").exists()):
        folder_with_model(folder)
    recipe = prepare(shape, folder, options.steps, options.ours)
    settings = trl_settings(recipe, shape["model"], options.trl, torch.cuda.is_available())
    row = {"model": shape["model"], "gpus": 1, "settings": described(recipe, settings)}
    rounds: dict[str, list[dict[str, list[float]]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES:
            output = folder / f"{side}-{number}.json"
            failed = None if output.exists() else run_side(side, settings, folder, output)
            if failed:
                return row | {"failed": f"{side}: {failed}"}
            rounds[side].append(json.loads(output.read_text(encoding="utf-8")))
            print(f"{shape['model']}, round {number}: {side}", file=sys.stderr, flush=True)
    return row | summary(rounds, tokens_per_step(recipe), options.warm_up)


def prepare(shape: Mapping[str, Any], folder: Path, steps: int, overrides: Sequence[str]) -> RLRecipe:
    """Writes prompts and recipe into a ``folder`` with a tiny model, which gets the shape; returns the recipe."""
    if "config" in shape:
        write_weights(HERE.parent.parent / shape["config"], folder / "model")
    (folder / "shape.yaml").write_text(
        yaml.safe_dump({"defaults": [str(HERE / "step_recipe.yaml")], **shape["recipe"]}), encoding="utf-8"
    )
    of_shape = load_rl(folder / "shape.yaml").rollout
    assert of_shape.drawn_lengths is not None
    length = round(of_shape.drawn_lengths.mean)
    same = {
        "name": "ours",
        "steps": steps,
        "model": {"random_weights": False},
        "rollout": {"max_response_length": length, "drawn_lengths": {"mean": length, "sigma": 0.0}},
        "reward": {"rule": "data_source", "function": str(HERE / "peer_reward.py"), "length_high": None},
        "monitor": {"timeline": {"steps": []}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"defaults": ["shape.yaml"], **same}), encoding="utf-8")
    recipe = load_rl(folder / "recipe.yaml", overrides)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")), encoding="utf-8")
    write_prompts(recipe, folder / "model", folder / "prompts.parquet")
    return recipe


def write_weights(config: Path, folder: Path) -> None:
    """Puts random weights of the shape into a ``folder`` with a tiny model, whose tokenizer stays."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for old in folder.glob("*.safetensors*"):
        old.unlink()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # the processes that are measured need the room


def trl_settings(recipe: RLRecipe, model: str, overrides: Sequence[str], on_gpu: bool) -> dict[str, Any]:
    """Settings for ``peer_trl.py`` with which TRL does the work of the recipe. ``overrides``: KEY=JSON."""
    rollout, optimizer, batch = recipe.rollout, recipe.actor.optimizer, recipe.batch
    rows = batch.prompts_per_step * batch.responses_per_prompt
    prompt, response = recipe.data.max_prompt_length, rollout.max_response_length
    at_once = rows_at_once(rows, prompt + response, min(recipe.actor.update_tokens, TRL_TOKENS_AT_ONCE))
    arguments: dict[str, Any] = {
        "output_dir": "trl",
        "seed": recipe.seed,
        "max_steps": recipe.steps,
        # One optimizer step for each batch of responses: steps_per_generation is gradient_accumulation_steps.
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": rows // at_once,
        "num_generations": batch.responses_per_prompt,
        "num_iterations": 1,
        "shuffle_dataset": False,
        "max_completion_length": response,
        "mask_truncated_completions": False,
        "generation_kwargs": {"ignore_eos": True},
        "temperature": rollout.temperature,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": prompt + response,
        "beta": 0.0,
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "scale_rewards": "group" if recipe.algorithm.divides_by_std else "none",
        "epsilon": recipe.algorithm.clip_ratio_low,
        "epsilon_high": recipe.algorithm.clip_ratio_high,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": optimizer.schedule,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.epsilon,
        "max_grad_norm": optimizer.clip_grad,
        "gradient_checkpointing": recipe.actor.recompute.granularity != "none",
        "bf16": recipe.model.dtype == "bfloat16",
        "model_init_kwargs": {"dtype": recipe.model.dtype},
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    # What TRL has no names for, where vLLM would choose another type than ours or most of the host's memory.
    engine = {} if on_gpu else {"dtype": recipe.model.dtype, "enforce_eager": True, "kv_cache_memory_bytes": 2**26}
    if on_gpu and model in ENGINE_MEMORY:
        arguments["vllm_gpu_memory_utilization"], arguments["vllm_enable_sleep_mode"] = ENGINE_MEMORY[model]
    for override in overrides:
        key, _, value = override.partition("=")
        arguments[key] = json.loads(value)
    return {
        "model": "model", "prompts": "prompts.parquet", "prompt_length": prompt,
        "arguments": arguments, "engine": engine,
    }  # fmt: skip


def rows_at_once(rows: int, length: int, tokens: int) -> int:
    """The most rows of ``length`` tokens that fit a micro-batch of ``tokens`` and divide ``rows``; 1 at least."""
    return max(count for count in range(1, rows + 1) if rows % count == 0 and (count == 1 or count * length <= tokens))


def tokens_per_step(recipe: RLRecipe) -> int:
    """Of all prompts, counted once for each response, and responses."""
    rows = recipe.batch.prompts_per_step * recipe.batch.responses_per_prompt
    return rows * (recipe.data.max_prompt_length + recipe.rollout.max_response_length)


def run_side(side: str, settings: Mapping[str, Any], folder: Path, output: Path) -> str:
    """Trains in a process of its own, which leaves ``output``; why it failed, or nothing."""
    if side == "ours":
        shutil.rmtree(folder / "runs", ignore_errors=True)
        arguments = ["recipe.yaml", str(output)]
        return run_on_ranks(1, HERE / "peer_ours.py", arguments, SECONDS_FOR_ONE_PROCESS, folder)
    changed = {"vllm_importance_sampling_correction": False} if side == "trl_without_correction" else {}
    path = folder / f"{side}.settings.json"
    path.write_text(json.dumps({**settings, "arguments": settings["arguments"] | changed}), encoding="utf-8")
    # Without torchrun, which would have TRL wrap the model for several ranks.
    return run("TRL", [str(HERE / "peer_trl.py"), str(path), str(output)], SECONDS_FOR_ONE_PROCESS, folder)


def described(recipe: RLRecipe, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of both sides that bear on the time; without folders of this machine."""
    return {
        "prompt_tokens": recipe.data.max_prompt_length,
        "response_tokens": recipe.rollout.max_response_length,
        "prompts_per_step": recipe.batch.prompts_per_step,
        "responses_per_prompt": recipe.batch.responses_per_prompt,
        "ours": {
            "model": {"dtype": recipe.model.dtype},
            "algorithm": recipe.algorithm.model_dump(mode="json") | {"old_logprobs": recipe.old_logprobs},
            "actor": recipe.actor.model_dump(mode="json"),
            "rollout": recipe.rollout.model_dump(mode="json"),
        },
        "trl": {"GRPOConfig": settings["arguments"], "vllm.LLM": settings["engine"]},
        "trl_without_correction": {"GRPOConfig": {"vllm_importance_sampling_correction": False}},
    }


def summary(rounds: Mapping[str, Sequence[Mapping[str, Sequence[float]]]], tokens: int, warm_up: int) -> dict[str, Any]:
    """The figures of a row, from seconds and tokens of each side's rounds; ``failed`` where one has other tokens."""
    result: dict[str, Any] = {"tokens_per_step": tokens, "sides": {}}
    for side, of_rounds in rounds.items():
        other = {count for one in of_rounds for count in one["tokens"]} - {tokens}
        if other:
            return {"failed": f"{side}: steps of {', '.join(f'{count:g}' for count in sorted(other))} tokens"}
        counted = [list(one["seconds"][warm_up:]) for one in of_rounds]
        seconds = [each for one in counted for each in one]
        result["sides"][side] = {
            "step_seconds": spread(seconds),
            "tokens_per_second": tokens / statistics.median(seconds),
            "mean_tokens_per_second": tokens * len(seconds) / sum(seconds),
            "cpu_seconds": spread([each for one in of_rounds for each in one["cpu_seconds"][warm_up:]]),
            "seconds_of_rounds": counted,
        }
    speed = {side: of_side["tokens_per_second"] for side, of_side in result["sides"].items()}
    result["ratio"] = {side: speed["ours"] / speed[side] for side in speed if side != "ours"}
    return result


def write(output: Path, row: Mapping[str, Any]) -> None:
    """Puts a row into the output in place of an earlier one of its shape."""
    versions = package_versions()
    versions |= {name: importlib.metadata.version(name) for name in ("trl", "accelerate", "datasets")}
    write_report(output, {"versions": versions, "rows": rows_with(output, row)})


def misses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Missed targets, in words: twice the tokens per second of either way of TRL; the toy has none."""

    def texts(row: Mapping[str, Any]) -> Iterator[str]:
        for side, ratio in row["ratio"].items():
            if ratio < TARGET and row["model"] != "toy":
                yield f"{ratio:.2f} times the tokens per second of {side}, below {TARGET:g}"

    return missed_by(rows, model_and_gpus, texts)


if __name__ == "__main__":
    sys.exit(main())
