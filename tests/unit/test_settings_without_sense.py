"""Settings, each in its range, that could do nothing, never end, or would be read otherwise than meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_megatron.recipe import RecipeError, check_world, load_recipe

RECIPE: dict[str, Any] = {
    "name": "small",
    "loop": "rl",
    "steps": 10,
    "model": {"path": "somewhere", "dtype": "bfloat16"},
    "data": {"train_files": ["a.parquet"], "validation_files": ["b.parquet"], "max_prompt_length": 100},
    "batch": {"prompts_per_step": 8, "responses_per_prompt": 4},
    "actor": {"tokens_per_gpu": 1000, "optimizer": {"learning_rate": 1e-4}},
    "rollout": {"max_response_length": 50},
}
TOOLS = "rollout.multi_turn={tool_parser: hermes"
SERVICE = "reward.service={url: 'http://host', header_environment: KEY}"
KEEPS = ("checkpoint.keep_best={}", "checkpoint.save_interval=4", "evaluation.at_end=false")
DRAFTS = "rollout.speculative={method: %s, optimizer: {learning_rate: 1e-4}}"
TELLS = "health.rules=[{metric: x, when: above, value: 1, action: alert}]"
FILTERS = "algorithm.filter_groups={enable: true, max_num_gen_batches: 2, prompts_per_round: %d}"
RESUMED = ("rollout.partial=resume", "rollout.oversample=1.5")
QUANTIZED = "rollout.quantization"
PROFILES = "monitor.profile={steps: [1], ranks: [%s], phases: [%s]}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path / "recipe.yaml"


OVERLAPPED = ["actor.optimizer.overlap_grad_reduce=true", "actor.optimizer.overlap_param_gather=true"]
REFUSED = [
    ([FILTERS % 4, "algorithm.advantage=remax", "batch.responses_per_prompt=1"], "at least 2"),
    ([FILTERS % 3], "is below batch.prompts_per_step=8"),
    ([*KEEPS], "no step of 10 is both saved"),
    ([*KEEPS, "evaluation.interval=3"], "no step of 10 is both saved"),
    (["monitor.profile.steps=[11]"], "the run has 10 steps"),
    (["monitor.timeline.steps=[11, 12]"], "the run has 10 steps"),
    ([PROFILES % ("", "update")], "ranks=[]"),
    ([PROFILES % ("0", "")], "phases=[]"),
    (["monitor.trackers=[jsonl, csv, jsonl]"], "jsonl is named twice"),
    (["monitor.log_model=true"], "mlflow alone takes a model"),
    (["rollout.max_num_batched_tokens=255"], "is below max_num_seqs=256"),
    (["rollout.enable_chunked_prefill=false", "rollout.max_num_batched_tokens=149", "rollout.max_num_seqs=9"], "150"),
    (["actor.optimizer.weight_decay=1e4"], "takes all of each weight away"),
    (["actor.optimizer.overlap_param_gather=true"], "needs overlap_grad_reduce, whose buckets it gathers"),
    ([*OVERLAPPED, "actor.optimizer.distributed=false"], "needs optimizer.distributed"),
    ([*OVERLAPPED, "actor.lora={rank: 8}"], "adapters are merged after each step"),
    (["actor.fp8=blockwise", "actor.lora={rank: 8}"], "fp8=blockwise: not for adapters in this version"),
    (["actor.fp8=blockwise", "actor.transformer_implementation=local"], "fp8=blockwise needs Transformer Engine"),
    (["actor.fp8=blockwise", "model.dtype=float16"], "actor.fp8=blockwise needs model.dtype bfloat16; it is float16"),
    (["actor.fp8=blockwise", "cluster.gpu=A100"], "cluster.gpu=A100 is none of H100, H20, H200, H800"),
    ([f"{QUANTIZED}=fp8", "cluster.gpu=A100"], "cluster.gpu=A100 is none of B200, GB200, H100"),
    ([f"{QUANTIZED}=fp8_blockwise", "cluster.gpu=B200"], "is none of H100, H20, H200, H800"),
    ([DRAFTS % "suffix"], "optimizer: method=suffix drafts without a model that could learn"),
    ([DRAFTS % "eagle3", "actor.layout.pipeline=2"], "a head that drafts and learns reads states of several layers"),
    (
        ["rollout.speculative={method: mtp, optimizer: {learning_rate: 1e-4, overlap_grad_reduce: true}}"],
        "optimizer.overlap_grad_reduce: what drafts learns in the actor's passes",
    ),
    (["rollout.speculative={method: eagle3}"], "a new head is random until it learns"),
    (["rollout.speculative={method: mtp, path: somewhere}"], "method=mtp has no head"),
    ([DRAFTS % "mtp", "actor.shared_prompts=true"], "the token behind a prompt that rows share differs"),
    ([DRAFTS % "mtp", "model.dtype=float16"], "has no loss scale of its own"),
    (["actor.fp8=tensorwise"], "Input should be 'blockwise'; it is 'tensorwise'"),
    (["batch.prompts_per_step=1048576", "batch.responses_per_prompt=17"], "17,825,792 rows"),
    (["algorithm.sapo.temperature_positive=2"], "is for policy_loss sapo"),
    (["algorithm.covariance.fraction=0.5"], "is for policy_loss clip_cov and kl_cov"),
    (["algorithm.credited_turns=last"], "algorithm.credited_turns: responses have one turn"),
    (["algorithm.discount_per=turn"], "discount_per=turn is for advantage gae and reinforce_plus_plus"),
    (["rollout.multi_turn={}"], "give one of function, tools and environment"),
    (["rollout.multi_turn={tools: [a.py]}"], "set tool_parser to vLLM's, such as hermes"),
    (["rollout.multi_turn={function: a.py, tool_parser: hermes}"], "tool_parser: it is read with tools alone"),
    ([f"{TOOLS}, tools: [{{command: [a], url: 'http://[::1]:1'}}]}}"], "has one of command and url"),
    ([f"{TOOLS}, tools: [{{url: 'http://example.org:1'}}]}}"], "only http:// on the loopback is allowed"),
    ([f"{TOOLS}, network: false, tools: [{{url: 'http://localhost:1'}}]}}"], "network=false: the server at http://local"),
    ([f"{TOOLS}, tools: [a.py]}}", "data.chat_template_kwargs={tools: []}"], "rollout.multi_turn.tools describes"),
    (["rollout.multi_turn={function: a.py}", *RESUMED], "what was given up begins anew; use discard"),
    (["rollout.multi_turn={environment: a.py, workers: 2}"], "environments and tools have a process each"),
    (["reward.parts=[{name: a, rule: math, weight: 0}]"], "all weights are 0"),
    (["reward.rule=gsm8k", "reward.code.score=all"], "reward.code is for rule code"),
    (["reward.rule=none", "reward_model={path: m, tokens_per_gpu: 9, weight: 0}"], "reward_model.weight=0"),
    (["reward.rule=length", "reward.length_low=50", "reward.length_high=60"], "no response would be paid"),
    (["reward.rule=format", "reward.pattern='a{99999999999}'"], "pattern is not a regular expression"),
    (["reward.rule=format", f"reward.pattern={'(' * 2000}a{')' * 2000}"], "pattern is not a regular expression"),
    ([SERVICE, "reward.service.url=http://host:99999"], "Port out of range"),
    ([SERVICE, "reward.service.url=http://host:x"], "Port could not be cast"),
    ([SERVICE, "reward.service.url=http://host:0"], "port 0"),
    ([SERVICE, "reward.service.url=http://host/a b"], "blanks"),
    ([SERVICE, "reward.service.header=Content-Length"], "that authenticates"),
    ([SERVICE, "reward.service.header=X-Key", "reward.service.header_environment=null"], "nothing would be sent"),
    ([SERVICE, "reward.service.header_environment=A=B"], "names an environment variable"),
    (["health.alert.webhook_environment=https://hooks.example/abc"], "names an environment variable"),
    ([TELLS], "nobody gets the alert"),
    (["health.rules=[{metric: x, when: above, value: 1, window: 5}]"], "window=5 is for"),
    (["retry.launcher=ft_launcher", "retry.hang_seconds=0"], "would kill each rank"),
    (["slurm.options=[--nodes=4]"], "set slurm.nodes"),
    (["slurm.options=[--qos=high, --no-requeue]"], "set slurm.requeue"),
    (["slurm.options=['--']"], "is none of sbatch's"),
    (["slurm.container_mounts=['/a:/b']"], "there is no container"),
    (["data.response_column=response"], "loop rl does not read it"),
    (["data.shuffle=1"], "must be true or false; it is 1"),
    (["model.random_weights=0.0"], "must be true or false; it is 0.0"),
    (["run_root=~/runs"], "only a shell knows what ~ is"),
    (["run_root=${HOME}/runs"], "only a shell knows what ${HOME} is"),
    (["data.train_files=[a.parquet, $DATA/b.parquet]"], "only a shell knows what $DATA is"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "line"), REFUSED, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_each_is_refused_in_one_line(recipe: Path, overrides: list[str], line: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    assert line in str(caught.value) and str(caught.value).isprintable()
    assert "hooks.example" not in str(caught.value)  # it may be a secret


@pytest.mark.parametrize(
    "overrides",
    [
        [FILTERS % 4], [*KEEPS, "evaluation.interval=5"], [*KEEPS, "evaluation.interval=2"], [*KEEPS[:2]],
        ["monitor.profile.steps=[10, 11]"], ["monitor.timeline={steps: [11], every: 2}"],
        ["rollout.max_num_batched_tokens=256"], ["actor.optimizer.weight_decay=1"],
        ["algorithm.policy_loss=sapo", "algorithm.sapo.temperature_positive=2"],
        ["algorithm.policy_loss=kl_cov", "algorithm.covariance.fraction=0.5"],
        ["reward.parts=[{name: a, rule: math}, {name: b, rule: gsm8k, weight: 0}]"],
        [SERVICE, "reward.service.header=X-Key", "reward.service.url=https://host:8443/a?b=c"],
        [TELLS, "health.alert.command=[mail]"], ["slurm.options=[--qos=high, --cpus-per-task=16, --exclusive]"],
        ["run_root=a~/b$c"], ["data.shuffle=no"],
    ],
    ids=lambda value: value[0][:40],
)  # fmt: skip
def test_their_neighbours_are_right(recipe: Path, overrides: list[str]) -> None:
    load_recipe(recipe, overrides)


def test_a_profile_of_a_rank_that_is_not_there(recipe: Path) -> None:
    asked = load_recipe(recipe, [PROFILES % ("0, 9", "update")])
    check_world(asked, 10)
    with pytest.raises(RecipeError, match="there is no rank 9 of 8"):
        check_world(asked, 8)
