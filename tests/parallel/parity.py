"""The parity proof: a role in some layout against transformers and torch.optim.AdamW in one process, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hugging_face import describe, load_model, make_model, random_rows, row_logits, row_logprobs, stored_tensors, train
from parallel.parity_ranks import UNTRAINED, run_cases
from parallel.ranks import run_ranks
from rlhf_megatron.topology.layout import Layout

LEARNING_RATE, CLIP, STEPS = 1e-3, 1.0, 2
VOCABULARY = 250
# AdamW divides by the square root of tiny second moments: an epsilon of 1e-8 would blow rounding in gradients of about
# that size up to whole learning rates, in any implementation. 1e-6 leaves every other element as it is.
OPTIMIZER = {"learning_rate": LEARNING_RATE, "clip_grad": CLIP, "weight_decay": 0.0, "epsilon": 1e-6}
_TOGETHER = 20  # cases of one launch, so that one ends well within the time limit of a test


class Case(NamedTuple):
    """A family in a layout; from the second step on in layout ``then``, by way of a checkpoint."""

    family: str
    tied: bool
    layout: dict[str, int]
    section: dict[str, Any] | None = None
    then: dict[str, int] | None = None
    layers: int = 4
    grid: bool = False
    norms_within: float = 1e-5  # of gradients
    weights_within: float = 1e-5

    @property
    def ranks(self) -> int:
        """How many ranks the case takes."""
        return Layout(**self.layout).size

    @property
    def description(self) -> dict[str, Any]:
        """The property of a measurement on a config and layout, as tools/bench/families.py reads it."""
        layouts = [layout_name(self.layout, self.section), *([layout_name(self.then)] if self.then else [])]
        return {"compared": "trained", "layout": " then ".join(layouts), **describe(self.family)}


_DEGREES = {
    "tensor": "TP", "pipeline": "PP", "virtual_pipeline": "VP", "context": "CP", "data": "DP", "expert": "EP",
    "expert_tensor": "ETP",
}  # fmt: skip
_SETTINGS = ("cp_comm_type", "sequence_parallel")


def layout_name(layout: Mapping[str, int], section: Mapping[str, Any] | None = None) -> str:
    """Return a layout in short, and what of ``section`` has to do with it."""
    degrees = [f"{short}{layout[axis]}" for axis, short in _DEGREES.items() if axis in layout]
    settings = [f"{field}={section[field]}" for field in _SETTINGS if section and field in section]
    return " ".join([" ".join(degrees) or "one rank", *settings])


def case(
    folder: Path,
    layout: dict[str, int],
    rows: Any,
    tokens_per_gpu: int = 60,
    section: dict[str, Any] | None = None,
    steps: int = STEPS,
    **arguments: Any,
) -> dict[str, Any]:
    """Return what a launch is told of a role that learns from ``rows``."""
    given = {
        "model": str(folder),
        "layout": layout,
        "rows": rows,
        "section": {"tokens_per_gpu": tokens_per_gpu} | (section or {}),
        "optimizer": OPTIMIZER,
        "steps": steps,
    }
    return {"function": "learn", "arguments": given | arguments}


def prepared(home: Path, name: str, given: Case) -> dict[str, Any]:
    """Return what a launch is told of a case, whose model is made in the folder ``name`` of ``home``."""
    sizes = {"tied": given.tied, "vocabulary": VOCABULARY, "num_hidden_layers": given.layers}
    return case(
        make_model(home / name, given.family, **sizes),
        given.layout,
        list(random_rows(7, VOCABULARY)),
        section=given.section,
        then=given.then,
        exported=str(home / f"{name}, exported"),
    )


def named(cases: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of a test that has a case's ``name``."""
    return [pytest.param(name, marks=pytest.mark.grid if case.grid else ()) for name, case in cases.items()]


def selected_names(request: pytest.FixtureRequest) -> list[str]:
    """Return the names of the cases of the module whose tests are to be run."""
    items = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(of_item["name"] for of_item in parameters if "name" in of_item))


