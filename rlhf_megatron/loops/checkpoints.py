"""When a run saves and where it goes on: the ranks' agreement about the files of runtime/checkpoint.py.

Saving takes a copy on the host and returns; a thread of each rank writes it while training goes on. At the end of a
later step, when every rank's file is on disk, the checkpoint becomes visible. A run that is killed in between has the
one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rlhf_megatron.recipe.operations import CheckpointSection
from rlhf_megatron.roles.role import Role
from rlhf_megatron.roles.state import restore_role, role_state, role_tensors
from rlhf_megatron.runtime.checkpoint import (
    CheckpointError,
    Manifest,
    TensorFile,
    WrittenFile,
    damage,
    discard,
    found,
    join_tensors,
    publish,
    random_state,
    read_manifest,
    restore_random_state,
    split_tensors,
    step_of,
    write_tensors,
)

Tell = Callable[[str], None]


class Part(Protocol):
    """What else a run remembers, the same on every rank: a tree of dicts with JSON values and tensors."""

    def state(self) -> dict[str, Any]:
        """Everything that ``load`` needs."""

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken."""


@dataclasses.dataclass(frozen=True)
class _Save:
    """One checkpoint on its way to the disk."""

    folder: Path
    file: Future[WrittenFile]
    state: dict[str, Any]


def choose_checkpoint(folder: Path, resume: str, tell: Tell) -> Path | None:
    """The checkpoint to go on from: the newest sound one, a given one, or None; the same on every rank, collective.

    ``resume``: "auto" (the newest in ``folder`` that is whole; damaged ones are told and passed over), "none", or the
    path of one. Raises CheckpointError where the given one is damaged, or all are.
    """
    if resume == "none":
        return None
    candidates = found(folder) if resume == "auto" else [Path(resume)]
    for candidate in _first_ranks(candidates):
        problem = _agreed_damage(candidate)
        if problem is None:
            return candidate
        if resume != "auto":
            raise CheckpointError(f"--resume {candidate}: {problem}")
        tell(f"warning: {problem}; this checkpoint is passed over")
    if candidates:
        raise CheckpointError(
            f"{folder}: none of {len(candidates)} checkpoints can be used; give --resume none to start anew"
        )
    return None


class Checkpoints:
    """Saves and restores a run's learning roles and parts. Every call is collective."""

    def __init__(
        self, folder: Path, section: CheckpointSection, roles: Mapping[str, Role], parts: Mapping[str, Part], tell: Tell
    ) -> None:
        """``folder`` is the run's checkpoints/; ``tell`` shows a line to the person who watches (on rank 0)."""
        self._folder, self._section = folder, section
        self._roles, self._parts, self._tell = dict(roles), dict(parts), tell
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: _Save | None = None
        self._rank = dist.get_rank()

    def restore(self, checkpoint: Path) -> int:
        """Brings roles and parts to where ``checkpoint`` was saved; returns its step."""
        manifest = read_manifest(checkpoint)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(TensorFile(checkpoint / file.name)) for file in manifest.files]
            for name, role in self._roles.items():
                if name not in manifest.state["roles"]:
                    raise CheckpointError(f"{checkpoint}: has no {name}; it was saved by a run without one")
                restore_role(role, manifest.state["roles"][name], files)
            for name, part in self._parts.items():
                part.load(join_tensors(manifest.state["parts"][name], files[0]))
            if len(files) == dist.get_world_size():
                prefix = "random/"
                own = files[self._rank]
                restore_random_state({name: own.tensor(prefix + name) for name in own.about["random"]})
        return step_of(checkpoint)

    def after(self, step: int, last: bool) -> None:
        """Saves after ``step`` if it is due, and publishes what has been written meanwhile; waits for it at the end."""
        self._finish(wait=last)
        interval = self._section.save_interval
        if interval and (step % interval == 0 or last):
            self._finish(wait=True)  # one at a time
            self._begin(step)
            self._finish(wait=last)

    def _begin(self, step: int) -> None:
        folder = self._folder / f"step-{step}"
        if self._rank == 0:
            discard(folder)  # what a killed run may have left half-written
        dist.barrier()
        tensors: dict[str, torch.Tensor] = {}
        pieces = {}
        for name, role in self._roles.items():
            of_role, pieces[name] = role_tensors(role)
            tensors |= of_role
        plain, of_parts = split_tensors({name: part.state() for name, part in self._parts.items()}, "parts")
        if self._rank == 0:
            tensors |= of_parts
        random = random_state()
        tensors |= {f"random/{name}": value for name, value in random.items()}
        roles = {name: role_state(role) for name, role in self._roles.items()}
        about = {"pieces": pieces, "random": sorted(random)}
        file = self._writer.submit(write_tensors, folder, f"rank-{self._rank:05d}.safetensors", tensors, about)
        self._pending = _Save(folder, file, {"step": step, "roles": roles, "parts": plain})

    def _finish(self, wait: bool) -> None:
        """Publishes the pending checkpoint if every rank has written its file; with ``wait``, once they have."""
        save = self._pending
        if save is None:
            return
        if wait:
            save.file.exception()
        ready = torch.tensor([int(save.file.done())])
        dist.all_reduce(ready, dist.ReduceOp.MIN)
        if not ready:
            return
        self._pending = None
        error = save.file.exception()
        written: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(written, str(error) if error else save.file.result())
        failures = [f"rank {rank}: {result}" for rank, result in enumerate(written) if isinstance(result, str)]
        if self._rank == 0:
            self._publish(save, written, failures)
        dist.barrier()  # nobody may begin the next one, or end, before the folder has its name

    def _publish(self, save: _Save, files: list[WrittenFile], failures: list[str]) -> None:
        """A checkpoint that cannot be written costs no run: it is told, and the one before stays the newest."""
        try:
            if not failures:
                publish(save.folder, files, save.state, self._section.keep_last_k)
                return
        except OSError as error:
            failures = [str(error)]
        discard(save.folder)
        self._tell(f"warning: {save.folder.name} was not saved ({'; '.join(failures)}); training goes on without it")


def _first_ranks(paths: list[Path]) -> list[Path]:
    """Rank 0's list on every rank."""
    shared: list[Any] = [[str(path) for path in paths]]
    dist.broadcast_object_list(shared, src=0)
    return [Path(path) for path in shared[0]]


def _agreed_damage(checkpoint: Path) -> str | None:
    """What any rank finds wrong with the files that it checks, each a part of them; the same on every rank."""
    try:
        step_of(checkpoint)
        manifest: Manifest = read_manifest(checkpoint)
        problem = damage(checkpoint, manifest.files[dist.get_rank() :: dist.get_world_size()])
    except CheckpointError as error:
        problem = str(error)
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((text for text in problems if text), None)
