"""Translation of verl's keys of the algorithm: advantages, losses, KL, dynamic sampling, correction.

As of verl 0.9.1: verl/trainer/ppo/core_algos.py and rollout_corr_helper.py. Not here: other sections
(verl_sections.py, verl_roles.py), and what a recipe may hold (rlhf_megatron/recipe/).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from verl_command import ACTOR, ROLLOUT, Command, Tree

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.untrusted import shown

ADVANTAGES = {
    "gae": "gae", "grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "opo": "opo",
    "remax": "remax", "gpg": "gpg", "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline", "grpo_passk": "pass_at_k",
}  # fmt: skip
POLICY_LOSSES = {
    "vanilla": "clip", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "sapo": "sapo", "gpg": "reinforce",
    "clip_cov": "clip_cov", "kl_cov": "kl_cov", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl",
}  # fmt: skip
AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean", "seq-mean-token-sum-norm": "sequence_sum_constant",
}  # fmt: skip
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
METRICS = {
    "acc": "accuracy", "reward": "reward", "score": "reward", "seq_reward": "reward", "seq_final_reward": "reward",
}  # fmt: skip
CORRECTION = "algorithm.rollout_correction"
# Formulas of the same name that differ in something (docs/algorithms.md).
OTHER_ADVANTAGES = {
    "gpg": "alpha is over groups whose rewards differ, and verl's over responses whose reward is not 0",
    "reinforce_plus_plus_baseline": "the deviation is that of responses, and verl's that of tokens",
}
OTHER_SELECTION = (
    "tokens are chosen in the whole minibatch by old logprobs, and verl's in a micro-batch by current ones"
)


def put_algorithm(command: Command, tree: Tree) -> None:
    """Put the objective of a command."""
    put_advantages(command, tree)
    put_policy_loss(command, tree)
    put_divergence(command, tree)
    put_filter(command, tree)
    for section in ("reward_model", "reward"):
        for buffer in (f"{section}.overlong_buffer", f"{section}.reward_kwargs.overlong_buffer_cfg"):
            put_overlong(command, tree, buffer)
    put_router_replay(command, tree)
    put_correction(command, tree)


def put_advantages(command: Command, tree: Tree) -> None:
    """Put the estimator of advantages, and what it reads."""
    take, put = command.take, tree.put
    advantage = command.choose("algorithm.adv_estimator", "gae", ADVANTAGES)
    put("algorithm.advantage", advantage)
    if advantage in OTHER_ADVANTAGES:
        command.remark("algorithm.adv_estimator", OTHER_ADVANTAGES[advantage])
    divides = take("algorithm.norm_adv_by_std_in_grpo", True)
    put("algorithm.normalize_by_std", divides if advantage in ("grpo", "pass_at_k") else None)
    if advantage in ("gae", "reinforce_plus_plus"):
        put("algorithm.gamma", take("algorithm.gamma", 1.0))
    if advantage == "gae":
        put("algorithm.gae_lambda", take("algorithm.lam", 1.0))


def put_policy_loss(command: Command, tree: Tree) -> None:
    """Put the loss of a token, and how tokens are averaged."""

    def put(key: str, value: Any) -> None:
        tree.put(f"algorithm.{key}", value)

    take, selection = command.take, f"{ACTOR}.policy_loss"
    loss = command.choose(f"{selection}.loss_mode", "vanilla", POLICY_LOSSES)
    put("policy_loss", loss)
    if loss != "reinforce":
        put_bounds(command, tree)
    dual = command.number(f"{ACTOR}.clip_ratio_c", 3.0)
    put("clip_ratio_dual", dual if loss in ("clip", "dppo_tv", "dppo_kl") else None)
    if loss in ("clip_cov", "kl_cov"):
        command.remark(f"{selection}.loss_mode", OTHER_SELECTION)
        put("covariance.fraction", take(f"{selection}.{loss}_ratio", 0.0002))
    if loss == "clip_cov":
        put("covariance.low", take(f"{selection}.clip_cov_lb", 1.0))
        put("covariance.high", take(f"{selection}.clip_cov_ub", 5.0))
    if loss == "kl_cov":
        put("covariance.kl_coef", take(f"{selection}.ppo_kl_coef", 0.1))
    if loss == "sapo":
        for key, ours in (("tau_pos", "positive"), ("tau_neg", "negative")):
            put(f"sapo.temperature_{ours}", command.first(f"{ACTOR}.{key}", f"{selection}.{key}"))
    put("entropy_coef", command.number(f"{ACTOR}.entropy_coeff", 0))
    put("loss_aggregation", _aggregation(command, loss))
    if tree["algorithm"].get("loss_aggregation") == "sequence_sum_constant":
        put("loss_constant", command.number(f"{ACTOR}.loss_scale_factor"))


def _aggregation(command: Command, loss: str | None) -> str | None:
    """Return loss aggregation: in two losses of verl's by sequences, whatever loss_agg_mode says."""
    aggregation = command.choose(f"{ACTOR}.loss_agg_mode", "token-mean", AGGREGATIONS)
    by_sequences = AGGREGATIONS["seq-mean-token-mean"]
    if loss == "gspo" and aggregation != by_sequences:
        text = f"verl before 0.9.1 averages gspo by sequences whatever this says: loss_aggregation: {by_sequences}"
        command.remark(f"{ACTOR}.loss_agg_mode", text)
    if loss not in ("gmpo", "sapo"):
        return aggregation
    has_others = command.take(f"{ACTOR}.use_kl_loss", False) or command.number(f"{ACTOR}.entropy_coeff", 0)
    if has_others and aggregation != by_sequences:
        command.remark(f"{ACTOR}.loss_agg_mode", "KL and entropy are averaged by sequences too, as this loss is")
    return by_sequences


