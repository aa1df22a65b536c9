"""Translation of verl's keys into a recipe, with verl's defaults for those that are not given.

As of verl 0.9.1: verl/trainer/config/ppo_trainer.yaml and ppo_megatron_trainer.yaml; names of 0.6 and 0.7 too. Not
here: reading a command (verl_command.py), and what a recipe may hold (rlhf_megatron/recipe/).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
from verl_algorithm import put_algorithm
from verl_command import ACTOR, DTYPES, MODEL, ROLLOUT, Command, Tree
from verl_roles import REWARD_FUNCTIONS, put_placement, put_roles

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.recipe.algorithm import COMPARING_ADVANTAGES
from rlhf_megatron.untrusted import reason_of

# key of verl -> (verl's default, key of a recipe), where the values mean the same.
SAME: dict[str, tuple[Any, str]] = {
    "data.max_prompt_length": (512, "data.max_prompt_length"),
    "data.train_batch_size": (1024, "batch.prompts_per_step"),
    "data.shuffle": (True, "data.shuffle"),
    "data.apply_chat_template_kwargs": ({}, "data.chat_template_kwargs"),
    f"{MODEL}.path": ("~/models/deepseek-llm-7b-chat", "model.path"),
    f"{ACTOR}.ppo_mini_batch_size": (256, "batch.minibatch_prompts"),
    f"{ACTOR}.ppo_epochs": (1, "batch.epochs_per_step"),
    f"{ROLLOUT}.n": (1, "batch.responses_per_prompt"),
    f"{ROLLOUT}.temperature": (1.0, "rollout.temperature"),
    f"{ROLLOUT}.top_p": (1, "rollout.top_p"),
    f"{ROLLOUT}.top_k": (-1, "rollout.top_k"),
    f"{ROLLOUT}.gpu_memory_utilization": (0.5, "rollout.gpu_memory_utilization"),
    f"{ROLLOUT}.tensor_model_parallel_size": (2, "rollout.layout.tensor"),
    f"{ROLLOUT}.max_num_seqs": (256, "rollout.max_num_seqs"),
    f"{ROLLOUT}.max_num_batched_tokens": (8192, "rollout.max_num_batched_tokens"),
    f"{ROLLOUT}.enforce_eager": (False, "rollout.enforce_eager"),
    f"{ROLLOUT}.enable_chunked_prefill": (True, "rollout.enable_chunked_prefill"),
    f"{ROLLOUT}.enable_prefix_caching": (True, "rollout.enable_prefix_caching"),
    f"{ROLLOUT}.free_cache_engine": (True, "rollout.sleep"),
    f"{ROLLOUT}.val_kwargs.n": (1, "evaluation.samples_per_prompt"),
    f"{ROLLOUT}.val_kwargs.top_p": (1.0, "evaluation.top_p"),
    "trainer.val_before_train": (True, "evaluation.at_start"),
    f"{ACTOR}.use_prefix_grouper": (None, "actor.shared_prompts"),
}


def translate(command: Command, rows: int | None) -> tuple[dict[str, Any], int]:
    """Return (a recipe's plain values, the number of GPUs) of a command; ``rows`` of the training files where not
    counted.

    Raises RecipeError where the number of steps cannot be known.
    """
    tree = Tree()
    put, take = tree.put, command.take
    put("name", re.sub(r"[^A-Za-z0-9._+=-]+", "-", _name_of(command)).lstrip("-._+=").rstrip("-.") or "from_verl")
    put("loop", "rl")
    tree["steps"] = 0
    if not isinstance(command.given.get(f"{MODEL}.path", ""), str):
        raise RecipeError(f"{MODEL}.path: name the model's folder")
    for key, (default, ours) in SAME.items():
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        put(ours, command.number(key, default) if is_number else take(key, default))
    if rows is not None and rows < 1:
        raise RecipeError(f"--rows={rows}: must be 1 or more")
    put_model(command, tree)
    put_sizes(command, tree)
    put("seed", command.first("data.seed", f"{ACTOR}.data_loader_seed"))
    put_data(command, tree)
    put_lengths(command, tree)
    tree["steps"] = steps_of(command, tree, rows)
    put_algorithm(command, tree)
    put_roles(command, tree)
    put_rollout(command, tree)
    put_speculation(command, tree)
    put_responses(command, tree)
    put_rewards(command, tree)
    put_operations(command, tree)
    put_profile(command, tree)
    return tree, put_placement(command, tree)


def put_model(command: Command, tree: Tree) -> None:
    """Put the model's folder, tokenizer and type."""
    tree.put("model.tokenizer", command.first("data.tokenizer", f"{MODEL}.tokenizer_path"))
    trusts = [command.take(key, False) for key in (f"{MODEL}.trust_remote_code", "data.trust_remote_code")]
    tree.put("model.trust_remote_code", any(trusts))
    engine = "megatron" if command.is_of_megatron else "fsdp_config"
    key = f"{ACTOR}.{engine}.dtype"
    tree.put("model.dtype", command.choose(key, "bfloat16", DTYPES) or "bfloat16")
    of_rollout = command.choose(f"{ROLLOUT}.dtype", tree["model"]["dtype"], DTYPES)
    tree.put("rollout.dtype", of_rollout if of_rollout != tree["model"]["dtype"] else None)


def put_sizes(command: Command, tree: Tree) -> None:
    """Put prompts of a step and of an optimizer step. With rollouts that run on, a step is what is trained on between
    two weight syncs: so many batches of minibatches."""
    batch = tree["batch"]
    if command.is_stream:
        keys = ("async_training.require_batches", "async_training.trigger_parameter_sync_step")
        batch["prompts_per_step"] = batch["minibatch_prompts"]
        for key in keys:
            batch["prompts_per_step"] *= command.count(key, 1)
    for key in ("prompts_per_step", "minibatch_prompts"):
        if not isinstance(batch[key], int) or batch[key] < 1:
            raise RecipeError(f"batch.{key}={batch[key]}, of the command's batch sizes: must be 1 or more")


def put_lengths(command: Command, tree: Tree) -> None:
    """Put the longest response, and keys that would make rows shorter."""
    longest = command.number("data.max_response_length", 512)
    responses = int(command.number(f"{ROLLOUT}.response_length", longest))
    tree.put("rollout.max_response_length", responses)
    prompts = tree["data"]["max_prompt_length"]
    if command.number(f"{ROLLOUT}.prompt_length", prompts) < prompts:
        command.refuse(f"{ROLLOUT}.prompt_length", "prompts are as long as data.max_prompt_length")
    for key in (f"{ROLLOUT}.max_model_len", f"{ROLLOUT}.engine_kwargs.vllm.max_model_len"):
        if (command.number(key) or math.inf) < prompts + responses:
            command.refuse(key, f"responses are cut by their own limit alone, here {responses}; lower that")
    for section in ("reward_model", "reward"):
        key = f"{section}.reward_kwargs.max_resp_len"
        if (command.number(key) or responses) != responses:
            command.refuse(key, f"the penalty is of the longest response, {responses}")


def _name_of(command: Command) -> str:
    name = command.take("trainer.experiment_name")
    if isinstance(name, list | dict):
        raise RecipeError(f"trainer.experiment_name={name}: must be a text")
    return "gsm8k" if name is None else str(name)


def put_data(command: Command, tree: Tree) -> None:
    """Put files, and what becomes of prompts that are too long."""
    for key, ours, default in (("train", "train", "train"), ("val", "validation", "test")):
        files_key = f"data.{key}_files"
        files = command.take(files_key, [] if files_key in command.given else [f"~/data/rlhf/gsm8k/{default}.parquet"])
        listed = files if isinstance(files, list) else [files]
        if not all(isinstance(file, str) for file in listed if file):
            raise RecipeError(f"data.{key}_files={files}: must be names of files")
        tree.put(f"data.{ours}_files", [str(Path(file).expanduser()) for file in listed if file])
    own, name = (command.first(f"data.custom_cls.{key}", default="") for key in ("path", "name"))
    if own:
        tree.put("data.dataset", f"{own}:{name}")
        command.remark("data.custom_cls", "data.dataset is called with the files alone, and gives rows")
    truncation = command.take("data.truncation", "error")
    drops = command.take("data.filter_overlong_prompts", False)
    if not drops and truncation != "error":
        command.remark("data.truncation", "prompts are never cut: one that is too long stops the run")
    tree.put("data.overlong_prompts", "drop" if drops else "stop")
    most = command.number("data.val_max_samples")
    tree.put("evaluation.max_prompts", most if most and most > 0 else None)
    if most and most > 0 and tree["data"]["shuffle"]:
        command.remark("data.val_max_samples", "are the first rows, and verl's are drawn")
    check_columns(command, tree)


def check_columns(command: Command, tree: Tree) -> None:
    """Refuse columns of images, videos, sounds and agent loops: those that files have, or command or model name."""
    columns: set[str] = set()
    readable = True
    for file in tree["data"]["train_files"]:
        try:
            columns.update(pyarrow.parquet.read_schema(file).names)
        except (OSError, ValueError):
            readable = False
    if "agent_name" in columns:
        command.refuse("data.train_files", "the column agent_name chooses verl's agent loops, which are not here")
    for key, default in (("image", "images"), ("video", "videos"), ("audio", "audios")):
        is_null = command.given.get(f"data.{key}_key", default) is None
        column = None if is_null else command.take(f"data.{key}_key", default)
        is_of_images = key == "image" and re.search(r"(?i)\b(vl|omni|vision)\b", tree["model"]["path"])
        is_named = f"data.{key}_key" in command.written or is_of_images
        if column in columns or (column and is_named and not readable):
            command.refuse(f"data.{key}_key", f"the column {column} is not read: prompts are text")


def steps_of(command: Command, tree: Tree, rows: int | None) -> int:
    """Return trainer.total_training_steps, or epochs x whole batches of the training rows; 0: the recipe's epochs,
    where the rows are not on this machine.

    With dynamic sampling verl draws batches of data.gen_batch_size, and a step takes one of them at least.
    """
    if command.is_stream:
        return steps_of_stream(command, tree, rows)
    steps: int | None = command.count("trainer.total_training_steps")
    if steps:
        return steps
    filtered, epochs = command.take("algorithm.filter_groups.enable", False), command.count("trainer.total_epochs", 30)
    try:
        counted = rows or rows_of(tree)
    except (OSError, pyarrow.ArrowInvalid) as error:
        if filtered or any(command.number(f"{role}.optim.lr_warmup_steps_ratio") for role in (ACTOR, "critic")):
            raise unknown_steps(error, "trainer.total_training_steps") from error
        command.remark("trainer.total_epochs", "is epochs: the run counts its steps, the last partial batch included")
        tree["epochs"] = epochs
        return 0
    drawn = (command.number("data.gen_batch_size") if filtered else None) or tree["batch"]["prompts_per_step"]
    if filtered:
        command.remark("algorithm.filter_groups.enable", "steps is the most that verl's epochs can have; check it")
    return max(1, epochs * int(counted // drawn))


def steps_of_stream(command: Command, tree: Tree, rows: int | None) -> int:
    """Return weight syncs of the fully asynchronous trainer, of rollout.total_rollout_steps prompts, or of those that
    the epochs have, if they are fewer."""
    prompts, epochs = command.number("rollout.total_rollout_steps"), command.count("trainer.total_epochs", 30)
    if command.take("trainer.total_training_steps"):
        command.remark("trainer.total_training_steps", "this trainer reads rollout.total_rollout_steps, which is taken")
    try:
        most = epochs * (rows or rows_of(tree))
    except (OSError, pyarrow.ArrowInvalid) as error:
        if not prompts:
            raise unknown_steps(error, "rollout.total_rollout_steps") from error
        command.remark("rollout.total_rollout_steps", "verl ends after trainer.total_epochs, if sooner; give --rows")
        most = prompts
    return max(1, int(min(prompts or most, most) // tree["batch"]["prompts_per_step"]))


def rows_of(tree: Tree) -> int:
    """Return rows of the training files; raises OSError or pyarrow's where they are not on this machine."""
    return sum(pyarrow.parquet.read_metadata(file).num_rows for file in tree["data"]["train_files"])


def unknown_steps(error: Exception, key: str) -> RecipeError:
    """Return the error that a run's steps cannot be counted, for which ``key`` says them."""
    return RecipeError(
        f"data.train_files: cannot be read here ({reason_of(error)}), so the number of steps is unknown; "
        f"give {key}, or --rows"
    )


def put_rollout(command: Command, tree: Tree) -> None:
    """Put experts, and the precision of the rollout's layers and cache."""
    experts = command.number(f"{ROLLOUT}.expert_parallel_size", 1)
    spreads = command.take(f"{ROLLOUT}.engine_kwargs.vllm.enable_expert_parallel", experts > 1)
    tree.put("rollout.layout.expert_parallel", True if spreads else None)
    put_precision(command, tree, f"{ROLLOUT}.quantization", ("fp8",), "quantization", "here is fp8")
    narrow, unknown = ("fp8", "fp8_e4m3"), "here is fp8, or the rollout's dtype"
    for key in ("kv_cache_dtype", "kv-cache-dtype"):
        put_precision(command, tree, f"{ROLLOUT}.engine_kwargs.vllm.{key}", narrow, "kv_cache_dtype", unknown)


def put_precision(command: Command, tree: Tree, key: str, narrow: tuple[str, ...], ours: str, unknown: str) -> None:
    """Put a narrow type of the rollout, whose answers are another policy's than the actor's: with a correction."""
    value, algorithm = command.take(key), tree["algorithm"]
    is_ahead = "rollout.nnodes" in command.given
    if value in (None, "auto"):
        return
    if value not in narrow:
        command.refuse(key, unknown)
    elif "rollout_correction" not in algorithm and algorithm.get("old_logprobs") != "rollout" and not is_ahead:
        command.refuse(key, "needs a correction for what it changes: algorithm.rollout_correction.rollout_is")
    else:
        tree.put(f"rollout.{ours}", "fp8")


def put_speculation(command: Command, tree: Tree) -> None:
    """Put vLLM's speculative decoding, which verl hands on, or that by the model's own layer."""
    key = f"{ROLLOUT}.engine_kwargs.vllm.speculative_config"
    method, head = command.take(f"{key}.method"), command.take(f"{key}.model")
    count, match = command.count(f"{key}.num_speculative_tokens"), command.count(f"{key}.prompt_lookup_min")
    if method in ("ngram", "suffix"):
        tree.put("rollout.speculative.method", method)
        tree.put("rollout.speculative.num_speculative_tokens", count)
        tree.put("rollout.speculative.match", match)
    elif method == "eagle3" and head:
        tree.put("rollout.speculative.method", method)
        tree.put("rollout.speculative.path", head)
        tree.put("rollout.speculative.num_speculative_tokens", count)
    elif method is not None:
        command.remark(f"{key}.method", "drafts are text, or those of eagle3 or model.mtp; there are none")
    put_prediction(command, tree)


def put_prediction(command: Command, tree: Tree) -> None:
    """Put drafts by a layer for multi-token prediction, which learns by an optimizer like the actor's."""
    key = f"{MODEL}.mtp"
    is_on, learns, drafts = (command.take(f"{key}.{name}") for name in ("enable", "enable_train", "enable_rollout"))
    count = command.count(f"{key}.num_speculative_tokens", 1)
    if not is_on:
        return
    if not drafts:
        command.refuse(f"{key}.enable", "a layer that predicts several tokens is there where it drafts: enable_rollout")
        return
    tree.put("rollout.speculative.method", "mtp")
    tree.put("rollout.speculative.num_speculative_tokens", count)
    if learns:
        of_actor = tree["actor"]["optimizer"].items()
        tree.put(
            "rollout.speculative.optimizer", {key: each for key, each in of_actor if not key.startswith("overlap")}
        )
        command.remark(f"{key}.enable_train", "the layer has a loss and an optimizer of its own; the decoder has not")


def put_responses(command: Command, tree: Tree) -> None:
    """Put two responses to a prompt where the advantages compare them, and a prefill of whole rows only where it can
    be."""
    batch, rollout = tree["batch"], tree["rollout"]
    if batch["responses_per_prompt"] < 2 and tree["algorithm"].get("advantage", "grpo") in COMPARING_ADVANTAGES:
        command.refuse(f"{ROLLOUT}.n", "advantages compare the responses to one prompt; 2 is written")
        batch["responses_per_prompt"] = 2
    longest = tree["data"]["max_prompt_length"] + rollout["max_response_length"]
    if not rollout["enable_chunked_prefill"] and rollout["max_num_batched_tokens"] < longest:
        command.remark(f"{ROLLOUT}.max_num_batched_tokens", f"below a row of {longest} tokens prefills are chunked")
        rollout["enable_chunked_prefill"] = True


def put_rewards(command: Command, tree: Tree) -> None:
    """Put the reward function, or the model that takes its place."""
    for key in ("reward_model.reward_manager", "reward.reward_manager", "reward.reward_manager.name"):
        manager = command.take(key)
        if manager not in (None, "naive", "dapo") and not isinstance(manager, dict):
            command.refuse(key, "rewards are rules, functions and services (docs/rewards.md)")
    path = command.first(*(f"{key}.path" for key in REWARD_FUNCTIONS), default="")
    name = command.first(*(f"{key}.name" for key in REWARD_FUNCTIONS), default="compute_score")
    if "reward_model" in tree:
        tree.put("reward.rule", "none")  # in verl a reward model's scores are the whole reward
    elif "judge" in tree:
        tree.put("reward.rule", "none")
        key = next(f"{each}.path" for each in REWARD_FUNCTIONS if command.take(f"{each}.path"))
        command.refuse(key, "write what it asks the judge as judge.prompt, and how it reads verdicts as judge.verdict")
    elif path:
        tree.put("reward.function", f"{path}:{name}")
    else:
        tell_of_scores(command, tree)


def tell_of_scores(command: Command, tree: Tree) -> None:
    """Tell that wrong answers to DAPO's rows score 0 and not -1, where advantages do not undo that."""
    algorithm = tree["algorithm"]
    penalizes = "overlong_buffer" in algorithm
    divides = algorithm.get("advantage") == "grpo" and algorithm.get("normalize_by_std")
    are_dapos = any(re.search(r"(?i)dapo|aime", Path(file).name) for file in tree["data"]["train_files"])
    if penalizes or (are_dapos and not (divides and algorithm.get("kl_placement") != "reward")):
        command.remark("data.train_files", "rows of math_dapo score 1 or 0, verl's 1 or -1: weight: 2 in reward.parts")


def put_operations(command: Command, tree: Tree) -> None:
    """Put evaluation, checkpoints and trackers."""
    take, put = command.take, tree.put
    every, save = command.number("trainer.test_freq", -1), command.number("trainer.save_freq", -1)
    put("evaluation.interval", max(0, every) if tree["data"]["validation_files"] else 0)
    temperature = command.number(f"{ROLLOUT}.val_kwargs.temperature", 0)
    put("evaluation.temperature", temperature)
    if not take(f"{ROLLOUT}.val_kwargs.do_sample", True) and temperature:
        command.remark(f"{ROLLOUT}.val_kwargs.do_sample", "verl since 0.7 reads the temperature alone, which is taken")
    if not temperature and tree["evaluation"]["samples_per_prompt"] > 1:
        command.remark(f"{ROLLOUT}.val_kwargs.n", "at temperature 0 all are the same, and so one is written")
        put("evaluation.samples_per_prompt", 1)
    put("checkpoint.save_interval", max(0, save))
    put("checkpoint.keep_last_k", take("trainer.max_actor_ckpt_to_keep"))
    if save > 0 and not take("trainer.max_actor_ckpt_to_keep"):
        command.remark("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last_k keeps 2, and verl all")
    if take("trainer.resume_mode", "auto") == "resume_path":
        command.refuse("trainer.resume_mode", "checkpoints of verl cannot be read; export one, as model.path")
    put("run_root", take("trainer.default_local_dir"))
    loggers = take("trainer.logger", ["console", "wandb"])
    listed = [str(name) for name in loggers] if isinstance(loggers, list) else re.findall(r"[^][,'\" ]+", loggers)
    put("monitor.trackers", ["jsonl", *(name for name in ("tensorboard", "wandb", "mlflow") if name in listed)])
    if take("trainer.rollout_data_dir"):
        put("monitor.rollouts.every", 1)
        put("monitor.rollouts.rows", tree["batch"]["prompts_per_step"] * tree["batch"]["responses_per_prompt"])
        command.remark("trainer.rollout_data_dir", "rows are kept in rollouts/ of the run's folder")
    others = sorted(set(listed) - {"console", "tensorboard", "wandb", "mlflow", "file"})
    if others:
        command.remark("trainer.logger", f"{', '.join(others)} cannot be written to")


def put_profile(command: Command, tree: Tree) -> None:
    """Put the steps whose kernels are recorded, by the tools that are here too."""
    steps, tool = command.take("global_profiler.steps"), command.take("global_profiler.tool")
    if tool not in (None, "torch", "nsys"):
        command.remark("global_profiler.tool", "steps are recorded by torch and nsys alone, so none are")
    elif tool and steps:
        tree.put("monitor.profile.steps", steps)
        tree.put("monitor.profile.tool", tool)
        command.remark("global_profiler.steps", "ranks and phases are those of monitor.profile")
