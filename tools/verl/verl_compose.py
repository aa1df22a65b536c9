"""The start of a command of verl: the defaults of its trainer, or a configuration that Hydra composes from files.

hydra-core is imported only where a command names files of its own. Not here: what keys mean (verl_sections.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_command import ACTOR, Command, keys_of, parse

from rlhf_megatron.errors import RecipeError, UserError
from rlhf_megatron.untrusted import reason_of

_ASYNC = {
    "rollout.nnodes": 1, "rollout.n_gpus_per_node": 8, "algorithm.rollout_correction.bypass_mode": True,
}  # fmt: skip
_FULLY_ASYNC = _ASYNC | {
    "rollout.total_rollout_steps": 100, "data.gen_batch_size": 1, "async_training.require_batches": 1,
    "async_training.trigger_parameter_sync_step": 4, "async_training.staleness_threshold": 0.1,
    "async_training.partial_rollout": True,
}  # fmt: skip
_DAPO = {"reward.reward_manager.name": "dapo"}
# verl's own configurations, and what each has in place of the defaults that verl_sections.py knows.
BASES: dict[str, dict[str, Any]] = {
    "ppo_trainer": {}, "ppo_megatron_trainer": {}, "dapo_trainer": _DAPO, "dapo_megatron_trainer": _DAPO,
    "one_step_off_ppo_trainer": _ASYNC, "one_step_off_ppo_megatron_trainer": _ASYNC,
    "fully_async_ppo_trainer": _FULLY_ASYNC, "fully_async_ppo_megatron_trainer": _FULLY_ASYNC,
}  # fmt: skip
# Trainers whose loop is PPO's, and their configurations.
MODULES = {
    "verl.trainer.main_ppo": "ppo_trainer", "verl.trainer.main_ppo_sync": "ppo_trainer",
    "recipe.dapo.main_dapo": "dapo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}  # fmt: skip
_OTHER_LOOPS = ("sft_trainer", "main_generation", "main_eval", "model_merger", "data_process")
_OWN_FOLDER = (None, "config", "./config")


def read_command(module: str, folder: str | None, name: str | None, words: Sequence[str]) -> Command:
    """Return the keys of a command; raises UserError for words that are no overrides, and for files that cannot be
    composed.

    ``module`` is the trainer's; ``folder`` and ``name`` are those of Hydra's --config-path and --config-name.
    """
    if any(loop in module for loop in _OTHER_LOOPS):
        raise UserError(f"-m {module}: only commands of reinforcement learning are converted; see docs/sft.md")
    base = (name or MODULES.get(module, "ppo_trainer")).removesuffix(".yaml")
    grouped = [word for word in words if _chooses_files(word)]
    if folder in _OWN_FOLDER and base in BASES and not grouped:
        engine = {f"{ACTOR}.strategy": "megatron"} if "megatron" in base else {}
        written = parse(words)
        command = Command(engine | BASES[base] | written, written=frozenset(written))
    else:
        composed = compose(_folder_of(module, folder), base, words)
        written_keys = (word.lstrip("+~").partition("=")[0] for word in words)
        command = Command(composed, written=frozenset(written_keys))
    if module not in MODULES:
        command.refusals.append(f"-m {module}: a trainer of its own, whose loop and losses are not read")
    return command


def compose(folder: Path, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a configuration that Hydra composes; raises UserError where it cannot.

    verl's own files are looked for where the file's ``hydra.searchpath`` says, and in verl/trainer/config.
    """
    try:
        from hydra import compose as composed_by_hydra
        from hydra import initialize_config_dir
        from omegaconf import OmegaConf
    except Exception as error:  # beside another ANTLR than its own Hydra raises an Exception at its import
        raise UserError(
            f"--config-name={name}: Hydra composes files, and cannot be imported ({reason_of(error)}); "
            "pip install 'hydra-core==1.3.*'"
        ) from error
    own = Path("verl/trainer/config").resolve()
    has_path = any(word.startswith("hydra.searchpath=") for word in words)
    searched = [f"hydra.searchpath=[file://{own}]"] if own.is_dir() and not has_path else []
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(folder.resolve()), version_base=None):
            warnings.simplefilter("ignore")  # of folders that are not there, which the error names
            config = composed_by_hydra(name, overrides=[*words, *searched])
        values = OmegaConf.to_container(config, resolve=True)
    except Exception as error:  # of Hydra, OmegaConf and YAML, which share no class
        raise RecipeError(f"{folder / name}.yaml: Hydra cannot compose it ({reason_of(error)})") from error
    return {key: value for key, value in keys_of("", values) if value != "???" and not key.endswith("._target_")}


def _chooses_files(word: str) -> bool:
    """Return True for an override that chooses files of a configuration: a group, or where to look for them."""
    key = word.lstrip("+~").partition("=")[0]
    return "@" in key or "/" in key or key == "hydra.searchpath"


def _folder_of(module: str, folder: str | None) -> Path:
    """Return the folder of --config-path, which Hydra takes to be relative to the module's own."""
    path = Path(folder or "config")
    beside = Path(*module.split(".")[:-1]) / path
    return beside if not path.is_absolute() and beside.is_dir() else path
