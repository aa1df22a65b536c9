"""rlhf_megatron.hub_arrival, by the real client against a hub on this machine: weights are read while others come."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load, load_file, save

from hub_server import HubServer, Served, cached_files, files_in, hub
from hugging_face import make_model
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.weight_map import tensor_shapes
from unit.test_block_scales import quantized_model
from unit.test_hub import Asked, assert_error, environment_of
from unit.test_stacked_tensors import packed

READ = """
import sys
from safetensors.torch import save_file
from rlhf_megatron.hub import DESCRIPTION, WEIGHTS, Repository, commit_of
from rlhf_megatron.hub_arrival import arriving_folder
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.weight_map import whole_blocks
from rlhf_megatron.runtime.command import command
@command
def main():
    repository = Repository("me/tiny")
    folder = arriving_folder(repository, commit_of(repository), DESCRIPTION, WEIGHTS, [])
    architecture = read_architecture(folder)
    with CheckpointFiles(folder, architecture) as files:
        tensors = {}
        blocks = list(whole_blocks(architecture))
        for block in blocks if sys.argv[2] == "first" else reversed(blocks):
            tensors[block.tensor] = files.read(block.tensor, block.region)
            print(block.tensor, flush=True)
        files.complete()
    save_file(tensors, sys.argv[1])
    return 0
sys.exit(main())
"""
INDEX = "model.safetensors.index.json"
FIRST, SECOND, LAST = (f"model-{number}-of-3.safetensors" for number in (1, 2, 3))
FIRST_TENSOR = "model.embed_tokens.weight"
LONGEST = 120.0  # seconds


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub() as server:
        yield server


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all of a model, which the hub serves in three files."""
    return make_model(tmp_path_factory.mktemp("local"), tied=False)


