"""Models and data sets of the Hugging Face hub by name: to a commit, and to a folder of the cache.

One process of a node downloads while the others wait for its lock; weights that are read while they come are the
matter of ``hub_arrival``. huggingface_hub goes on where a connection was cut; of an earlier attempt, files that are
whole stay. HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to it; the token is HF_TOKEN's, and never
another one. Nothing of a repository is run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from rlhf_megatron.errors import UserError
from rlhf_megatron.redaction import read_secret
from rlhf_megatron.untrusted import read_text, reason_of, shown

Kind = Literal["model", "dataset"]
_Result = TypeVar("_Result")
# What a model's configuration and tokenizer are written in, and what its weights are.
DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
CODE = ("*.py",)
WEIGHTS = ("*.safetensors",)
# Other copies of the weights: folders of them, and Mistral's own format.
LEFT_OUT = ("*/*", "consolidated*")
DEFAULT_REVISION = "main"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS_TO_ANSWER = 20.0
# The node's first rank, whose console is seen, asks first: the others give it so long.
_SECONDS_BEHIND_FIRST = 1.0


class HubError(UserError):
    """A repository or file that the hub does not give."""

    is_of_node = True


class HubUnreachable(HubError):
    """A hub that another attempt may reach."""

    is_transient = True


class Repository(NamedTuple):
    """A repository at a revision.

    Attributes:
        name: OWNER/NAME.
        revision: a branch, tag or commit.
        key: of the recipe or command line, for messages.
    """

    name: str
    revision: str = DEFAULT_REVISION
    key: str = "model.path"
    kind: Kind = "model"

    @property
    def text(self) -> str:
        """The name with its revision."""
        return f"{self.name}@{self.revision}"


def is_hub_name(text: str) -> bool:
    """Return whether a text names a repository: OWNER/NAME, and neither it nor OWNER is a file or folder here."""
    if not _NAME.fullmatch(text) or text.endswith((".model", ".git")):
        return False
    return not os.path.lexists(text) and not os.path.lexists(text.split("/")[0])


def commit_of(repository: Repository) -> str:
    """Return the commit that a revision is now; offline, the one that was the last to be downloaded.

    Raises HubError where there is no such repository or revision, or the token does not open it.
    """
    if _COMMIT.fullmatch(repository.revision):
        return repository.revision
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    with told(repository):
        try:
            api = huggingface_hub.HfApi(token=_token())
            about = api.repo_info(
                repository.name, revision=repository.revision, repo_type=repository.kind, timeout=_SECONDS_TO_ANSWER
            )
            return str(about.sha)
        except OfflineModeIsEnabled:
            return Path(_cached(repository, ["config.json"])).name


def folder_of(repository: Repository, commit: str, patterns: Sequence[str], left_out: Sequence[str] = LEFT_OUT) -> Path:
    """Return the folder of the cache with a commit's files of these patterns, which are downloaded where they are not
    there.

    Raises HubError: see ``commit_of``; or the disk is full, or the hub ends the connection more than a few times.
    """
    fixed = repository._replace(revision=commit)
    folder = complete(fixed, patterns, left_out)
    if folder is None:
        with told(repository), _lock(fixed):
            folder = complete(fixed, patterns, left_out) or download(fixed, patterns, left_out)
    _note_revision(Path(folder), repository.revision)
    return Path(folder)


def local_folder(text: str, key: str, revision: str | None = None, patterns: Sequence[str] = DESCRIPTION) -> str:
    """Return a path as it is, or the folder of the cache for what is a hub's name; raises HubError."""
    if not is_hub_name(text):
        return text
    repository = Repository(text, revision or DEFAULT_REVISION, key)
    return str(folder_of(repository, commit_of(repository), patterns))


def files_of(repository: Repository, commit: str) -> list[str]:
    """Return the paths of all files of a commit; raises HubError."""
    import huggingface_hub

    with told(repository):
        api = huggingface_hub.HfApi(token=_token())
        return api.list_repo_files(repository.name, revision=commit, repo_type=repository.kind)


def lacks(repository: Repository, commit: str, patterns: Sequence[str], left_out: Sequence[str] = LEFT_OUT) -> bool:
    """Return whether a commit in the cache has no file of these patterns; False where its files are not known, as
    offline."""
    import huggingface_hub
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = huggingface_hub.get_cached_repo_tree(repository.name, repo_type=repository.kind, revision=commit)
    except CachedRepoTreeNotFoundError:
        return False
    return not any(_matches(file.path, patterns) and not _matches(file.path, left_out) for file in tree)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def download(
    repository: Repository,
    patterns: Sequence[str],
    left_out: Sequence[str] = LEFT_OUT,
    on_progress: Callable[[], None] = lambda: None,
) -> str:
    """Download with a progress bar, the files in the order of their names; return the folder of the cache.

    ``on_progress`` is called as bytes come. Raises what huggingface_hub does (see ``told``), and HubError where the
    disk is too small.
    """
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it would show addresses that are signed
    wanted: dict[str, Any] = {
        "repo_type": repository.kind,
        "revision": repository.revision,
        "allow_patterns": list(patterns),
        "ignore_patterns": list(left_out),
        "token": _token(),
    }
    plan: Any = huggingface_hub.snapshot_download(repository.name, dry_run=True, tqdm_class=_silent_bar(), **wanted)
    missing = [each.file_size for each in plan if each.will_download]
    free = shutil.disk_usage(_existing(Path(HF_HUB_CACHE))).free
    if sum(missing) > free:
        raise HubError(
            f"{repository.key}: {shown(repository.text)} needs {sum(missing) / 2**30:,.1f} GB more in "
            f"{shown(HF_HUB_CACHE)}, where {free / 2**30:,.1f} GB are free; make room, or set HF_HOME to another disk"
        )
    with _progress_bar(repository, len(missing), sum(missing), on_progress) as bar:
        return huggingface_hub.snapshot_download(repository.name, tqdm_class=bar, **wanted)


