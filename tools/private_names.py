"""Looks up the private names of vLLM, Megatron-core and Transformer Engine that are used here in other versions.

    pip download --no-deps --dest wheels vllm==0.33.0 && unzip -q wheels/vllm-*.whl '*.py' -d vllm-0.33.0
    python tools/private_names.py vllm-0.33.0 ...

A folder with none of the packages is an error. For docs/gpus.md, after a look at how a version uses what it still has.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlhf_megatron.compat import megatron_names, transformer_engine
from rlhf_megatron.compat.private_names import missing
from rlhf_megatron.compat.vllm import names as vllm_names

_NAMES = {
    "vllm": vllm_names.NAMES,
    "megatron": megatron_names.NAMES,
    "transformer_engine": transformer_engine.NAMES,
}


def main() -> int:
    """Print what each folder lacks; return 1 where anything is missing that nothing works without."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help=f"of unpacked wheels, with one of {', '.join(_NAMES)}")
    fails = False
    for folder in parser.parse_args().folders:
        packages = [package for package in _NAMES if (folder / package).is_dir()]
        if not packages:
            parser.error(f"{folder} has none of {', '.join(_NAMES)}")
        for package in packages:
            lacks = missing(_NAMES[package], folder)
            fails |= any(not name.absent for name in lacks)
            print(f"{folder.name}: {len(_NAMES[package]) - len(lacks)} of {len(_NAMES[package])} names")
            for name in lacks:
                print(f"  lacks {name} ({name.why}): {name.absent or 'NOTHING WORKS WITHOUT IT'}")
    return int(fails)


if __name__ == "__main__":
    sys.exit(main())