def in_three_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a model with one file of weights, cut in three with an index."""
    files = files_in(folder)
    tensors = load(files.pop("model.safetensors"))
    order = [name for name in tensor_shapes(read_architecture(folder)) if name in tensors]
    order += [name for name in tensors if name not in order]  # scales, and stacks
    size = -(-len(order) // 3)
    names: dict[str, str] = {}
    for number in range(3):
        part = order[number * size : (number + 1) * size]
        file = f"model-{number + 1}-of-3.safetensors"
        files[file] = save({name: tensors[name] for name in part}, {"format": "pt"})
        names |= dict.fromkeys(part, file)
    return files | {INDEX: json.dumps({"metadata": {}, "weight_map": names}).encode()}


def hold_last(served: Served) -> threading.Event:
    served.held[LAST] = threading.Event()
    return served.held[LAST]


class Reader(subprocess.Popen[str]):
    """A process that reads all tensors of me/tiny, prints the name of each, and writes them to a file."""

    def __init__(self, server: HubServer, folder: Path, rank: int = 0, begins: str = "first") -> None:
        self.output = folder / f"read-{rank}-{time.monotonic_ns()}.safetensors"
        environment = environment_of(server, folder / "hf") | {"LOCAL_RANK": str(rank)}
        super().__init__(
            [sys.executable, "-P", "-c", READ, str(self.output), begins],
            env=environment | {"HF_HUB_DOWNLOAD_TIMEOUT": "300"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def first_tensor(self) -> str:
        assert self.stdout is not None and self.stderr is not None
        return self.stdout.readline().strip() or self.stderr.read()

    def downloader(self) -> psutil.Process | None:
        children = [each for each in psutil.Process(self.pid).children() if each.status() != psutil.STATUS_ZOMBIE]
        return next(iter(children), None)

    def assert_read(self, local: Path) -> None:
        """Check that it ends with the tensors of a folder, bit for bit."""
        _, error = self.communicate(timeout=LONGEST)
        assert self.returncode == 0, error
        read = load_file(self.output)
        with CheckpointFiles(local, read_architecture(local)) as files:
            assert set(read) == set(tensor_shapes(read_architecture(local)))
            for name, tensor in read.items():
                whole = files.read(name, ())
                assert tensor.dtype == whole.dtype and torch.equal(tensor, whole), name

    def assert_refused(self, *texts: str) -> None:
        output, error = self.communicate(timeout=LONGEST)
        assert_error(Asked(self.args, self.returncode, output, error), *texts)

    def __exit__(self, *details: Any) -> None:
        self.kill()
        super().__exit__(*details)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_tensors_are_read_while_the_last_file_is_held_back(server: HubServer, tmp_path: Path, local: Path) -> None:
    served = server.add("models/me/tiny", in_three_files(local))
    go_on = hold_last(served)
    with Reader(server, tmp_path) as first, Reader(server, tmp_path, rank=1) as second:
        assert first.first_tensor() == second.first_tensor() == FIRST_TENSOR
        wait_until(lambda: LAST in server.downloads())
        time.sleep(1.0)
        assert first.poll() is None and second.poll() is None  # nobody goes on without it
        assert not cached_files(tmp_path / "hf", LAST)
        go_on.set()
        first.assert_read(local)
        second.assert_read(local)
    weights = [name for name in served.files[served.branches["main"]] if name.endswith((".json", ".safetensors"))]
    assert server.downloads() == sorted(weights)  # each once on the node
    server.requests.clear()
    with Reader(server, tmp_path) as again:
        again.assert_read(local)
        assert [path for _, path, _ in server.requests if "/api/" not in path] == []


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_what_is_quantised_is_read_by_a_header_that_comes_later(server: HubServer, tmp_path: Path, kind: str) -> None:
    if kind == "fp8":
        local = quantized_model(tmp_path / "model")
    else:
        local = packed(make_model(tmp_path / "plain", "gpt_oss"), tmp_path / "model")
    served = server.add("models/me/tiny", in_three_files(local))
    served.held = {name: threading.Event() for name in (FIRST, LAST)}
    with Reader(server, tmp_path, begins="last") as reader:
        wait_until(lambda: SECOND in maps_of(reader, tmp_path / "hf"))
        for name in (LAST, FIRST):  # which knows the types of tensors whose scales are in the other
            served.held[name].set()
            time.sleep(1.0)
        reader.assert_read(local)


def maps_of(reader: Reader, home: Path) -> list[str]:
    """Return the files of the cache that a process has opened."""
    maps = {each.path for each in psutil.Process(reader.pid).memory_maps()}
    return [path.name for path in cached_files(home, "*.safetensors") if str(path.resolve()) in maps]


def test_one_file_without_an_index_is_waited_for(server: HubServer, tmp_path: Path, local: Path) -> None:
    served = server.add("models/me/tiny", files_in(local))
    served.held["model.safetensors"] = threading.Event()
    with Reader(server, tmp_path) as reader:
        wait_until(lambda: "model.safetensors" in server.downloads())
        time.sleep(1.0)
        assert reader.poll() is None
        served.held["model.safetensors"].set()
        reader.assert_read(local)


def test_a_download_that_fails_ends_each_reader_with_one_line(server: HubServer, tmp_path: Path, local: Path) -> None:
    served = server.add("models/me/tiny", in_three_files(local))
    served.failing.add(LAST)
    with Reader(server, tmp_path) as first, Reader(server, tmp_path, rank=1) as second:
        assert first.first_tensor() == second.first_tensor() == FIRST_TENSOR
        first.assert_refused("the hub fails", "; try again")
        second.assert_refused("the hub fails", "; try again")
    served.failing.clear()
    server.requests.clear()
    with Reader(server, tmp_path) as resumed:
        resumed.assert_read(local)
    assert server.downloads() == [LAST]  # the others were whole


def test_a_killed_reader_takes_its_download_along_and_another_goes_on(
    server: HubServer, tmp_path: Path, local: Path
) -> None:
    served = server.add("models/me/tiny", in_three_files(local))
    go_on = hold_last(served)
    with Reader(server, tmp_path) as one, Reader(server, tmp_path, rank=1) as another:
        assert one.first_tensor() == another.first_tensor() == FIRST_TENSOR
        killed, other = (one, another) if one.downloader() else (another, one)  # whichever came first downloads
        downloader = killed.downloader()
        assert downloader is not None and other.downloader() is None
        killed.kill()
        wait_until(lambda: not downloader.is_running() or downloader.status() == psutil.STATUS_ZOMBIE)
        wait_until(lambda: other.downloader() is not None)
        go_on.set()
        other.assert_read(local)
    names = server.downloads()
    assert names.count(LAST) == 2 and names.count(FIRST) == 1


def test_a_download_that_is_killed_each_time_is_told(server: HubServer, tmp_path: Path, local: Path) -> None:
    served = server.add("models/me/tiny", in_three_files(local))
    hold_last(served)
    with Reader(server, tmp_path) as reader:
        assert reader.first_tensor() == FIRST_TENSOR
        while reader.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                child = reader.downloader()
                if child:
                    child.kill()
            time.sleep(0.02)
        reader.assert_refused("is killed each time (status -9)", "try again")


def test_a_damaged_file_is_refused_before_the_last_has_come(server: HubServer, tmp_path: Path, local: Path) -> None:
    files = in_three_files(local)
    tensors = load(files[SECOND])
    name = next(iter(tensors))
    files[SECOND] = save(tensors | {name: tensors[name][:1].clone()}, {"format": "pt"})
    served = server.add("models/me/tiny", files)
    hold_last(served)
    served.held[SECOND] = threading.Event()
    with Reader(server, tmp_path, begins="last") as reader:
        wait_until(lambda: FIRST in maps_of(reader, tmp_path / "hf"))
        time.sleep(1.0)
        served.held[SECOND].set()
        _, error = reader.communicate(timeout=LONGEST)
        assert reader.returncode == 2
        assert f"{name} has shape" in error.splitlines()[-1] and "config.json asks for" in error.splitlines()[-1]


LOOK = """
import sys
from rlhf_megatron.hub import DESCRIPTION, WEIGHTS, Repository, commit_of
from rlhf_megatron.hub_arrival import arriving_folder, looks_until_here
repository = Repository("me/tiny")
folder = arriving_folder(repository, commit_of(repository), DESCRIPTION, WEIGHTS, [])
for has_progress in looks_until_here(folder / sys.argv[1]):
    print(has_progress, flush=True)
print("here", flush=True)
"""


def test_a_download_that_stands_still_is_no_progress(server: HubServer, tmp_path: Path, local: Path) -> None:
    served = server.add("models/me/tiny", in_three_files(local))
    go_on = hold_last(served)
    command = [sys.executable, "-P", "-c", LOOK, LAST]
    environment = environment_of(server, tmp_path / "hf")
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen: list[str] = []
        while seen[-10:] != ["False"] * 10:  # for the watchdog to see, which ends a rank that gets nowhere
            seen.append(process.stdout.readline().strip())
            assert len(seen) < 500 and seen[-1] != ""
        assert seen.count("True") > 1  # files came
        go_on.set()
        assert process.stdout.read().split()[-1] == "here"
    assert process.returncode == 0