def put_bounds(command: Command, tree: Tree) -> None:
    """Put the bounds of the ratio. clip_ratio counts where one of them is null."""
    clip = command.number(f"{ACTOR}.clip_ratio", 0.2)
    for side in ("low", "high"):
        key = f"{ACTOR}.clip_ratio_{side}"
        is_null = key in command.given and command.given[key] is None
        command.asked.add(key)
        tree.put(f"algorithm.clip_ratio_{side}", clip if is_null else command.number(key, 0.2))
    taken = tree["algorithm"]["clip_ratio_low"], tree["algorithm"]["clip_ratio_high"]
    if f"{ACTOR}.clip_ratio" in command.given and clip not in taken:
        command.remark(f"{ACTOR}.clip_ratio", "verl's losses read clip_ratio_low and clip_ratio_high, which are taken")


def put_filter(command: Command, tree: Tree) -> None:
    """Put DAPO's dynamic sampling."""
    section = "algorithm.filter_groups"
    prompts = command.number("data.gen_batch_size") or tree["batch"]["prompts_per_step"]
    if not command.take(f"{section}.enable", False):
        if prompts != tree["batch"]["prompts_per_step"] and not command.is_stream:
            command.remark("data.gen_batch_size", "without filter_groups a step has data.train_batch_size prompts")
        return
    tree.put(f"{section}.enable", True)
    tree.put(f"{section}.metric", command.choose(f"{section}.metric", "reward", METRICS))
    tree.put(f"{section}.max_num_gen_batches", max(0, command.number(f"{section}.max_num_gen_batches", 0)))
    tree.put(f"{section}.when_exhausted", "stop")
    tree.put(f"{section}.prompts_per_round", None if command.is_stream else prompts)


def put_overlong(command: Command, tree: Tree, buffer: str) -> None:
    """Put DAPO's penalty of long responses."""
    if command.take(f"{buffer}.enable", False):
        tree.put("algorithm.overlong_buffer.enable", True)
        tree.put("algorithm.overlong_buffer.len", command.take(f"{buffer}.len"))
        tree.put("algorithm.overlong_buffer.penalty_factor", command.take(f"{buffer}.penalty_factor", 1.0))


