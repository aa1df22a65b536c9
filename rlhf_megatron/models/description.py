"""The description of a model: the only one, filled from a Hugging Face config by the model's family. Free of torch."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.rope import Rope
from rlhf_megatron.topology.layout import Layout

Head = Literal["language", "scalar", "prediction", "draft"]
VOCABULARY_MULTIPLE = 64  # vLLM pads to it too, so that equal layouts have equal shards
WIDEST_HEAD = 256  # of fused attention that takes fewer key-value heads than queries, on GPUs


@dataclasses.dataclass(frozen=True)
class SharedExpert:
    """An expert that every token reaches beside those chosen for it; ``gated``: scaled by the sigmoid of a product."""

    feed_forward: int
    gated: bool


@dataclasses.dataclass(frozen=True)
class Routing:
    """A router's scores and choice of experts, where it does not simply take the largest of a softmax.

    ``corrected``: each expert has a bias that is added for the choice alone, and is not trained.
    ``groups``: the experts are chosen within the ``chosen_groups`` best of so many equal groups; a group counts by the
    sum of its ``counted_of_group`` best experts.
    ``scale``: the factor of the chosen experts' weights.
    """

    score: Literal["softmax", "sigmoid"]
    corrected: bool = False
    groups: int = 1
    chosen_groups: int = 1
    counted_of_group: int = 1
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of a feed-forward layer (arXiv 1701.06538); every token reaches its ``chosen``.

    The router's weights are a softmax over all experts, or what ``routing`` says; with ``normalized`` those of the
    chosen are made to sum to 1. ``biased``: the router and every matrix of an expert have biases.
    ``limit``: gate and up are clamped to it in gpt-oss' activation; None: it is another.
    ``beside_dense``: ``shared`` is a dense feed-forward layer; it and the chosen ones have norms before and after. The
    router reads what is before them, normed and times weights, and each expert has a factor that is learned.
    """

    count: int
    chosen: int
    feed_forward: int
    normalized: bool
    shared: SharedExpert | None = None
    routing: Routing | None = None
    biased: bool = False
    limit: float | None = None
    beside_dense: bool = False


