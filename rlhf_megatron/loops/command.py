"""What the commands of launch/ share: how a rank does its part and tells what was not right. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rlhf_megatron.errors import UserError

# torchrun looks at its ranks every 0.1 s and ends them all when one has failed; that one may take seconds to end.
SECONDS_UNTIL_ENDED = 5.0


def on_this_rank(action: Callable[[], int]) -> int:
    """Does this rank's part of a command, in step with all others; returns the exit status."""
    try:
        return action()
    except UserError as error:
        return tell(error)
    except Exception:
        # Where another rank has died, this one's lost connection explains nothing: torchrun ends it while it sleeps.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            time.sleep(SECONDS_UNTIL_ENDED)
        raise


def tell(error: UserError) -> int:
    """Prints the error in one line, once where all ranks fail alike; returns the exit status."""
    rank = os.environ.get("RANK")
    line = f"error: {error}" if rank in (None, "0") else f"[rank {rank}] error: {error}"
    if rank is not None:
        from rlhf_megatron.topology.world import first_to_say

        report = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if report:  # what torchrun shows of this rank at the end
            cause = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(report).write_text(json.dumps({"message": cause}), encoding="utf-8")
        if not first_to_say(str(error)):
            return 2
    print(line, file=sys.stderr, flush=True)
    return 2
