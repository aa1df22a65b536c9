"""Trajectories in simulated environments that answer after some seconds, beside the same turns answered at once.

    python tools/bench/environments.py [--shapes 1.5B] [--steps 2] [--output docs/results/environments.json]

Random weights; lengths of turns and waits are drawn from lognormal distributions, the same in every step. Each step is
one generation of all trajectories by the engine, with environments in processes of their own and the chat template's
tokens between the turns, as in training; with waits and without, in turn, in one engine. Latencies are between 0 and 5
seconds: of their distribution a hundredth is beyond, and is cut. The report has both speeds, their ratio, and where the
time went: steps of the engine, the engine idle until an answer came, and the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import yaml
from launching import run_on_ranks
from reports import exit_status, rows_of, spread, write_report
from step import folder_with_model, model_config

from rlhf_megatron.recipe import RLRecipe, load_rl
from rlhf_megatron.recipe.rollout import DrawnLengthsSection
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

if TYPE_CHECKING:
    from rlhf_megatron.data.tokenizer import Tokenizer
    from rlhf_megatron.generation.conversations import Conversations
    from rlhf_megatron.generation.partners import Partner
    from rlhf_megatron.generation.prompt_groups import Group
    from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine

HERE = Path(__file__).resolve().parent
RESPONSES, PROMPT_TOKENS, ANSWER_TOKENS = 8, 256, 128
LONGEST = 3.0  # turn, over the mean one
LATENCY = {"median": 0.5, "sigma": 1.0, "longest": 5.0}
WANTED = 0.85
SECONDS_FOR_ONE_SHAPE = 1500.0
QWEN = "recipes/models/qwen2.5-0.5b"
OF_1_5B = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model, and what it does in one step.

    Attributes:
        config: folder of its config.json, ``changed`` in some fields; None: a tiny one.
        trajectories: of them ``RESPONSES`` to a prompt.
        tokens: mean of a turn.
        waits: factor of all latencies.
        rollout: other settings of the engine.
    """

    config: str | None
    trajectories: int
    turns: int
    tokens: int
    changed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    waits: float = 1.0
    rollout: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def lengths(self, row: int) -> list[int]:
        """Return tokens of each turn of a trajectory."""
        drawn = DrawnLengthsSection(mean=self.tokens, sigma=0.6)
        turns = range(row * self.turns, (row + 1) * self.turns)
        return [min(drawn.of_row(turn), int(LONGEST * self.tokens)) for turn in turns]

    def latencies(self, row: int) -> list[float]:
        """Return seconds until each turn of a trajectory is answered."""
        draw = Random(f"latency {row}")
        drawn = [LATENCY["median"] * draw.lognormvariate(0.0, LATENCY["sigma"]) for _ in range(self.turns)]
        return [self.waits * min(seconds, LATENCY["longest"]) for seconds in drawn]


# In 80 GB; "toy" on two CPU cores. Of the last two, one has a quarter of the seats, and one a cache for about a third.
SHAPES = {
    "toy": Shape(None, 32, 4, 16, waits=0.1, rollout={"max_num_seqs": 8}),
    "0.5B": Shape(QWEN, 256, 8, 512),
    "1.5B": Shape(QWEN, 256, 8, 512, OF_1_5B),
    "7B": Shape("recipes/models/qwen2.5-7b", 256, 8, 512),
    "0.5B-seats": Shape(QWEN, 256, 8, 128, rollout={"max_num_seqs": 64}),
    "0.5B-cache": Shape(QWEN, 256, 8, 256, rollout={"kv_cache_gb": 2.0}),
}


