"""The demo: a small model learns arithmetic by reinforcement learning on this machine's CPU, in a few minutes.

    python tools/demo.py [--seed N] [--folder runs]

Makes a model with random weights and the data, teaches it the form of answers (recipes/tiny_sft.yaml), then trains it
by GRPO (recipes/tiny_grpo.yaml). Each stage is a command that is printed, to be run and changed by hand.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rlhf_megatron.runtime.command import ArgumentParser, command

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
TASK = ("reasoning-gym", "--task", "chain_sum", "--set", "min_terms=4", "max_terms=4", "min_digits=1", "max_digits=1")
# Apart enough that the generators of both files do not meet; --exclude keeps held-out problems out of training anyway.
HELD_OUT_SEED, TRAIN_SEED = 9_000_000, 1
WORKED_FRACTION = "0.4"


@command
def main() -> int:
    """Run the stages in order; return the exit status of the first that fails."""
    parser = ArgumentParser(description="Train a small model by reinforcement learning on a CPU.")
    parser.add_argument("--seed", type=int, default=1, help="of weights, data order and sampling (default: 1)")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where everything goes (default: runs)")
    options = parser.parse_args()
    started = time.monotonic()
    for number, (title, words) in enumerate(stages(options.seed, options.folder), start=1):
        elapsed = time.monotonic() - started
        print(
            f"\n[{number}] {title} ({elapsed:.0f} s so far)\n    {' '.join(shorten(part) for part in words)}",
            flush=True,
        )
        status = subprocess.run(words, env=environment(), check=False).returncode
        if status:
            print(f"error: stage {number} ended with status {status}; its messages are above", file=sys.stderr)
            return status
    print(f"done in {time.monotonic() - started:.0f} s; the run on one page: {options.folder}/tiny_grpo/report.html")
    return 0


def stages(seed: int, folder: Path) -> list[tuple[str, list[str]]]:
    """Return the stages of the demo: (title, command) of each."""
    python, data = [sys.executable, "-P"], folder / "tiny"
    shutil.rmtree(data, ignore_errors=True)
    prepare = [*python, "tools/prepare_data.py"]
    train, held_out = data / "train.parquet", data / "held_out.parquet"
    shown, shown_held_out = data / "demonstrations.parquet", data / "held_out_demonstrations.parquet"
    torchrun = [*python, "launch/torchrun.py", "--standalone", "--nproc-per-node", str(RANKS), "launch/train.py"]
    warm_up_recipe, recipe = "recipes/tiny_sft.yaml", "recipes/tiny_grpo.yaml"
    warm_up = folder / "tiny_sft" / "export"
    common = [f"run_root={folder}", f"seed={seed}", f"data.validation_files=[{held_out}]"]
    demonstrate = [*prepare, "demonstrations", "--worked", WORKED_FRACTION]
    return [
        (
            "a model with random weights, and its tokenizer",
            [*python, "tools/make_tiny_model.py", "--output", str(data / "model"), "--seed", str(seed)],
        ),
        (
            "held-out problems",
            [*prepare, *TASK, "--size", "400", "--seed", str(HELD_OUT_SEED), "--output", str(held_out)],
        ),
        (
            "training problems, none of them held out",
            [
                *prepare, *TASK, "--size", "6000", "--seed", str(TRAIN_SEED), "--exclude", str(held_out),
                "--output", str(train),
            ],
        ),
        (
            "demonstrations: some answer at once, some work it out",
            [*demonstrate, "--input", str(train), "--output", str(shown)],
        ),
        (
            "the same for held-out problems, to watch the loss",
            [*demonstrate, "--input", str(held_out), "--output", str(shown_held_out)],
        ),
        (
            "supervised warm-up: what an answer looks like",
            [
                *torchrun, warm_up_recipe, *common[:2], f"model.path={data / 'model'}",
                f"data.train_files=[{shown}]", f"data.validation_files=[{shown_held_out}]",
            ],
        ),
        (
            "GRPO: which way of answering pays",
            [
                *torchrun, recipe, *common, f"model.path={warm_up / f'step-{steps_of(warm_up_recipe)}'}",
                f"data.train_files=[{train}]",
            ],
        ),
    ]  # fmt: skip


def steps_of(recipe: str) -> int:
    """Return the number of steps that a recipe file asks for."""
    from rlhf_megatron.recipe import load_recipe

    return load_recipe(ROOT / recipe).steps


def shorten(part: str) -> str:
    """Return the interpreter by its name alone, as a person would type it."""
    return "python" if part == sys.executable else part


def environment() -> dict[str, str]:
    """Return one thread for each rank, and no search of the network for models."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return settings | dict(os.environ)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