@dataclasses.dataclass(frozen=True)
class Scales:
    """Factors and soft caps of a model's numbers; None where there is none. A soft cap c makes x into c tanh(x / c).

    ``embedding``: of embeddings; ``rounded_embedding``: the factor is rounded to the type of the weights.
    ``attention``: of queries with keys, in place of 1 / sqrt(head_dim); ``attention_cap``: of that product.
    ``residual``: of what attention and feed-forward layer add. ``logits``: of the logits; ``logit_cap``: of these.
    """

    embedding: float | None = None
    rounded_embedding: bool = False
    attention: float | None = None
    attention_cap: float | None = None
    residual: float | None = None
    logits: float | None = None
    logit_cap: float | None = None


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): the ranks of latents, and the parts of a head.

    ``query_rank``: None: queries are not compressed. ``unturned``, ``turned``: the parts of queries and keys without
    and with positions, which all heads' keys share. ``value``: the size of a value head.
    """

    query_rank: int | None
    key_value_rank: int
    unturned: int
    turned: int
    value: int

    @property
    def query_head(self) -> int:
        """The size of a query head."""
        return self.unturned + self.turned


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """A gated delta net, linear attention whose states are corrected and forget (arXiv 2412.06464).

    Each of ``key_heads`` is shared by several of the ``value_heads``. ``taps``: tokens of the convolution before.
    ``by_key_head``: the checkpoint's fused matrices have all rows of a key head together.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_key_head: bool

    @property
    def keys(self) -> int:
        """Columns of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of all values."""
        return self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class FullHeads:
    """The heads of layers without a window, where those with one have others.

    ``keys_are_values``: a value is its key before norm and positions, and has no matrix of its own.
    """

    key_value_heads: int
    head_dim: int
    keys_are_values: bool


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The parts of one decoder layer; layers of a kind have the same modules, tensors and cost.

    With "window" a token attends to itself and those before it, ``Architecture.window`` in all; "delta" is
    ``Architecture.delta_net``.
    """

    attention: Literal["full", "window", "delta"]
    feed_forward: Literal["dense", "experts"]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The shape of a decoder-only transformer, in the field's terms; ``feed_forward`` is that of dense layers.

    ``head`` is what reads the decoder's output: the logits of the next token, or one number per token (``heads``).
    With "prediction" this is a layer for multi-token prediction alone, which drafts: see ``prediction_model``. With
    "draft" it is a head in EAGLE-3's form (``draft_heads``): ``vocabulary`` is then that of its drafts, and
    ``target_vocabulary`` that of the model it drafts for; it reads the hidden states before the ``auxiliary_layers`` of
    that one, where the number of all layers stands for what the last one gives. ``target_cuts_sequences``: see there.
    ``mixed_layers`` has the kind of each layer where they are not all of one (``layer_kinds``), ``mixed_ropes`` its
    position embeddings where they are not all ``rope``; None is a layer without positions.
    ``window``: how many tokens a token attends to, itself included, in the layers that have a window; None: none has.
    ``query_key_norm``: of each head; ``wide_query_key_norm``: of all heads of a token together.
    ``head_norms``: LayerNorms of queries and keys, each head's by weights of its own.
    ``norms_of_turned``: these norms are of queries and keys that positions have turned, not the other way round.
    ``attention_sinks``: each head has a number that takes part in its softmax as the product of one more key, whose
    value is nothing (https://arxiv.org/abs/2309.17453).
    ``zero_centred_norms``: the factors of norms are 1 + their weights.
    ``gated_attention``: a head's output is multiplied with the sigmoid of a gate, whose rows are behind its query's.
    ``prediction_layers``: layers for multi-token prediction behind the others in the checkpoint, which are no part of
    the model. ``first_layer``: the number of the first layer in the checkpoint.
    ``plain_mlp``: dense feed-forward layers have no gate: one matrix up, the activation, one down.
    ``latent``: attention is latent attention; ``head_dim`` is then the part of a head that turns.
    ``full_heads``: heads of layers without a window; None: they are those of the others. See ``of_kind``.
    ``keys_are_values``: see ``FullHeads``. ``value_norm``: of each head's values, without weights.
    ``layer_scalars``: what a layer makes is multiplied with a number of the checkpoint, which is not trained.
    """

    family: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    query_key_norm: bool
    qkv_bias: bool
    end_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    head: Head = "language"
    experts: Experts | None = None
    mixed_layers: tuple[LayerKind, ...] = ()
    mixed_ropes: tuple[Rope | None, ...] = ()
    window: int | None = None
    zero_centred_norms: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    wide_query_key_norm: bool = False
    scales: Scales = Scales()
    attention_sinks: bool = False
    prediction_layers: int = 0
    latent: Latent | None = None
    gated_attention: bool = False
    delta_net: DeltaNet | None = None
    norms_of_turned: bool = False
    head_norms: bool = False
    plain_mlp: bool = False
    full_heads: FullHeads | None = None
    keys_are_values: bool = False
    value_norm: bool = False
    layer_scalars: bool = False
    first_layer: int = 0
    target_vocabulary: int = 0
    auxiliary_layers: tuple[int, ...] = ()
    target_cuts_sequences: bool = False

    @functools.cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each decoder layer, from the first to the last."""
        if self.mixed_layers:
            return self.mixed_layers
        attention: Literal["full", "window"] = "full" if self.window is None else "window"
        return (LayerKind(attention, "experts" if self.experts else "dense"),) * self.layers

    def of_kind(self, kind: LayerKind) -> Architecture:
        """Return the model whose layers all have the heads of this kind."""
        return self._with_full_heads if kind.attention == "full" else self

    @functools.cached_property
    def _with_full_heads(self) -> Architecture:
        if self.full_heads is None:
            return self
        own = {field.name: getattr(self.full_heads, field.name) for field in dataclasses.fields(self.full_heads)}
        return dataclasses.replace(self, full_heads=None, **own)

    def layer_tensors(self, index: int) -> str:
        """Return what the names of a decoder layer's tensors begin with."""
        return f"model.layers.{self.first_layer + index}."

    @functools.cached_property
    def kind_counts(self) -> Mapping[LayerKind, int]:
        """The number of decoder layers of each kind."""
        return Counter(self.layer_kinds)

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """The position embeddings of each decoder layer, None where it has none."""
        return self.mixed_ropes or (self.rope,) * self.layers

    @property
    def cuts_sequences(self) -> bool:
        """True if tensor ranks always share out the tokens between their parts (sequence parallelism)."""
        return bool(self.experts or self.latent or self.delta_net) or self.target_cuts_sequences

    def notes(self, predicts: bool) -> tuple[str, ...]:
        """Return lines about what is left out of the model, for the person who starts a run; ``predicts``: not the
        layer for multi-token prediction, which drafts."""
        if predicts or not self.prediction_layers:
            return ()
        field = f"num_nextn_predict_layers={self.prediction_layers}"
        return (f"layers for multi-token prediction ({field}) are left out of training, rollout and export",)

    def for_rows(self, longest: int | None) -> Architecture:
        """Return the same model in a run whose rows have at most ``longest`` tokens (``Rope.for_rows``)."""
        mixed = tuple(rope and rope.for_rows(longest) for rope in self.mixed_ropes)
        return dataclasses.replace(self, rope=self.rope.for_rows(longest), mixed_ropes=mixed)

    def prediction_model(self) -> Architecture:
        """Return the layer for multi-token prediction that is behind the others, as a model of one layer.

        It maps the model's output at one token and the embedding of the next to a prediction of the one after that
        (https://arxiv.org/abs/2412.19437, section 2.2), with the model's embeddings and output layer.
        """
        return dataclasses.replace(
            self,
            head="prediction",
            layers=1,
            first_layer=self.layers,
            prediction_layers=0,
            mixed_layers=self.layer_kinds[-1:],
            rope=self.layer_ropes[-1] or self.rope,
            mixed_ropes=(),
        )

    def with_head(self, head: Head) -> Architecture:
        """Return the same decoder under another head."""
        return dataclasses.replace(self, head=head)

    def padded_vocabulary(self, tensor: int) -> int:
        """Return rows of the embedding over all ranks: a multiple of 64 that ``tensor`` divides."""
        multiple = VOCABULARY_MULTIPLE
        while multiple % tensor:
            multiple += VOCABULARY_MULTIPLE
        return -(-self.vocabulary // multiple) * multiple

    def check_layout(self, layout: Layout) -> None:
        """Raise ModelError, or RecipeError of its stages, where this model cannot be cut into ``layout``.

        The line begins with the layout's key. Key-value heads fewer than tensor ranks are shared: Megatron computes
        them in parts and gathers them.
        """
        _check_divides("tensor", layout.tensor, self.heads, "attention heads (num_attention_heads)")
        if self.key_value_heads % layout.tensor and layout.tensor % self.key_value_heads:
            raise ModelError(
                f"layout.tensor={layout.tensor} neither divides the model's {self.key_value_heads} key-value heads "
                "(num_key_value_heads) nor is a multiple; change it"
            )
        if (self.wide_query_key_norm or self.head_norms) and self.key_value_heads % layout.tensor:
            how = "over all of which keys are normed" if self.wide_query_key_norm else "which have norms of their own"
            raise ModelError(
                f"layout.tensor={layout.tensor} does not divide the model's {self.key_value_heads} key-value heads "
                f"(num_key_value_heads), {how}; use a divisor"
            )
        if self.full_heads is not None and self.full_heads.key_value_heads % layout.tensor:
            raise ModelError(
                f"layout.tensor={layout.tensor} does not divide the model's {self.full_heads.key_value_heads} "
                "key-value heads of layers without a window; use a divisor, or pipeline"
            )
        self._check_delta_net(layout)
        self._check_feed_forward(layout)
        layout.stage_layers(self.layers)

    def _check_delta_net(self, layout: Layout) -> None:
        if self.gated_attention and self.key_value_heads % layout.tensor:
            raise ModelError(
                f"layout.tensor={layout.tensor} does not divide the model's {self.key_value_heads} key-value heads "
                "(num_key_value_heads), which gated attention asks for; use a divisor, expert or pipeline"
            )
        if self.delta_net is None:
            return
        heads, what = self.delta_net.key_heads, "key heads (linear_num_key_heads)"
        _check_divides("tensor", layout.tensor, heads, what)
        if heads % (layout.tensor * layout.context):
            raise ModelError(
                f"layout.context={layout.context} times layout.tensor={layout.tensor} does not divide the model's "
                f"{heads} {what}, which both share out; lower one of them, or use pipeline"
            )

    def _check_feed_forward(self, layout: Layout) -> None:
        if self.experts is None and (layout.expert > 1 or layout.expert_parts != layout.tensor):
            raise ModelError(
                "layout.expert and expert_tensor are for models with experts, and the model is dense; leave them out"
            )
        if any(kind.feed_forward == "dense" for kind in self.layer_kinds):
            columns = "columns of the feed-forward layers (intermediate_size)"
            _check_divides("tensor", layout.tensor, self.feed_forward, columns)
        if self.experts is not None:
            _check_divides("expert", layout.expert, self.experts.count, "experts (num_experts)")
            columns = "columns of an expert (moe_intermediate_size)"
            _check_divides("expert_tensor", layout.expert_parts, self.experts.feed_forward, columns)
            if self.experts.biased and layout.expert_parts > 1:
                raise ModelError("layout.expert_tensor must be 1: the model's experts have biases, which are not cut")
            if self.experts.shared:
                columns = "columns of the shared experts"
                _check_divides("tensor", layout.tensor, self.experts.shared.feed_forward, columns)


def _check_divides(key: str, degree: int, count: int, what: str) -> None:
    if count % degree:
        raise ModelError(
            f"layout.{key}={degree} does not divide the model's {count} {what}; use a divisor of {count}, or pipeline"
        )
