"""The command ``rlhf-megatron``: the scripts of launch/ and tools/ by name, in any folder.

    rlhf-megatron train RECIPE [key.path=value ...] [--nproc-per-node N]
    rlhf-megatron plan RECIPE --world N

A script does what it does when it is started by its path; one that runs on all GPUs is started by launch/torchrun.py.
"""

from __future__ import annotations

import argparse
import difflib
import os
import runpy
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import rlhf_megatron
from rlhf_megatron.errors import UserError
from rlhf_megatron.runtime.command import ArgumentParser, command
from rlhf_megatron.shipped import SHIPPED
from rlhf_megatron.untrusted import shown

PROGRAM = "rlhf-megatron"


@dataclass(frozen=True)
class Subcommand:
    """A script, and whether it runs on all GPUs."""

    script: str
    purpose: str
    on_ranks: bool = False


SUBCOMMANDS = {
    "train": Subcommand("launch/train.py", "train a model by a recipe", on_ranks=True),
    "plan": Subcommand("launch/plan.py", "layouts that fit so many GPUs; needs none"),
    "evaluate": Subcommand("launch/evaluate.py", "a recipe's model on its validation files", on_ranks=True),
    "submit": Subcommand("launch/submit.py", "a recipe as a Slurm job, or many as an array"),
    "report": Subcommand("tools/report.py", "a page of a run, or of several beside each other"),
    "watch": Subcommand("tools/watch.py", "the page of a run while it goes on, with its rollouts"),
    "preflight": Subcommand("tools/preflight.py", "check machines, files and rewards before a run", on_ranks=True),
    "prepare": Subcommand("tools/prepare_data.py", "make, import and check data files"),
    "convert": Subcommand("tools/convert.py", "model files and checkpoints into Hugging Face folders"),
    "tune": Subcommand("tools/tune.py", "search for the values of recipe keys"),
    "recipes": Subcommand("tools/recipes.py", "list the recipes that come along, or print one"),
    "from-verl": Subcommand("tools/verl/from_verl.py", "a command of verl as a recipe"),
    "tiny-model": Subcommand("tools/make_tiny_model.py", "a small model with random weights, to try things"),
    "torchrun": Subcommand("launch/torchrun.py", "torchrun whose store listens on one address"),
}
# Those of torchrun that have to do with several nodes and restarts; the rest is for launch/torchrun.py itself.
LAUNCHER_OPTIONS = {
    "--nproc-per-node": ("N", "processes on this machine (default: one for each GPU, or one)"),
    "--nnodes": ("N", "machines; the command is started on each"),
    "--rdzv-backend": ("NAME", "c10d for several machines"),
    "--rdzv-endpoint": ("HOST:PORT", "of the first machine"),
    "--rdzv-id": ("NAME", "of the run, the same on all machines"),
    "--local-addr": ("ADDRESS", "of this machine"),
    "--max-restarts": ("N", "after faults (default: 0)"),
}


@command
def main() -> int:
    """Run the script that is asked for, as ``__main__``; return the exit status."""
    arguments = to_complete(os.environ) if "_ARGCOMPLETE" in os.environ else sys.argv[1:]
    if not arguments or arguments[0].startswith("-"):
        build_parser().parse_args(arguments or ["--help"])
        return 0
    name, *rest = arguments
    if name not in SUBCOMMANDS:
        near = difflib.get_close_matches(name, SUBCOMMANDS, 1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(SUBCOMMANDS)}"
        raise UserError(f"{PROGRAM} {shown(name, 40)}: no such command; {advice}")
    script = SUBCOMMANDS[name].script
    if SUBCOMMANDS[name].on_ranks:
        script, rest = launched(script, rest)
    return run_script(script, name, rest)


def to_complete(environment: MutableMapping[str, str]) -> list[str]:
    """Return the command's name in the line that a shell completes, if it stands there in full; argcomplete skips it
    then."""
    words = environment.get("COMP_LINE", "").encode()[: int(environment.get("COMP_POINT", "0"))].decode().split(" ")
    named = [word for word in words[1:] if word][:1]
    if not named or (words[-1] == named[0] and words.count(named[0]) == 1):
        return []
    environment["_ARGCOMPLETE"] = "2"
    return named


def launched(script: str, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the script to run here, and its arguments: launch/torchrun.py, where ranks have to be started first."""
    parser = launcher_parser()
    options, rest = parser.parse_known_args(arguments)
    if {"-h", "--help"} & set(rest):
        print(parser.format_help())
    if "_ARGCOMPLETE" in os.environ or "RANK" in os.environ or {"-h", "--help", "--dry-run"} & set(rest):
        return script, rest
    values = {name: getattr(options, name.lstrip("-").replace("-", "_")) for name in LAUNCHER_OPTIONS}
    values["--nproc-per-node"] = values["--nproc-per-node"] or gpus_here()
    given = [word for name, value in values.items() if value is not None for word in (name, str(value))]
    return "launch/torchrun.py", [*given, str(SHIPPED / script), *rest]


def launcher_parser() -> argparse.ArgumentParser:
    """Return the parser of LAUNCHER_OPTIONS, which may stand anywhere among a script's arguments."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    group = parser.add_argument_group("processes, as torchrun's options")
    for name, (metavar, purpose) in LAUNCHER_OPTIONS.items():
        group.add_argument(name, metavar=metavar, help=purpose)
    return parser


def gpus_here() -> int:
    """Return the number of ranks where none is given: one for each GPU of this machine, or one."""
    import torch

    return torch.cuda.device_count() or 1


def run_script(script: str, name: str, arguments: Sequence[str]) -> int:
    """Run a shipped script in this process; it ends the process with its status."""
    path = SHIPPED / script
    ArgumentParser.program = f"{PROGRAM} {name}"
    sys.argv = [str(path), *arguments]
    sys.path.append(str(path.parent))  # tools/verl has modules beside its command; the last, to shadow nothing
    runpy.run_path(str(path), run_name="__main__")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of what stands before a script's own arguments."""
    purposes = "\n".join(f"  {name:<12}{each.purpose}" for name, each in SUBCOMMANDS.items())
    parser = ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND [arguments; --help tells which]",
        description="RLHF and RLVR of large language models.",
        epilog=f"commands:\n{purposes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {rlhf_megatron.__version__}")
    parser.add_argument("command", choices=list(SUBCOMMANDS), metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
