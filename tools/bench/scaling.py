"""Reckons what a step of 7B costs a GPU at 8 to 8,192 of them, term by term, and draws it.

    python tools/bench/scaling.py [--gpus 8 64 512 4096 8192] [--output docs/results/scaling_terms.json] \\
        [--plot docs/images/scaling.png]

Each GPU has 8 prompts with 8 responses each. The layout is the first that launch/plan.py proposes for 8 GPUs, with more
data parallelism. Points of the plot are measured: by tools/bench/bookkeeping.py, of other rows (16,384 tokens).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from reports import write_report

from rlhf_megatron.planning.layout_search import find_layouts
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.planning.start_time import expected_start
from rlhf_megatron.planning.step_terms import step_terms
from rlhf_megatron.planning.step_time import expected_time
from rlhf_megatron.recipe import RLRecipe, load_rl

ROOT = Path(__file__).parents[2]
PROMPTS = 8  # of a GPU


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512, 1024, 4096, 8192])
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    parser.add_argument("--plot", type=Path, help="draw them there")
    options = parser.parse_args()
    layout = find_layouts(recipe_of(8, ()), 8)[0].overrides
    rows = [terms_of(gpus, layout) for gpus in options.gpus]
    for row in rows:
        print(json.dumps({name: float(f"{value:.3g}") for name, value in row.items()}))
    if options.output:
        write_report(options.output, {"settings": {"layout": layout, "prompts_of_a_gpu": PROMPTS}, "rows": rows})
    if options.plot:
        draw(rows, options.plot)
    return 0


def recipe_of(gpus: int, overrides: tuple[str, ...]) -> RLRecipe:
    """Return the recipe with as many prompts for each GPU at any number of them."""
    count = PROMPTS * gpus
    sizes = (f"batch.prompts_per_step={count}", f"batch.minibatch_prompts={count // 2}")
    return load_rl(ROOT / "recipes" / "qwen7b_grpo.yaml", ["cluster.gpu=H100", *sizes, *overrides])


def terms_of(gpus: int, layout: tuple[str, ...]) -> dict[str, float]:
    """Return seconds of a step, of each term, and of the start."""
    recipe = recipe_of(gpus, layout)
    architectures = planned_architectures(recipe)
    time = expected_time(recipe, architectures, gpus)
    assert time is not None
    start = sum(expected_start(recipe, architectures, gpus).values())
    return {"gpus": gpus, "step": time.seconds, **step_terms(recipe, architectures, gpus, time), "start": start}


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Draw terms against the number of GPUs, both logarithmic; measured ones as points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    gpus = [row["gpus"] for row in rows]
    for name in ("step", "tail", "gradients", "requests", "numbers", "rows", "weights"):
        axes.plot(gpus, [row[name] for row in rows], label=name)
    measured: dict[str, Any] = json.loads((ROOT / "docs" / "results" / "scaling.json").read_text(encoding="utf-8"))
    for name, parts, colour in (
        ("requests", ("prompts and requests of all", "requests of own rows"), "C3"),
        ("numbers", ("numbers of all rows", "plan of the exchange"), "C4"),
    ):
        points = [(each["ranks"], sum(each["seconds_of"][part] for part in parts)) for each in measured["rows"]]
        axes.plot(*zip(*points, strict=True), "o", color=colour, label=f"{name}, measured")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds of a step")
    axes.set_xticks(gpus, [f"{count:,}" for count in map(int, gpus)], minor=False)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=9, ncols=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
