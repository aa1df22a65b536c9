"""Whole GRPO steps beside those of TRL and verl on one GPU: same model, prompts, lengths and update, in turn.

    python tools/bench/peer.py [--models 0.5B 7B] [--output docs/results/peer.json]
    python tools/bench/peer.py --sides ours verl verl_bypass --lengths drawn --verl-python VENV/bin/python

The shapes are those of ``step_shapes.yaml`` for one GPU. Responses are as long as their mean there, whatever their
tokens are, which is no padding for TRL, which does not pack; or drawn as there, beside verl. All sides start from the
same random weights and take the same prompts, as many responses to each, the same reward (``peer_reward.py``) and one
AdamW step for each batch of responses, with GRPO's loss clipped on tokens and a mean over all tokens of the batch,
without a reference model. Old logprobs are as each has them by default: ours come from the update itself, TRL and verl
compute them in a pass of their own. ``trl_without_correction`` and ``verl_bypass`` leave that out, as ours.

``--sweep NAME SIDE KEY=VALUE...`` adds a side with other settings: keys of our recipe, of GRPOConfig, or of verl. All
settings of all sides are in the output, where rows of other shapes stay.

Each side trains in a process of its own (``peer_ours.py``, ``peer_trl.py``, ``peer_verl.py``), in turn for as many
rounds as asked. A step is the time from the end of the step before to its own end; the first of each process do not
count. Tokens are those of prompts and responses as each side counts them itself. CPU seconds are those of the process
that trains: they stay comparable where others share the cores.

Needs TRL or verl, which are no requirements of the project: pip install -e ".[peer]"; verl in an environment of its
own, with flash-attn and without TRL, and its Python as --verl-python.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from launching import last_error, run, run_on_ranks
from peer_settings import (
    ENGINE_MEMORY,
    VERL_IMPORTS,
    VERL_SHAPES,
    tokens_per_step,
    trl_is_missing,
    trl_settings,
    verl_settings,
    without_folders,
)
from reports import exit_status, missed_by, model_and_gpus, rows_with, spread, write_report
from step import folder_with_model, write_prompts

from rlhf_megatron.errors import UserError
from rlhf_megatron.monitor.environment_report import package_versions
from rlhf_megatron.recipe import RLRecipe, load_rl
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.runtime.command import command
from rlhf_megatron.untrusted import reason_of

HERE = Path(__file__).resolve().parent
TARGETS = {"trl": 2.0, "verl": 1.5}  # times the tokens per second of each
SECONDS_FOR_ONE_PROCESS = 570.0


@dataclasses.dataclass(frozen=True)
class Side:
    """A trainer and its settings.

    Attributes:
        trainer: ours, trl or verl.
        overrides: of our recipe, of GRPOConfig (KEY=JSON), or of verl's configuration.
        engine: of verl: fsdp2 or megatron.
    """

    trainer: str
    overrides: tuple[str, ...] = ()
    engine: str = "fsdp2"


# Old logprobs are the rollout's.
_BYPASS = ("algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.rollout.calculate_log_probs=true")
SIDES = {
    "ours": Side("ours"),
    "trl": Side("trl"),
    "trl_without_correction": Side("trl", ("vllm_importance_sampling_correction=false",)),
    "verl": Side("verl"),
    "verl_bypass": Side("verl", _BYPASS),
    "verl_megatron": Side("verl", engine="megatron"),
    "verl_megatron_bypass": Side("verl", _BYPASS, "megatron"),
}


@command
def main() -> int:
    """Measure one shape after the other; return 1 where one failed or missed its target, 2 for what cannot be run."""
    options = parsed()
    options.environment = dict(os.environ)  # peers get none of what our engine sets
    if problem := problem_of(options):
        print(problem, file=sys.stderr)
        return 2
    prepare_environment()
    shapes = {shape["model"]: shape for shape in shapes_of_one_gpu()}
    rows = []
    for model in options.models:
        rows.append(measured(shapes[model], options))
        print(json.dumps(rows[-1]), flush=True)
        write(options.output, rows[-1])
    return exit_status(misses(rows))


def parsed() -> argparse.Namespace:
    """Return the options, with ``sides`` by name, those of --sweep among them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shapes = [shape["model"] for shape in shapes_of_one_gpu()]
    default = ["0.5B", "7B"] if torch.cuda.is_available() else ["toy"]
    sides = ["ours", "trl", "trl_without_correction"]
    of_models = f"{', '.join(shapes)}; default: {' '.join(default)}, and all but toy need a GPU"
    of_sides = f"{', '.join(SIDES)}; default: {' '.join(sides)}"
    of_sweep = (
        "a side more: SIDE with other values, of the recipe, of GRPOConfig (KEY=JSON) or of verl; may be repeated"
    )
    parser.add_argument("--models", nargs="+", choices=shapes, default=default, metavar="MODEL", help=of_models)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=sides, metavar="SIDE", help=of_sides)
    parser.add_argument(
        "--sweep", nargs="+", action="append", default=[], metavar=("NAME", "SIDE KEY=VALUE"), help=of_sweep
    )
    parser.add_argument("--lengths", choices=["equal", "drawn"], default="equal", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=6, help="of each process; default: %(default)s")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that do not count; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=SECONDS_FOR_ONE_PROCESS, help="of each; default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on in --work: what has been measured there stays")
    parser.add_argument("--ours", nargs="+", default=[], metavar="KEY=VALUE", help="replace values of the shape")
    parser.add_argument("--verl-python", default=sys.executable, metavar="COMMAND", help="a Python that has verl")
    parser.add_argument("--output", type=Path, default=Path("docs/results/peer.json"), help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_peer"), help="for runs; default: %(default)s")
    options = parser.parse_args()
    if not 0 < options.warm_up < options.steps:
        parser.error(
            f"--warm-up {options.warm_up} of --steps {options.steps}: give at least 1, and fewer than the steps"
        )
    for name, value in (("--rounds", options.rounds), ("--seconds", options.seconds)):
        if not value > 0:
            parser.error(f"{name} {value:g}: must be more than 0")
    options.sides = {name: SIDES[name] for name in options.sides}
    for name, *rest in options.sweep:
        if not rest or rest[0] not in SIDES or name in SIDES:
            parser.error(f"--sweep {' '.join([name, *rest])}: give a name of its own, then one of {', '.join(SIDES)}")
        if len(rest) < 2 or any("=" not in word for word in rest[1:]):
            parser.error(f"--sweep {' '.join([name, *rest])}: give what is other in {name}, each as KEY=VALUE")
        side = SIDES[rest[0]]
        options.sides[name] = dataclasses.replace(side, overrides=(*side.overrides, *rest[1:]))
    return options


def problem_of(options: argparse.Namespace) -> str:
    """Return the reason why a side cannot run at all, with what to do; nothing where all can."""
    trainers = {side.trainer for side in options.sides.values()}
    if "trl" in trainers and (missing := trl_is_missing()):
        return missing
    if "trl" in trainers and options.lengths == "drawn":
        return "TRL has one length for all responses: leave out --lengths drawn, or TRL's sides"
    engines = {side.engine for side in options.sides.values() if side.trainer == "verl"}
    for model in options.models:
        if lacking := [engine for engine in sorted(engines) if model not in VERL_SHAPES[engine]]:
            has = ", ".join(VERL_SHAPES[lacking[0]])
            return (
                f"{model} has no settings for verl's {lacking[0]}: give --models of {has}, or leave verl out of --sides"
            )
    if engines and (problem := problem_of_verl(shlex.split(options.verl_python))):
        return f"--verl-python {options.verl_python}: {problem}; give the Python of an environment with verl"
    if not torch.cuda.is_available() and (large := [model for model in options.models if model != "toy"]):
        return f"--models {large[0]} needs a GPU, and torch finds none; on a CPU: --models toy --sides ours trl"
    return ""


def problem_of_verl(python: Sequence[str]) -> str:
    """Return the reason why a command is no Python that imports verl; nothing where it does."""
    try:
        imported = subprocess.run([*python, "-c", VERL_IMPORTS], capture_output=True, text=True, errors="replace")
    except OSError as error:
        return f"cannot be started ({reason_of(error)})"
    reason = last_error(imported.stderr.splitlines()) or f"status {imported.returncode}"
    return f"cannot import verl ({reason})" if imported.returncode else ""


def shapes_of_one_gpu() -> list[dict[str, Any]]:
    """Return those of ``step_shapes.yaml`` that peers can have too: models without experts, whose rollout is of their
    type."""
    shapes = yaml.safe_load((HERE / "step_shapes.yaml").read_text(encoding="utf-8"))
    return [shape for shape in shapes if shape["gpus"] == 1 and shape["model"] in ("toy", *ENGINE_MEMORY)]


def measured(shape: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one shape, from all sides in turn."""
    model, folder = shape["model"], (options.work / shape["model"]).resolve()
    if not (options.resume and (folder / "model").exists()):
        folder_with_model(folder)
    recipe = prepare(shape, folder, options.steps, options.ours, options.lengths == "equal")
    settings = {name: settings_of(name, side, recipe, model, folder) for name, side in options.sides.items()}
    if "config" in shape:
        write_weights(HERE.parent.parent / shape["config"], folder / "model")
    write_prompts(recipe, folder / "model", folder / "prompts.parquet")
    label = model if options.lengths == "equal" else f"{model}, {options.lengths} lengths"  # a row of its own
    row = {"model": label, "gpus": 1, "settings": described(recipe, settings, folder)}
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
    for number in range(options.rounds):
        for name, side in options.sides.items():
            output = folder / f"{name}-{number}.json"
            failed = None if output.exists() else run_side(name, side, settings[name], folder, output, options)
            if failed:  # another setting of a sweep may fit
                rounds[name].append({"failed": failed})
                continue
            rounds[name].append(json.loads(output.read_text(encoding="utf-8")))
            print(f"{model}, round {number}: {name}", file=sys.stderr, flush=True)
    return row | summary(rounds, tokens_per_step(recipe), options.warm_up)


def prepare(
    shape: Mapping[str, Any], folder: Path, steps: int, overrides: Sequence[str], equal: bool = True
) -> RLRecipe:
    """Write the recipe of a shape into a ``folder``; return it.

    ``equal``: all responses are as long as the shape's mean; else their lengths are drawn as the shape says.
    """
    (folder / "shape.yaml").write_text(
        yaml.safe_dump({"defaults": [str(HERE / "step_recipe.yaml")], **shape["recipe"]}), encoding="utf-8"
    )
    of_shape = load_rl(folder / "shape.yaml").rollout
    assert of_shape.drawn_lengths is not None
    length = round(of_shape.drawn_lengths.mean)
    same: dict[str, Any] = {
        "name": "ours",
        "steps": steps,
        "model": {"random_weights": False},
        "reward": {"rule": "data_source", "function": str(HERE / "peer_reward.py"), "length_high": None},
        "monitor": {"timeline": {"steps": []}},
    }
    if equal:
        same["rollout"] = {"max_response_length": length, "drawn_lengths": {"mean": length, "sigma": 0.0}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"defaults": ["shape.yaml"], **same}), encoding="utf-8")
    recipe = load_rl(folder / "recipe.yaml", overrides)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")), encoding="utf-8")
    return recipe


def write_weights(config: Path, folder: Path) -> None:
    """Put random weights of the shape into a ``folder`` with a tiny model, whose tokenizer stays."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for old in folder.glob("*.safetensors*"):
        old.unlink()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # the processes that are measured need the room


def settings_of(name: str, side: Side, recipe: RLRecipe, model: str, folder: Path) -> dict[str, Any]:
    """Return with what a side does the work of the recipe: its own recipe, TRL's settings or verl's.

    Raises UserError for other values that the side cannot have.
    """
    reward = str(HERE / "peer_reward.py")
    try:
        if side.trainer == "ours":
            own = load_rl(folder / "recipe.yaml", side.overrides)
            return {"recipe": own.model_dump(mode="json"), "old_logprobs": own.old_logprobs}
        if side.trainer == "trl":
            return trl_settings(recipe, model, side.overrides, torch.cuda.is_available()) | {"reward": reward}
        return verl_settings(recipe, model, side.engine, side.overrides, str(folder), reward)
    except UserError as error:
        raise UserError(f"--sweep {name}: {error}") from error


def run_side(
    name: str, side: Side, settings: Mapping[str, Any], folder: Path, output: Path, options: argparse.Namespace
) -> str:
    """Train in a process of its own, which leaves ``output`` with the seconds to the end of the first step; return why
    it failed, or nothing."""
    started = time.time()
    if side.trainer == "ours":
        shutil.rmtree(folder / "runs", ignore_errors=True)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings["recipe"]), encoding="utf-8")
        arguments = [f"{name}.yaml", str(output)]
        failed = run_on_ranks(1, HERE / "peer_ours.py", arguments, options.seconds, folder)
    else:
        path = folder / f"{name}.settings.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        arguments = [str(HERE / f"peer_{side.trainer}.py"), str(path), str(output)]
        python = shlex.split(options.verl_python) if side.trainer == "verl" else (sys.executable,)
        # Without torchrun, which would have TRL wrap the model for several ranks.
        failed = run(side.trainer, arguments, options.seconds, folder, options.environment, python)
    if not failed:
        result = json.loads(output.read_text(encoding="utf-8"))
        result["start_seconds"] = result.pop("first_step_ended") - started
        output.write_text(json.dumps(result), encoding="utf-8")
    return failed