def _note_revision(folder: Path, revision: str) -> None:
    """Note in the cache which commit a branch or tag was, as huggingface_hub does: offline it is asked for that."""
    note = folder.parents[1] / "refs" / revision
    if _COMMIT.fullmatch(revision) or (note.is_file() and read_text(note, HubError) == folder.name):
        return
    with contextlib.suppress(OSError):  # of a cache that cannot be written
        note.parent.mkdir(parents=True, exist_ok=True)
        own = note.with_name(f"{note.name}.{os.getpid()}")
        own.write_text(folder.name, encoding="utf-8")
        own.replace(note)


def complete(repository: Repository, patterns: Sequence[str], left_out: Sequence[str] = LEFT_OUT) -> str | None:
    """Return the folder of a commit, if the cache has all of it, without asking the hub."""
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, IncompleteSnapshotError, LocalEntryNotFoundError

    try:
        if not HF_HUB_OFFLINE:  # without the list of files nobody knows whether some are missing
            huggingface_hub.get_cached_repo_tree(
                repository.name, repo_type=repository.kind, revision=repository.revision
            )
        return _cached(repository, patterns, left_out)
    except (CachedRepoTreeNotFoundError, IncompleteSnapshotError, LocalEntryNotFoundError):
        return None


def _cached(repository: Repository, patterns: Sequence[str], left_out: Sequence[str] = LEFT_OUT) -> str:
    import huggingface_hub

    return huggingface_hub.snapshot_download(
        repository.name,
        repo_type=repository.kind,
        revision=repository.revision,
        allow_patterns=list(patterns),
        ignore_patterns=list(left_out),
        local_files_only=True,
    )


def _token() -> str | bool:
    """Return the token of the environment; False: none, so that no other one is looked for."""
    return read_secret("HF_TOKEN") or False


@contextlib.contextmanager
def _lock(repository: Repository) -> Iterator[None]:
    """Let one process at a time download a repository to this cache."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_SECONDS_BEHIND_FIRST)
    with beside_cache(repository, ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def beside_cache(repository: Repository, ending: str) -> Path:
    """Return the path of a file about a repository, which processes of this cache share; its folder is there."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / ".locks" / "rlhf_megatron"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{repository.kind}--{repository.name.replace('/', '--')}{ending}"


def patiently(work: Callable[[], _Result], waits: Sequence[float]) -> _Result:
    """Return what ``work`` does, tried again after each of these seconds while the hub is away; raises HubUnreachable
    after the last try."""
    for retry, wait in enumerate(waits):
        try:
            return work()
        except HubUnreachable as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"warning: {error} (in {wait:g} s, {retry + 1} of {len(waits)})", file=sys.stderr, flush=True)
            time.sleep(wait)
    return work()


@contextlib.contextmanager
def told(repository: Repository) -> Iterator[None]:
    """Raise HubError, in one line, for what huggingface_hub raises inside."""
    from huggingface_hub import errors

    what = f"{repository.key}: {shown(repository.text)}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{what} is gated; accept its terms on the hub, and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{what}: the hub has the {repository.kind}, and no such branch, tag or commit") from error
    except errors.RepositoryNotFoundError as error:
        seen = "" if _token() else " without a token (HF_TOKEN)"
        raise HubError(
            f"{what}: there is no such folder here, and no such {repository.kind} on the hub{seen}; correct the name"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError, errors.OfflineModeIsEnabled) as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, errors.OfflineModeIsEnabled):
            raise HubUnreachable(f"{what}: the hub cannot be reached ({_reason(cause)}); try again") from error
        raise HubError(
            f"{what} is no folder here, and not whole in the cache, and HF_HUB_OFFLINE forbids to download it"
        ) from error
    except errors.HTTPError as error:
        raise HubUnreachable(f"{what}: the hub fails ({_reason(error)}); try again") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HubError(f"{what}: the disk is full; make room, or set HF_HOME to another disk") from error
        raise HubUnreachable(f"{what} cannot be downloaded ({_reason(error)}); try again") from error


def _reason(error: BaseException) -> str:
    """Return the first line of an error, without the address."""
    return shown(re.sub(r"https?://\S+", "...", reason_of(error)), 200)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _silent_bar() -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]

    class SilentBar(tqdm):  # type: ignore[misc]
        """A bar that shows nothing."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named | {"disable": True})

    return SilentBar


@contextlib.contextmanager
def _progress_bar(repository: Repository, files: int, size: int, on_progress: Callable[[], None]) -> Iterator[Any]:
    """Give the class that huggingface_hub tells the bytes on disk, shown by rich on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    class SteadyConsole(Console):
        """A console that never hides the cursor, which a process that is killed would leave hidden."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    console = SteadyConsole(stderr=True)
    amount = f"{files} files, {size / 2**30:,.2f} GB"
    console.print(f"downloading {shown(repository.text)}: {amount}", highlight=False, soft_wrap=True)
    columns = (
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(repository.name, total=size)

        class Bar(_silent_bar()):  # type: ignore[misc]  # a class made when it is needed
            """The bar of bytes on disk; those of files and of the network say nothing."""

            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                self.is_of_bytes = str(named.get("desc", "")).startswith("Reconstructing")

            def update(self, n: float | None = 1) -> None:
                on_progress()
                if self.is_of_bytes:
                    progress.advance(task, n or 0)

        yield Bar
