"""Saving a run and resuming it: the ranks' agreement about the files of checkpoint/storage.py.

Saving takes a copy on the host and returns; a thread of each rank writes it while training goes on. At the end of a
later step, when every rank's file is on disk, the checkpoint becomes visible. A run that is killed in between has the
one before. A run that is asked to stop ends here too, after a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.checkpoint.exports import beginning
from rlhf_megatron.checkpoint.manifest import FORMAT, Manifest, WrittenFile, file_of_rank, read_manifest
from rlhf_megatron.checkpoint.parts import Part, SpreadPart
from rlhf_megatron.checkpoint.role_state import restore_role, role_state, role_tensors
from rlhf_megatron.checkpoint.saved_role import files_of_role
from rlhf_megatron.checkpoint.storage import (
    MetricValue,
    TensorFile,
    damage,
    discard,
    join_tensors,
    list_checkpoints,
    problems_in,
    publish,
    random_state,
    restore_random_state,
    split_tensors,
    step_of,
    write_tensors,
)
from rlhf_megatron.durable import tidy
from rlhf_megatron.errors import CheckpointError, DataError, ForeignCheckpoint
from rlhf_megatron.recipe.hub_names import recorded
from rlhf_megatron.recipe.operations import CheckpointSection
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.runtime import faults
from rlhf_megatron.runtime.finite import NotFiniteError
from rlhf_megatron.runtime.recovery import RecoveryLog
from rlhf_megatron.runtime.signals import job_end, stop_signals
from rlhf_megatron.topology.exchange import from_rank, refused_by_all
from rlhf_megatron.untrusted import reason_of, shown

Say = Callable[[str], None]
_TIME_IS_UP = 1  # no signal that is noted has this number


class RunStopped(Exception):
    """The run is to end now, after ``step``, on every rank; started again it resumes from step ``saved``."""

    def __init__(self, step: int, why: str, saved: int | None) -> None:
        super().__init__(f"stopped after step {step}: {why}")
        self.step, self.why, self.saved = step, why, saved


@dataclasses.dataclass(frozen=True)
class _Save:
    """One checkpoint on its way to the disk."""

    folder: Path
    file: Future[WrittenFile]
    state: dict[str, Any]
    metric_value: MetricValue | None


def sound_checkpoints(folder: Path, resume: str, say: Say) -> Generator[Path, None, None]:
    """Yield the checkpoints to resume from, the newest first, the same on every rank; collective each time.

    ``resume``: "auto" (those in ``folder`` that are whole; damaged ones are reported and passed over), "none", or the
    path of one. The last two hold for a launch's first attempt: its restarts take the newest that it has saved itself.
    Who cannot use one throws the CheckpointError in, and gets the next. Raises CheckpointError where the given one is
    damaged, or all are.
    """
    problems: list[str] = []
    saved, refusal = from_rank(_look(folder, resume, problems) if dist.get_rank() == 0 else ([], None))
    if refusal:
        raise CheckpointError(refusal)
    for line in problems:
        say(f"warning: {line}")
    if resume == "none" and not saved:
        return
    resume = "auto" if saved else resume
    candidates = saved if resume == "auto" else [Path(resume)]
    for candidate in candidates:
        problem, version = _agreed_damage(candidate)
        if problem is None:
            if version < FORMAT:
                say(f"{candidate}: is of an earlier version; its manifest has no digest that would show damage")
            try:
                yield candidate
                return
            except CheckpointError as error:
                problem = str(error)
        if resume != "auto":
            raise CheckpointError(f"--resume {shown(candidate)}: {problem}; name another one, or auto")
        say(f"warning: {problem}; this checkpoint is passed over")
    if candidates:
        raise CheckpointError(
            f"{folder}: none of {len(candidates)} checkpoints can be used; give --resume none to start anew"
        )


class Checkpoints:
    """Checkpoints of a run's learning roles and parts, saved and restored. Every call is collective."""

    def __init__(
        self,
        folder: Path,
        section: CheckpointSection,
        roles: Mapping[str, PlacedRole],
        parts: Mapping[str, Part],
        say: Say,
        spread: Mapping[str, SpreadPart] | None = None,
    ) -> None:
        """Set up; ``folder`` is the run's checkpoints/; ``say`` shows a line to the person who watches (on rank 0)."""
        self._folder, self._section = folder, section
        self._roles, self._parts, self._spread, self._say = dict(roles), dict(parts), dict(spread or {}), say
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: _Save | None = None
        self._held: dict[str, torch.Tensor] = {}  # the memory of a save; there is one at a time
        self._rank = dist.get_rank()
        self._recovery = RecoveryLog(folder.parent)
        self.saved: int | None = None
        """The step of the newest checkpoint of this run, the same on every rank."""
        self._limit = _TimeLimit(section.save_before_seconds, job_end(os.environ))
        if section.save_before_seconds and self._limit.end is None:
            say("checkpoint.save_before_seconds has no effect: nothing says when this job ends")

    def restore_one_of(
        self, checkpoints: Generator[Path, None, None], newest: Path, changed: Mapping[str, Any] | None = None
    ) -> Path:
        """Restore ``newest``, or the first behind it in ``sound_checkpoints`` that can be used, and return that.

        ``changed``: what of the recipe is not as it was, for recovery.jsonl.
        """
        checkpoint = newest
        while True:
            try:
                step = self.restore(checkpoint)
                if self._rank == 0:
                    more = {"changed": dict(changed)} if changed else {}
                    self._recovery.append("resume", step, f"from {checkpoint}", **more)
                return checkpoint
            except ForeignCheckpoint:
                raise
            except CheckpointError as error:
                checkpoint = checkpoints.throw(error)

    def restore(self, checkpoint: Path) -> int:
        """Bring roles and parts to where ``checkpoint`` was saved; return its step.

        Raises UserError on all ranks: ForeignCheckpoint or DataError where it is of another model or other data, else
        CheckpointError. Another one can be restored then, which leaves nothing of this one.
        """
        with contextlib.ExitStack() as stack:
            with refused_by_all():
                manifest = read_manifest(checkpoint)
                files = [stack.enter_context(TensorFile(checkpoint / file.name)) for file in manifest.files]
                self._read(checkpoint, manifest.state, files)
            for name, role in self._roles.items():
                if role.local:
                    role.local.merge_adapters()
                problem = role.not_finite(optimizer=True)
                if problem:
                    raise CheckpointError(f"{checkpoint}: {name} is not finite: {problem}")
            if len(files) == dist.get_world_size():
                prefix = "random/"
                own = files[self._rank]
                with refused_by_all(), _damage_of(checkpoint, "random numbers"):
                    restore_random_state({name: own.tensor(prefix + name) for name in own.about["random"]})
        self.saved = step_of(checkpoint)
        return self.saved

    def _read(self, checkpoint: Path, state: Mapping[str, Any], files: Sequence[TensorFile]) -> None:
        """Fill this rank's roles and parts; exchanges nothing."""
        for name, role in self._roles.items():
            with _damage_of(checkpoint, name):
                if name not in state.get("roles", {}):
                    raise ForeignCheckpoint(
                        f"has no {name}, as it was saved by a run without one; give --resume none, or the run another "
                        "name"
                    )
                if role.local:
                    saved = state["roles"][name]
                    restore_role(role.local, saved, files_of_role(saved, files))
        for name, part in self._parts.items():
            with _damage_of(checkpoint, name):
                part.load(join_tensors(state["parts"][name], files[0]))
        for name, spread in self._spread.items():
            with _damage_of(checkpoint, name):
                own = functools.partial(_own_tensors, files, name)
                spread.load(join_tensors(state["parts"][name], files[0]), own)

    def after(self, step: int, is_due: bool, is_last: bool, metric_value: float | None) -> None:
        """Save after ``step`` if that ``is_due`` or the run is to stop, and publishes what has been written meanwhile.

        ``metric_value``, on rank 0, is the step's value by checkpoint.keep_best, if it was evaluated.

        Raises NotFiniteError on all ranks where there are weights to save, or to end with, that are not finite: the
        checkpoints of before stay as they are.
        Raises RunStopped, once a checkpoint is published or could not be written, where a rank has been asked to stop
        or the job is about to end; not after the last step, which ends the run anyway.
        """
        unwritten = self._pending is not None and not self._pending.file.done()
        flags = torch.tensor([int(unwritten), 0 if is_last else self._reason_to_stop()])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        still_writing, reason = flags.tolist()
        is_due = is_due or bool(reason)
        if is_due or is_last or not still_writing:
            self._publish_pending()  # one at a time
        if is_due or is_last:
            self._refuse_nonfinite(step, is_saved=is_due)
        if is_due:
            self._begin(step, metric_value)
        if reason or is_last:
            self._publish_pending()
        if reason:
            why = self._limit.text() if reason == _TIME_IS_UP else f"{signal.Signals(reason).name} came"
            if self._rank == 0:
                self._recovery.stop(step, why, saved=self.saved == step)
            raise RunStopped(step, why, self.saved)

    def _reason_to_stop(self) -> int:
        """Return the reason to stop now, of this rank: the number of a signal, _TIME_IS_UP, or 0."""
        return int(stop_signals.noted or (_TIME_IS_UP if self._limit.is_reached_in_the_next_step() else 0))

    def _refuse_nonfinite(self, step: int, is_saved: bool) -> None:
        """Refuse weights that are not finite: no gradient is finite from there on, so no step would fix it. What is not
        saved may not be on the device."""
        for name, role in self._roles.items():
            problem = role.not_finite(optimizer=is_saved)
            if problem:
                raise NotFiniteError(
                    f"step {step}: {name} is not finite, and not saved: {problem}; lower "
                    f"{name}.optimizer.learning_rate, and the same command resumes from {beginning(self.saved)}"
                )

    def _begin(self, step: int, metric_value: float | None) -> None:
        folder = self._folder / f"step-{step}"
        tensors: dict[str, torch.Tensor] = {}
        pieces = {}
        for name, role in self._roles.items():
            if role.local:
                role_part, pieces[name] = role_tensors(role.local, self._held)
                tensors |= role_part
        parts: dict[str, Part | SpreadPart] = {**self._parts, **self._spread}
        plain, part_tensors = split_tensors({name: part.state() for name, part in parts.items()}, "parts")
        if self._rank == 0:
            tensors |= part_tensors
        own = split_tensors({name: part.own_tensors() for name, part in self._spread.items()}, "own")[1]
        tensors |= own
        random = random_state()
        tensors |= {f"random/{name}": value for name, value in random.items()}
        roles = {
            name: role.broadcast(role_state(role.local) if role.local else {}) for name, role in self._roles.items()
        }
        about = {"pieces": pieces, "random": sorted(random), "own": sorted(own)}
        file = self._writer.submit(write_tensors, folder, file_of_rank(self._rank), tensors, about)
        best = self._section.keep_best
        compared = MetricValue(best.metric, best.mode, metric_value) if best and metric_value is not None else None
        faults.at("write", step)
        state = {"step": step, "launch": self._recovery.launch(), "roles": roles, "parts": plain}
        if self._rank == 0 and (commits := recorded(self._folder.parent)):
            state["hub"] = commits
        self._pending = _Save(folder, file, state, compared)

    def _publish_pending(self) -> None:
        """Make the pending checkpoint visible, if there is one, once every rank has written its file."""
        save, self._pending = self._pending, None
        if save is None:
            return
        error = save.file.exception()
        written: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(written, str(error) if error else save.file.result())
        failures = [f"rank {rank}: {result}" for rank, result in enumerate(written) if isinstance(result, str)]
        failures[1:] = [f"{len(failures) - 1} more ranks failed"] if failures[1:] else []
        # Nobody may begin the next one, or end, before the folder has its name.
        if from_rank(self._rank == 0 and self._publish(save, written, failures)):
            self.saved = step_of(save.folder)

    def _publish(self, save: _Save, files: list[WrittenFile], failures: list[str]) -> bool:
        """Return whether it is visible: one that cannot be written is reported, and the last one stays the newest."""
        try:
            if not failures:
                publish(save.folder, files, save.state, self._section.keep_last_k, save.metric_value)
                return True
        except OSError as error:
            failures = [str(error)]
        discard(save.folder)
        self._say(f"warning: {save.folder.name} was not saved: {'; '.join(failures)}")
        return False