def put_router_replay(command: Command, tree: Tree) -> None:
    """Put the rollout's choices of experts, which verl's mode R3 replays."""
    sections = (ACTOR, *(f"{ACTOR}.{engine}" for engine in ("megatron", "fsdp_config", "veomni")))
    keys = [f"{section}.router_replay.mode" for section in sections]
    modes = {key: command.take(key) for key in keys}
    mode = next((mode for mode in modes.values() if mode not in (None, "disabled")), "disabled")
    if command.take(f"{ROLLOUT}.enable_rollout_routing_replay", mode == "R3") and mode == "R3":
        tree.put("algorithm.router_replay", "rollout")
    elif mode != "disabled":
        key = next(key for key in keys if modes[key] == mode)
        command.refuse(key, "here is R3, the replay of the rollout's experts; none are replayed")


def put_divergence(command: Command, tree: Tree) -> None:
    """Put the KL divergence from the reference, of the loss or else of the reward."""
    take, put = command.take, tree.put
    in_loss, in_reward = take(f"{ACTOR}.use_kl_loss", False), take("algorithm.use_kl_in_reward", False)
    if in_loss and in_reward:
        command.refuse(
            "algorithm.use_kl_in_reward", "the divergence is a term of the loss or of the reward, here of the loss"
        )
    if in_loss:
        kind = str(take(f"{ACTOR}.kl_loss_type", "low_var_kl"))
        put("algorithm.kl_coef", take(f"{ACTOR}.kl_loss_coef", 0.001))
        put("algorithm.kl_placement", "loss")
        put("algorithm.kl_gradient", "k2" if kind.endswith("+") else None)
        key = f"{ACTOR}.kl_loss_type"
    elif in_reward:
        kind, key = str(take("algorithm.kl_penalty", "kl")), "algorithm.kl_penalty"
        put("algorithm.kl_coef", take("algorithm.kl_ctrl.kl_coef", 0.001))
        put("algorithm.kl_placement", "reward")
        if take("algorithm.kl_ctrl.type", "fixed") == "adaptive":
            put("algorithm.kl_controller.type", "adaptive")
            put("algorithm.kl_controller.target", take("algorithm.kl_ctrl.target_kl", 0.1))
            put("algorithm.kl_controller.horizon", take("algorithm.kl_ctrl.horizon", 10000))
    else:
        command.pass_over(f"{ACTOR}.kl_loss_", "algorithm.kl_penalty", "algorithm.kl_ctrl.")
        return
    if kind.removesuffix("+") not in ESTIMATORS:
        command.refuse(key, f"here are {', '.join(ESTIMATORS)}")
    put("algorithm.kl_estimator", ESTIMATORS.get(kind.removesuffix("+")))


def put_correction(command: Command, tree: Tree) -> None:
    """Put importance weights, and responses left out, against the difference between rollout and trainer."""
    take = command.take
    bypasses = command.first(f"{CORRECTION}.bypass_mode", f"{CORRECTION}.bypass_old_logprob_for_rollout", default=False)
    level = take(f"{CORRECTION}.rollout_is", "")
    low, cap = _bounds(f"{CORRECTION}.rollout_is_threshold", take(f"{CORRECTION}.rollout_is_threshold") or 2.0)
    old_cap = command.number(f"{ACTOR}.tis_imp_ratio_cap")  # before verl 0.6
    if old_cap and old_cap > 0:
        level, low, cap = "token", None, old_cap
    normalizes = take(f"{CORRECTION}.rollout_is_batch_normalize", False)
    if command.take(f"{ACTOR}.use_rollout_log_probs", False) and not bypasses:
        command.remark(f"{ACTOR}.use_rollout_log_probs", "read by verl 0.7 alone; later bypass_mode decides, as here")
    loss_type = take(f"{CORRECTION}.loss_type", "ppo_clip")
    if bypasses:
        tree.put("algorithm.old_logprobs", "rollout")
        if loss_type != "ppo_clip":
            command.refuse(f"{CORRECTION}.loss_type", "with old_logprobs: rollout the loss is algorithm.policy_loss")
        if take(f"{CORRECTION}.rollout_rs", ""):
            command.refuse(f"{CORRECTION}.rollout_rs", "with old_logprobs: rollout no response is left out")
        return  # verl, too, leaves the weights out: the ratio is already against the rollout
    if level:
        for key, value in (
            ("type", "mis" if low else "tis"),
            ("level", level),
            ("threshold", cap),
            ("threshold_low", low),
        ):
            tree.put(f"{CORRECTION}.{key}", value)
        if normalizes:
            command.refuse(f"{CORRECTION}.rollout_is_batch_normalize", "weights are not divided by their mean")
    put_rejection(command, tree, level, cap)
    tree.put(f"{CORRECTION}.veto_threshold", command.number(f"{CORRECTION}.rollout_token_veto_threshold"))
    if "rollout_correction" in tree["algorithm"]:
        command.remarks.append(
            f"{CORRECTION}: weights are of KL and entropy too, and rejected tokens still count in means"
        )


