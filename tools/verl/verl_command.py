"""A command of verl: its keys, which of them were asked for, and what is to be told of the others.

Not here: what keys mean (verl_sections.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.recipe.load import apply_override
from rlhf_megatron.untrusted import shown

ACTOR, ROLLOUT, REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"

# Keys whose values are mappings of names that are not verl's.
MAPPINGS = ("data.apply_chat_template_kwargs",)

# What needs no key here, by patterns: always so, done otherwise, or of Ray and FSDP alone.
NEEDLESS = re.compile(
    r".*\.(use_remove_padding|use_dynamic_bsz|log_prob_use_dynamic_bsz|use_torch_compile|use_fused_kernels|use_liger|"
    r"use_mbridge|vanilla_mbridge|use_dist_checkpointing|dist_checkpointing_path|strategy|use_shm|seed|"
    r"use_distributed_optimizer|entropy_from_logits_with_chunking|entropy_checkpointing|calculate_log_probs|"
    r"total_training_steps|external_lib|loss_agg_mode|load_weight|wrap_policy\..*|fsdp_size|forward_prefetch|"
    r"reshard_after_forward|model_dtype)"
    rf"|{re.escape(ROLLOUT)}\.(name|mode|load_format|layered_summon|disable_log_stats|update_weights_bucket_megabytes|"
    r"checkpoint_engine\..*|max_model_len|skip_tokenizer_init|prompt_length|response_length|"
    r"multi_stage_wake_up|agent\.num_workers)"
    r"|data\.(prompt_key|reward_fn_key|val_batch_size|return_raw_chat|return_raw_input_ids|return_full_prompt|"
    r"dataloader_num_workers|filter_overlong_prompts_workers|image_key|video_key|validation_shuffle)"
    r"|trainer\.(balance_batch|device|project_name|total_epochs|nnodes|default_hdfs_dir|del_local_ckpt_after_load|"
    r"log_val_generations|ray_wait_register_center_timeout|use_legacy_worker_impl|max_critic_ckpt_to_keep|"
    r"resume_from_path)"
    r"|(reward_model|reward)\.(launch_reward_fn_async|num_workers|.*profiler\..*)"
    r"|(actor_rollout_ref|critic)\..*checkpoint\..*|ray_kwargs\..*|hydra\..*|actor_rollout_ref\.(hybrid_engine|nccl_timeout)"
)


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "data.trust_remote_code": (lambda value: not value, "model.trust_remote_code is for the tokenizer too"),
    f"{ACTOR}.shuffle": (lambda value: not value, "minibatches are in the order of the data"),
    "critic.shuffle": (lambda value: not value, "minibatches are in the order of the data"),
    f"{ACTOR}.megatron.dtype": (lambda value: value == "bfloat16", "the recipe has bfloat16"),
    f"{ROLLOUT}.dtype": (lambda value: value == "bfloat16", "the recipe has bfloat16; see rollout.dtype"),
    f"{ROLLOUT}.do_sample": (lambda value: value, "responses are always sampled"),
    f"{ROLLOUT}.name": (lambda value: value == "vllm", "the rollout is vLLM's"),
    f"{ROLLOUT}.ignore_eos": (lambda value: not value, "see rollout.drawn_lengths"),
    f"{ROLLOUT}.multi_turn.enable": (lambda value: not value, "tools are a function here: see rollout.multi_turn"),
    f"{ROLLOUT}.val_kwargs.top_k": (lambda value: value == -1, "evaluation has no top_k"),
    "reward_model.reward_manager": (lambda value: value in ("naive", "dapo"), "see docs/rewards.md"),
    "trainer.val_only": (lambda value: not value, "see launch/evaluate.py"),
    f"{ACTOR}.optim.optimizer": (lambda value: str(value).lower() in ("adam", "adamw"), "the optimizer is AdamW"),
}


@dataclass
class Command:
    """The keys of a command of verl, as they are asked for; what is never asked for has no counterpart."""

    given: dict[str, Any]
    asked: set[str] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)

    @property
    def is_of_megatron(self) -> bool:
        """True if verl would train with Megatron, and else with FSDP."""
        return self.given.get(f"{ACTOR}.strategy") == "megatron" or any(".megatron." in key for key in self.given)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, verl's default where it is not given. Keys below one are a mapping.

        Raises RecipeError for a value of another kind than the default; null is as not given where that says nothing.
        """
        self.asked.add(key)
        inner = {
            name.removeprefix(f"{key}."): value for name, value in self.given.items() if name.startswith(f"{key}.")
        }
        if inner and isinstance(default, dict):
            self.asked.update(f"{key}.{name}" for name in inner)
            return inner
        return _of_kind(key, self.given.get(key, default), default)

    def first(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of several keys that is given and not null."""
        values = [_of_kind(key, value, default) for key in keys if (value := self.take(key)) is not None]
        return values[0] if values else default

    def number(self, key: str, default: float | None = None) -> Any:
        """The number of a key; raises RecipeError for what is none, or not finite."""
        value = self.take(key, default)
        return value if value is None else _of_kind(key, value, 0.0)

    def count(self, key: str, default: int | None = None) -> Any:
        """The whole number of a key, 1 or more; raises RecipeError for another."""
        value = self.number(key, default)
        if value is not None and (value != int(value) or value < 1):
            raise RecipeError(f"{key}={shown(value)}: must be a whole number, 1 or more")
        return value if value is None else int(value)

    def choose(self, key: str, default: str, table: dict[str, str]) -> str | None:
        """The table's word for a key's value; None, and a remark, where it has none."""
        value = self.take(key, default)
        if value not in table:
            self.remark(key, f"here are {', '.join(table)}")
        return table.get(value)

    def remark(self, key: str, text: str) -> None:
        """Tells that a key is not what it was."""
        shown = f"{key}={self.given[key]}" if key in self.given else key
        self.remarks.append(f"{shown}: {text}")

    def pass_over(self, *beginnings: str) -> None:
        """Counts keys that begin so as asked for: they are of what this command does not use."""
        self.asked.update(beginnings, (key for key in self.given if key.startswith(beginnings)))

    def left(self) -> list[str]:
        """Keys that were given, and that nothing has asked for and nothing makes needless."""
        return [key for key in self.given if key not in self.asked and not NEEDLESS.fullmatch(key)]


def parse(arguments: list[str]) -> dict[str, Any]:
    """Hydra's overrides as key -> value; raises RecipeError for other words. `~key` takes a key back."""
    given: dict[str, Any] = {}
    for argument in arguments:
        if argument.startswith(("--config-path", "--config-name")):
            if "megatron" in argument:
                given[f"{ACTOR}.strategy"] = "megatron"
            continue
        if argument.startswith("~"):
            given.pop(argument[1:].partition("=")[0], None)
            continue
        key, separator, text = argument.lstrip("+").partition("=")
        if not separator or not all(key.split(".")):
            raise RecipeError(
                f"{shown(argument)}: not of the form key=value, as arguments of verl.trainer.main_ppo are"
            )
        if "${" in text or text.startswith("$("):
            raise RecipeError(
                f"{shown(argument)}: neither Hydra's nor a shell's expressions are understood; write the value"
            )
        values: dict[str, Any] = {}
        apply_override(values, f"value={text}")
        given.update(_keys_of(key, values["value"]))
    return given


def _keys_of(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A key with its value, or those of a mapping."""
    if isinstance(value, dict) and value and key not in MAPPINGS:
        for name, inner in value.items():
            yield from _keys_of(f"{key}.{name}", inner)
    elif isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        yield key, float(value)  # 1e-6, which YAML takes for text
    else:
        yield key, value


def _of_kind(key: str, value: Any, default: Any) -> Any:
    """``value``, which is of the kind of a default; raises RecipeError where it is not."""
    if default is None or (value is None and not default):
        return default if value is None else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    kinds: tuple[tuple[type | tuple[type, ...], str, bool], ...] = (
        (bool, "true or false", isinstance(value, bool)),
        ((int, float), "a number that is finite", is_number),
        (str, "a text", isinstance(value, str)),
        (list, "a list or a text", isinstance(value, list | str)),
        (dict, "a mapping", isinstance(value, dict)),
    )
    kind, fits = next((kind, fits) for of, kind, fits in kinds if isinstance(default, of))
    if not fits:
        raise RecipeError(f"{key}={shown(value)}: must be {kind}")
    return value


def check(command: Command) -> None:
    """Remarks on keys whose other values have no counterpart; raises RecipeError for a value in a section's place."""
    known = command.asked.union(CHECKS)
    for key in command.left():
        if any(other.startswith(f"{key}.") for other in known):
            raise RecipeError(f"{key}={shown(command.given[key])}: is a section of keys, such as {key}.KEY=VALUE")
    for key, (fits, text) in CHECKS.items():
        if key in command.given:
            command.asked.add(key)
            if not fits(command.given[key]):
                command.remark(key, text)