class _TimeLimit:
    """Limit by which another step fits before the end of the job, less the time to save and leave."""

    def __init__(self, save_before_seconds: float, end: float | None) -> None:
        self.end = end if save_before_seconds else None
        self._save_before_seconds = save_before_seconds
        self._step_began, self._longest_step = time.monotonic(), 0.0

    def is_reached_in_the_next_step(self) -> bool:
        """Call it at the end of each step."""
        now = time.monotonic()  # a correction of the system's clock makes no step longer
        self._longest_step = max(self._longest_step, now - self._step_began)
        self._step_began = now
        return self.end is not None and time.time() + self._longest_step > self.end - self._save_before_seconds

    def text(self) -> str:
        """Return why the run stops for it, for a person; any rank may have had it, and all ranks the same job."""
        return f"the next step would end less than {self._save_before_seconds:g} s before the job does"


def _look(folder: Path, resume: str, problems: list[str]) -> tuple[list[Path], str | None]:
    """Return (the checkpoints of ``folder`` that may be resumed from, why there can be none), on rank 0; what is passed
    over is added to ``problems``."""
    try:
        tidy(folder)
        problems += problems_in(folder)
        return list_checkpoints(folder) if resume == "auto" else _saved_by_this_launch(folder, problems), None
    except CheckpointError as error:
        return [], str(error)
    except OSError as error:
        return [], f"{folder}: cannot be cleared up ({reason_of(error)})"