class Launches:
    """The results of cases by rank, each launched when one asks for it, with others that are alike and ``wanted``."""

    def __init__(
        self,
        kinds: Mapping[str, Any],
        wanted: Sequence[str],
        launch: Callable[[list[str]], Mapping[str, list[Any]]],
    ) -> None:
        """Set up; ``kinds``: what cases have in common that share a launch; ``launch`` returns the results of some
        names."""
        self._kinds, self._wanted, self._launch = kinds, wanted, launch
        self._found: dict[str, list[Any]] = {}

    def __getitem__(self, name: str) -> list[Any]:
        """Return a case's result on each rank; one that has failed fails the test."""
        if name not in self._found:
            alike = [other for other in self._wanted if self._kinds[other] == self._kinds[name]]
            waiting = [other for other in alike if other != name and other not in self._found]
            self._found |= self._launch([name, *waiting][:_TOGETHER])
        by_rank = self._found[name]
        failures = [result["failed"] for result in by_rank if isinstance(result, dict) and "failed" in result]
        assert not failures, failures[0]
        return by_rank


def launches(ranks: Mapping[str, int], wanted: Sequence[str], told: Callable[[str], Mapping[str, Any]]) -> Launches:
    """Return the results of cases that take so many ``ranks``, and of which a launch is ``told``.

    Those of as many ranks share launches.
    """

    def launch(names: list[str]) -> dict[str, list[Any]]:
        cases = {name: told(name) for name in names}
        by_rank = run_ranks(run_cases, ranks[names[0]], {"cases": cases, "go_on": True}, timeout=590)
        return {name: [result[name] for result in by_rank] for name in names}

    return Launches(ranks, wanted, launch)


def parity_launches(cases: Mapping[str, Case], wanted: Sequence[str], home: Path) -> Launches:
    """Return the results of ``cases``."""
    ranks = {name: given.ranks for name, given in cases.items()}
    return launches(ranks, wanted, lambda name: prepared(home, name, cases[name]))


def one_result(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result that every rank has."""
    for name in ("logprobs", "entropy", "losses", "grad_norms"):
        assert all(result[name] == by_rank[0][name] for result in by_rank), name
    assert all(result["parallel_state_untouched"] for result in by_rank)
    return by_rank[0]


def check_against_transformers(
    folder: Path,
    exported: Path,
    result: dict[str, Any],
    norms_within: float = 1e-5,
    weights_within: float = 1e-5,
    rows: Any = None,
) -> dict[str, Any]:
    """Compare outputs, steps and the exported models of a case with those of transformers and torch; return the
    largest differences. ``rows``: default, those of one that is ``prepared``."""
    given, untrained = (stored_tensors(path) for path in (folder, exported.with_name(exported.name + UNTRAINED)))
    assert given.keys() == untrained.keys()
    assert all(torch.equal(tensor, untrained[name]) for name, tensor in given.items())
    prompts, responses = rows or random_rows(7, VOCABULARY)
    model = load_model(folder)
    with torch.no_grad():
        expected = torch.cat([row_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)])
        distributions = torch.cat(
            [row_logits(model, p, r)[len(p) - 1 : -1].log_softmax(-1) for p, r in zip(prompts, responses, strict=True)]
        )
    entropy = -(distributions.exp() * distributions).sum(-1)
    logprobs_differ = float((torch.tensor(result["logprobs"]) - expected).abs().max())
    assert logprobs_differ < 1e-5
    assert (torch.tensor(result["entropy"]) - entropy).abs().max() < 1e-5

    losses, norms = train(model, prompts, responses, STEPS, LEARNING_RATE, CLIP, OPTIMIZER["epsilon"])
    assert result["losses"] == pytest.approx(losses, abs=1e-5)
    assert result["grad_norms"] == pytest.approx(norms, rel=norms_within)
    learned = load_model(exported).state_dict()
    differences = {name: float((learned[name] - own).abs().max()) for name, own in model.state_dict().items()}
    for name, difference in differences.items():
        assert difference < weights_within, name
    return {"logprobs": logprobs_differ, "parameters": max(differences.values()), "export": "bit-equal"}