def described(recipe: RLRecipe, settings: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Return all settings of all sides that bear on the time; without folders of this machine."""
    bearing = ("model", "algorithm", "actor", "rollout")
    work = {
        "prompt_tokens": recipe.data.max_prompt_length,
        "response_tokens": recipe.rollout.max_response_length,
        "prompts_per_step": recipe.batch.prompts_per_step,
        "responses_per_prompt": recipe.batch.responses_per_prompt,
    }
    sides = {
        name: {key: of_side["recipe"][key] for key in bearing} | {"old_logprobs": of_side["old_logprobs"]}
        if "recipe" in of_side
        else {key: value for key, value in of_side.items() if key not in ("prompts", "lengths")}
        for name, of_side in settings.items()
    }
    return work | without_folders(sides, str(folder), str(HERE))


def summary(rounds: Mapping[str, Sequence[Mapping[str, Any]]], tokens: int, warm_up: int) -> dict[str, Any]:
    """Return the figures of a row, from seconds and tokens of each side's rounds; ``failed`` where ours has none, or a
    side other tokens."""
    result: dict[str, Any] = {"tokens_per_step": tokens, "sides": {}}
    for side, of_rounds in rounds.items():
        if failed := [one["failed"] for one in of_rounds if "failed" in one]:
            result["sides"][side] = {"failed": failed[0]}
            continue
        other = {count for one in of_rounds for count in one["tokens"]} - {tokens}
        if other:
            return {"failed": f"{side}: steps of {', '.join(f'{count:g}' for count in sorted(other))} tokens"}
        result["sides"][side] = of_side(of_rounds, tokens, warm_up)
    speed = {side: each["tokens_per_second"] for side, each in result["sides"].items() if "failed" not in each}
    if "ours" not in speed or len(speed) < 2:
        failures = [f"{side}: {each['failed']}" for side, each in result["sides"].items() if "failed" in each]
        return result | {"failed": "; ".join(failures) or "nothing to compare"}
    result["ratio"] = {side: speed["ours"] / speed[side] for side in speed if side != "ours"}
    return result


def of_side(rounds: Sequence[Mapping[str, Any]], tokens: int, warm_up: int) -> dict[str, Any]:
    """Return the figures of one side, and its phases where it tells them."""
    counted = [list(one["seconds"][warm_up:]) for one in rounds]
    seconds = [each for one in counted for each in one]
    figures: dict[str, Any] = {
        "step_seconds": spread(seconds),
        "tokens_per_second": tokens / statistics.median(seconds),
        "mean_tokens_per_second": tokens * len(seconds) / sum(seconds),
        "seconds_of_rounds": counted,
        "start_seconds": spread([one["start_seconds"] for one in rounds]),
    }
    if versions := rounds[0].get("versions"):
        figures["versions"] = versions
    if all("cpu_seconds" in one for one in rounds):
        figures["cpu_seconds"] = spread([each for one in rounds for each in one["cpu_seconds"][warm_up:]])
    for name in ("memory_gb", "mfu"):
        if values := [each for one in rounds for each in one.get(name, [])[warm_up:] if each is not None]:
            figures[name] = spread(values)
    phases = {name for one in rounds for name in one.get("phases", {})}
    if phases:
        figures["phase_seconds"] = {
            phase: spread(values)
            for phase in sorted(phases)
            if (values := [each for one in rounds for each in one["phases"][phase][warm_up:] if each is not None])
        }
    return figures


def write(output: Path, row: Mapping[str, Any]) -> None:
    """Put a row into the output in place of an earlier one of its shape."""
    versions = package_versions()
    for name in ("trl", "accelerate", "datasets"):
        if importlib.util.find_spec(name) is not None:
            versions[name] = importlib.metadata.version(name)
    write_report(output, {"versions": versions, "rows": rows_with(output, row)})


def misses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return missed targets, in words: times the tokens per second of each trainer; the toy has none."""

    def texts(row: Mapping[str, Any]) -> Iterator[str]:
        for side, ratio in row["ratio"].items():
            target = next((target for trainer, target in TARGETS.items() if side.startswith(trainer)), 0.0)
            if ratio < target and not row["model"].startswith("toy"):
                yield f"{ratio:.2f} times the tokens per second of {side}, below {target:g}"

    return missed_by(rows, model_and_gpus, texts)


if __name__ == "__main__":
    sys.exit(main())
