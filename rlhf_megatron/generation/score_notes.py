"""Data sources, right answers and parts of rewards of scored rows, for the rows that a run keeps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa

from rlhf_megatron.generation.generated_groups import GeneratedGroups
from rlhf_megatron.monitor.kept_rows import digest_of, notes_schema


class ScoreNotes:
    """The newest notes of the rows that this rank's replica has generated, by their tokens.

    They are not in checkpoints: of a row that waits over a restart there are none.
    """

    def __init__(self, most: int, part_names: Sequence[str]) -> None:
        """Set up; ``most``: rows, beyond which the oldest are forgotten; 0 to note nothing."""
        self._most, self._part_names = most, list(part_names)
        self._notes: dict[int, dict[str, Any]] = {}

    def add(self, generated: GeneratedGroups) -> None:
        """Note all rows of one call; waits for the last score."""
        if not self._most:
            return
        for prompt, completion, score in zip(generated.prompts, generated.completions, generated.scores(), strict=True):
            parts = dict(zip((f"reward_{name}" for name in self._part_names), score.parts, strict=False))
            note = {"data_source": prompt.data_source, "ground_truth": str(prompt.ground_truth), **parts}
            for branch in (*completion.branches, completion):
                row = [*(branch.prompt_token_ids or prompt.token_ids), *branch.token_ids]
                self._notes[digest_of(row)] = note
        for digest in list(self._notes)[: -self._most]:
            del self._notes[digest]

    def table(self, digests: Collection[int]) -> pa.Table:
        """Return the notes of those of the rows that are known here."""
        known = [{"digest": digest, **self._notes[digest]} for digest in digests if digest in self._notes]
        return pa.Table.from_pylist(known, schema=notes_schema(self._part_names))