def _saved_by_this_launch(folder: Path, problems: list[str]) -> list[Path]:
    """Return the checkpoints in ``folder`` of this launch's attempts so far, the newest step first."""
    own, launch = [], RecoveryLog(folder.parent).launch()
    for checkpoint in list_checkpoints(folder):
        try:
            if read_manifest(checkpoint).state.get("launch") == launch:
                own.append(checkpoint)
        except CheckpointError as error:
            problems.append(f"{error}; this checkpoint is passed over")
    return own


def _agreed_damage(checkpoint: Path) -> tuple[str | None, int]:
    """Return (what any rank finds wrong with the files that it checks, each a part of them, the manifest's format); the
    same on every rank."""
    version = FORMAT
    try:
        step_of(checkpoint)
        manifest: Manifest = read_manifest(checkpoint)
        version = manifest.format
        problem = damage(checkpoint, manifest.files[dist.get_rank() :: dist.get_world_size()])
    except (CheckpointError, OSError) as error:  # the latter: a disk or a file server that fails as it is read
        problem = str(error)
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((text for text in problems if text), None), version


def _own_tensors(files: Sequence[TensorFile], name: str, rank: int, prefix: str) -> dict[str, torch.Tensor]:
    """See OwnTensors; of the part ``name``."""
    if not 0 <= rank < len(files):
        raise CheckpointError(f"has no file of rank {rank}")
    begin = f"own/{name}/{prefix}/"
    own = [key for key in files[rank].about.get("own", []) if str(key).startswith(begin)]
    return {key.removeprefix(begin): files[rank].tensor(key) for key in own}


@contextlib.contextmanager
def _damage_of(checkpoint: Path, what: str) -> Iterator[None]:
    """Tell where what a checkpoint says of ``what`` is of no use, whoever wrote it so."""
    try:
        yield
    except (CheckpointError, DataError) as error:
        said = str(error)
        raise type(error)(said if said.startswith(str(checkpoint)) else f"{checkpoint}: {said}") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        said = f"{type(error).__name__}: {reason_of(error)}"
        raise CheckpointError(f"{checkpoint}: what it says of {what} cannot be used ({said})") from error