def main() -> int:
    """Measure one shape after the other; return 1 where one failed or missed the target."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["1.5B" if on_gpu else "toy"])
    parser.add_argument("--steps", type=int, default=2, help="of each kind, beyond a short one; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("docs/results/environments.json"))
    options = parser.parse_args()
    prepare_environment()
    missed = []
    for name in options.shapes:
        row = measured(name, options.steps, options.output)
        if "failed" in row:
            missed.append(f"{name}: {row['failed']}")
        elif name != "toy" and row["ratio"]["median"] < WANTED:
            missed.append(f"{name}: {row['ratio']['median']:.1%} of the speed without waits, below {WANTED:.0%}")
    return exit_status(missed)


def measured(name: str, steps: int, output: Path) -> dict[str, Any]:
    """Return the row of one shape, which is in the report as soon as it has a step of each kind."""
    with tempfile.TemporaryDirectory() as work:
        folder = folder_with_model(Path(work) / "work")
        prepare(SHAPES[name], folder)
        arguments = [name, str(steps), str(output.resolve())]
        failed = run_on_ranks(1, HERE / "environments.py", arguments, SECONDS_FOR_ONE_SHAPE, folder)
    if failed:
        return {"failed": failed}
    return next(row for row in rows_of(output) if row["shape"] == name)


def prepare(shape: Shape, folder: Path) -> RLRecipe:
    """Write the recipe into a ``folder`` with a tiny model, which gets the shape's; return it."""
    path = folder / "model" / "config.json"
    tiny = json.loads(path.read_text(encoding="utf-8")) | {"max_position_embeddings": 4096}
    config = model_config({"config": shape.config, "changed": shape.changed}) if shape.config else tiny
    path.write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(HERE / "waiting_environment.py", folder)
    longest = max(sum(shape.lengths(row)) for row in range(shape.trajectories)) + shape.turns * ANSWER_TOKENS
    turns = {"environment": "waiting_environment.py", "max_assistant_turns": shape.turns}
    values = {
        "name": "environments",
        "loop": "rl",
        "steps": 1,
        "model": {"path": "model", "dtype": "bfloat16" if shape.config else "float32", "random_weights": True},
        "data": {"train_files": ["none.parquet"], "max_prompt_length": PROMPT_TOKENS},
        "batch": {"prompts_per_step": shape.trajectories // RESPONSES, "responses_per_prompt": RESPONSES},
        "actor": {"tokens_per_gpu": PROMPT_TOKENS + longest, "optimizer": {"learning_rate": 1e-6}},
        "rollout": {"max_response_length": longest, "sleep": False, "multi_turn": turns}
        | ({"gpu_memory_utilization": 0.85} if shape.config else {})
        | dict(shape.rollout),
        "reward": {"rule": "none"},
        "evaluation": {"at_start": False, "at_end": False},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return load_rl(folder / "recipe.yaml")


def groups_of(tokenizer: Tokenizer, shape: Shape) -> list[Group]:
    """Return prompts of random digits, each a token."""
    from rlhf_megatron.data.prompts import Prompt
    from rlhf_megatron.generation.prompt_groups import Group

    groups = []
    for number in range(shape.trajectories // RESPONSES):
        digits = "".join(Random(number).choices("0123456789", k=PROMPT_TOKENS // 2))
        messages = ({"role": "user", "content": digits},)
        tokens = tuple(tokenizer.encode_chat(messages))
        groups.append(Group(Prompt(number, "environments", tokens, "", {}, messages)))
    return groups


def turns_of(
    recipe: RLRecipe,
    partner: Partner,
    groups: Sequence[Group],
    tokenizer: Tokenizer,
    lengths: Mapping[int, Sequence[int]],
    waits: Mapping[int, Sequence[float]],
) -> Conversations:
    """Return the turns of one step: whatever the model samples, they end after as many tokens as ``lengths`` say."""
    from rlhf_megatron.generation.conversations import Conversations
    from rlhf_megatron.rewards.user_environment import TURNS
    from rlhf_megatron.rollout.engine import Completion, EnvironmentReply

    class GivenTurns(Conversations):
        def _ending(self, completion: Completion) -> str | None:
            return TURNS if completion.turns >= len(lengths[completion.row_id]) else None

        def _row(self, row_id: int, attempt: int) -> dict[str, Any]:
            return super()._row(row_id, attempt) | {"extra_info": {"waits": list(waits[row_id])}}

        def read(self, completion: Completion, outcome: Any) -> EnvironmentReply:
            reply = super().read(completion, outcome)
            assert isinstance(reply, EnvironmentReply), "nothing manages the context"
            if reply.token_ids is None:
                return reply
            return reply._replace(max_tokens=lengths[completion.row_id][completion.turns])

    section = recipe.rollout.multi_turn
    assert section is not None, "of a recipe of this file"
    return GivenTurns(recipe, section, partner, groups, RESPONSES, tokenizer, lambda row: row)


class Measuring:
    """One engine and the environments' processes, on this rank."""

    def __init__(self, shape: Shape, recipe: RLRecipe) -> None:
        from rlhf_megatron.data.tokenizer_loading import load_tokenizer
        from rlhf_megatron.generation.partners import Partner, make_partner
        from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine

        self._shape, self._recipe, self._tokenizer = shape, recipe, load_tokenizer(Path("model"))
        self._engine: VllmEngine = VllmEngine("model", recipe.rollout, recipe.model.dtype, PROMPT_TOKENS, seed=1)
        partner = make_partner(recipe, leads=True)
        assert isinstance(partner, Partner)
        self._partner, self._groups = partner, groups_of(self._tokenizer, shape)

    def step(self, waits: bool, part: int = 1) -> dict[str, float]:
        """Play all trajectories, with turns of a ``part`` of their lengths; return what that took."""
        from rlhf_megatron.generation.prompt_groups import requests_for
        from rlhf_megatron.rollout.engine import Sampling

        shape, longest = self._shape, self._recipe.rollout.max_response_length
        rows = range(shape.trajectories)
        lengths = {row: [max(1, tokens // part) for tokens in shape.lengths(row)] for row in rows}
        latencies = {row: shape.latencies(row) if waits else [0.0] * shape.turns for row in rows}
        turns = turns_of(self._recipe, self._partner, self._groups, self._tokenizer, lengths, latencies)
        requests = requests_for(self._groups, RESPONSES, lambda _: longest, lambda row: row)
        self._engine.weights_updated(0)  # empties the prefix cache
        began = time.perf_counter()
        with turns:
            completions = self._engine.generate(requests, Sampling(1.0, 1.0, -1, longest, ()), environment=turns)
        seconds, record = time.perf_counter() - began, self._engine.record
        tokens = sum(completion.sampled_tokens for completion in completions)
        expected = sum(sum(of_row) for of_row in lengths.values())
        assert tokens == expected and turns.counts.failed == 0, f"{tokens} tokens of {expected}"
        return {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "engine_seconds": record.engine_seconds,
            "idle_seconds": record.idle_seconds,
            "other_seconds": seconds - record.engine_seconds - record.idle_seconds,
            "engine_steps": record.steps,
            "engine_step_ms": 1000 * record.engine_seconds / record.steps,
            "running_mean": record.in_flight,
            "waiting_mean": record.waiting_seconds / (record.engine_seconds + record.idle_seconds),
            "latency_mean": turns.counts.seconds / turns.counts.calls,
            "prefix_cache_hit_rate": 1 - record.prefilled_tokens / record.prompt_tokens,
            "tokens": tokens,
        }

    def close(self) -> None:
        """End processes and engine."""
        self._partner.close()
        self._engine.close()


def run_rank(name: str, steps: int, output: Path) -> None:
    """Do the rank's part, which writes the report after each pair of steps."""
    prepare_environment()
    from rlhf_megatron.topology.world import join_world

    join_world()
    sys.argv[1:] = ["--shapes", name, "--steps", str(steps)]  # for the report: the command that leads here
    recipe = load_rl(Path("recipe.yaml"))
    for measured in measure(SHAPES[name], recipe, steps):
        write(output, name, recipe, measured)


def measure(shape: Shape, recipe: RLRecipe, steps: int) -> Iterator[dict[bool, list[dict[str, float]]]]:
    """Yield the figures of the steps so far, with waits and without, after each pair."""
    measuring = Measuring(shape, recipe)
    measuring.step(waits=False, part=8)
    measured: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for step in range(steps):
        for waits in (True, False) if step % 2 else (False, True):  # neither is always the first
            measured[waits].append(measuring.step(waits))
            print(json.dumps({"waits": waits, **measured[waits][-1]}), flush=True)
        yield measured
    measuring.close()


def write(output: Path, name: str, recipe: RLRecipe, measured: Mapping[bool, Sequence[Mapping[str, float]]]) -> None:
    """Put a shape's row into the report, in place of its former one."""
    with_waits, without = (
        {key: spread([step[key] for step in measured[waits]]) for key in measured[waits][0]} for waits in (True, False)
    )
    speeds = [[step["tokens_per_second"] for step in measured[waits]] for waits in (True, False)]
    row = {
        "shape": name,
        **dataclasses.asdict(SHAPES[name]),
        "max_num_seqs": recipe.rollout.max_num_seqs,
        "latency": LATENCY,
        "prompt_tokens": PROMPT_TOKENS // 2,
        "steps": len(speeds[0]),
        "ratio": spread([slow / fast for slow, fast in zip(*speeds, strict=True)]),
        "with_waits": with_waits,
        "without_waits": without,
    }
    write_report(output, {"rows": [*(old for old in rows_of(output) if old["shape"] != name), row]})


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in SHAPES:
        run_rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(main())