def put_rejection(command: Command, tree: Tree, level: str, cap: float) -> None:
    """Put what is left out by the ratio. verl's k1 is the logarithm of rollout over trainer, so bounds change
    places."""
    key = f"{CORRECTION}.rollout_rs"
    for option, low, high in _rejections(command, cap):
        if option in ("seq_mean_k1", "geometric"):
            if abs(math.log(low) + math.log(high)) > 0.01 * math.log(high):
                command.refuse(f"{key}_threshold", "the lower bound of a mean ratio is 1 / the upper")
            else:
                tree.put(f"{CORRECTION}.reject_threshold", high)
        elif option in ("token_k1", "token", "seq_sum_k1", "sequence"):
            of = "token" if option.startswith("token") else "sequence"
            bounds = (1 / high, 1 / low) if option.endswith("k1") else (low, high)
            if of != level or cap < bounds[1]:
                command.refuse(
                    key,
                    f"{option}: what is kept has its ratio as weight here, so it needs rollout_is={of} with a "
                    f"rollout_is_threshold of {bounds[1]:g} or more",
                )
                continue
            for ours, value in (("type", "mis"), ("threshold_low", bounds[0]), ("threshold", bounds[1])):
                tree.put(f"{CORRECTION}.{ours}", value)
        else:
            command.refuse(key, f"{option}: here are token_k1, seq_sum_k1 and seq_mean_k1")


def _rejections(command: Command, cap: float) -> Iterator[tuple[str, float, float]]:
    """Yield (option, lower, upper bound) of each criterion of a comma separated list; one threshold is for all."""
    key = f"{CORRECTION}.rollout_rs"
    text, thresholds = str(command.take(key, "") or ""), command.take(f"{key}_threshold")
    lower = command.number(f"{key}_threshold_lower")  # of verl 0.6
    options = [option.strip() for option in text.split(",") if option.strip()]
    listed = thresholds if isinstance(thresholds, list) else str(thresholds or cap).split(",")
    if len(listed) not in (1, len(options)) and options:
        raise RecipeError(f"{key}_threshold={shown(thresholds)}: must be one threshold, or one for each of {text}")
    for option, threshold in zip(options, listed * (len(options) if len(listed) == 1 else 1), strict=False):
        low, high = _bounds(f"{key}_threshold", threshold)
        yield option, low or lower or 1 / high, high


def _bounds(key: str, threshold: Any) -> tuple[float | None, float]:
    """Return (lower bound or None, upper bound) of a threshold such as 2.0 or 0.5_4.0; raises RecipeError for
    another."""
    try:
        parts = [float(part) for part in str(threshold).strip().split("_")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2) or any(not 0 < part < math.inf for part in parts) or sorted(parts) != parts:
        raise RecipeError(f"{key}={shown(threshold)}: must be a bound above 0, or LOWER_UPPER such as 0.5_4.0")
    return (parts[0] if len(parts) == 2 else None), parts[-1]
