"""Names that checkpoints have for the norms about a layer's attention and feed-forward layer."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class NormNames:
    """Names in a checkpoint of a layer's norms about attention and feed-forward layer; None: there is no such norm.

    Those after are of what is added to the residual stream. ``query``, ``key``: norms within attention.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None
    query: str = "q_norm"
    key: str = "k_norm"

    @property
    def names(self) -> tuple[str | None, ...]:
        """Those about the two, in the model's order."""
        return self.before_attention, self.after_attention, self.before_feed_forward, self.after_feed_forward


NORMS_BEFORE = NormNames()
NORMS_AFTER = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)
NORMS_AROUND = NormNames(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
