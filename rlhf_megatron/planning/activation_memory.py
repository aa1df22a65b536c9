"""Memory of activations: what the parts of decoder layers keep for a backward pass, layer by layer of a stage."""

from __future__ import annotations

from rlhf_megatron.models.architecture import Architecture, LayerKind
from rlhf_megatron.models.description import WIDEST_HEAD
from rlhf_megatron.recipe.role_sections import RoleSection, transformer_engine_can
from rlhf_megatron.topology.layout import Layout

_CHUNK = 64  # tokens of which a delta net has a state (``models.delta_rule``, which imports torch)


def stage_activations(
    section: RoleSection,
    architecture: Architecture,
    layout: Layout,
    stage: int,
    tokens: int,
    longest: int,
    size: int,
    in_flight: float,
    repeated: float = 0.0,
) -> float:
    """Return the bytes that a ``stage`` keeps of a micro-batch of ``tokens``; recomputed layers keep their input, and
    one of them at a time is whole, as are the modules that one layer recomputes. ``repeated``: see
    ``layer_activations``."""
    kept = again = 0.0
    recomputes = section.recompute.granularity == "full"
    for chunk in layout.stage_chunks(architecture.layers)[stage]:
        recomputed = min(len(chunk), section.recompute.layers or len(chunk)) if recomputes else 0
        kept += recomputed * size * architecture.hidden / _sequence_parts(section, architecture, layout)
        for layer in chunk[recomputed:]:
            kind = architecture.layer_kinds[layer]
            spared = recomputed_activations(section, architecture, kind, layout, size, longest)
            kept += layer_activations(section, architecture, kind, layout, size, longest, repeated) - spared
            again = max(again, spared)
    whole = largest_layer(section, architecture, layout, stage, size, longest, repeated) if recomputes else again
    return tokens * (kept * in_flight + whole)


def largest_layer(
    section: RoleSection,
    architecture: Architecture,
    layout: Layout,
    stage: int,
    size: int,
    longest: int,
    repeated: float = 0.0,
) -> float:
    """Return the most bytes per token that one layer of a ``stage`` keeps."""
    layers = [layer for chunk in layout.stage_chunks(architecture.layers)[stage] for layer in chunk]
    kinds = {architecture.layer_kinds[layer] for layer in layers}
    return max(layer_activations(section, architecture, kind, layout, size, longest, repeated) for kind in kinds)


def layer_activations(
    section: RoleSection,
    architecture: Architecture,
    kind: LayerKind,
    layout: Layout,
    size: int,
    longest: int,
    repeated: float = 0.0,
) -> float:
    """Return the bytes per token that one decoder layer keeps for its backward pass, in the manner of arXiv 2205.05198,
    section 4.

    Outside the tensor-parallel parts: the inputs and outputs of both norms (4 hidden), and latents. ``repeated``: keys
    and values of a shared prompt that there are more for each token. With fp8 the inputs of products take one byte, but
    for attention's output, which attention keeps as well.
    """
    a = architecture
    halved = 0.5 if section.fp8_recipe else 0.0
    outside = (4 - 2 * halved) * a.hidden
    if kind.attention == "delta":
        attention = _delta_net(a, size) + _delta_rule(a, size)
    elif a.latent is not None:
        attention = 2 * a.heads * (a.latent.query_head + a.latent.value)
        outside += 2 * ((a.latent.query_rank or 0) + a.latent.key_value_rank)  # before and behind their norms
    else:
        attention = _attention(a.of_kind(kind))
    if a.experts and a.experts.beside_dense:
        outside += 3 * a.hidden  # before the norms of both outputs, and behind the router's
    attention += _products(a, kind, size, longest) + repeated * _key_and_value(a.of_kind(kind))
    inside = (attention + _feed_forward(section, a, kind, layout, size) - halved * a.feed_forward) / layout.tensor
    return size * (outside / _sequence_parts(section, a, layout) + inside)


def recomputed_activations(
    section: RoleSection, architecture: Architecture, kind: LayerKind, layout: Layout, size: int, longest: int
) -> float:
    """Return how many of ``layer_activations`` the modules do not keep that ``section.recompute`` selects, nor the rule
    of a delta net; a module's input is kept by what makes it."""
    a, modules = architecture, section.recompute.selected
    inside = _products(a, kind, size, longest) if "core_attn" in modules else 0.0
    if kind.attention == "delta":
        inside += _delta_rule(a, size)
    experts = a.experts if kind.feed_forward == "experts" else None
    if ("moe" if experts else "mlp") in modules:
        inside += _feed_forward(section, a, kind, layout, size)
    elif experts and experts.shared and "shared_experts" in modules:
        inside += _kept_of_activation(section, layout, size) * experts.shared.feed_forward
    return size * inside / layout.tensor


def _sequence_parts(section: RoleSection, architecture: Architecture, layout: Layout) -> int:
    """Return the number of GPUs that norms are cut over."""
    return layout.tensor if section.sequence_parallel or architecture.cuts_sequences else 1


def _attention(a: Architecture) -> float:
    """Return the numbers of query, key, value and output; before the norms of heads, of gates and what they let
    through, and of keys and values repeated for wide heads (``models.attention``)."""
    query, key = a.heads * a.head_dim, a.key_value_heads * a.head_dim
    normed = query + key if a.query_key_norm or a.wide_query_key_norm or a.head_norms else 0
    normed += key if a.value_norm else 0
    repeated = 2 * query if a.head_dim > WIDEST_HEAD and query > key else 0
    return 2 * query + 2 * key + repeated + normed + (2 * query if a.gated_attention else 0)


def _key_and_value(a: Architecture) -> int:
    """Return the numbers of a token's keys and values."""
    if a.latent is not None:
        return a.heads * (a.latent.query_head + a.latent.value)
    return 2 * a.key_value_heads * a.head_dim


def _products(a: Architecture, kind: LayerKind, size: int, longest: int) -> float:
    """Return the numbers for each token and key of its row where attention is explicit: with soft caps or sinks in
    float32.

    In half the bytes, attention keeps nothing of the order of tokens squared.
    """
    if kind.attention == "delta" or size < 4 or (a.scales.attention_cap is None and not a.attention_sinks):
        return 0.0
    return a.heads * longest * (1.0 if a.scales.attention_cap is None else 2.0)  # softmax, and tanh


def _feed_forward(section: RoleSection, a: Architecture, kind: LayerKind, layout: Layout, size: int) -> float:
    """Return the numbers of gate, up and their product, and where the activation is not fused, also silu(gate) and a
    copy of up.

    Without a gate those of up, its ReLU and the square of that.
    Experts, taken to be equally busy, keep the same of each token that they get, and its input and output; of a clamped
    activation also gate and up before it.
    """
    kept = _kept_of_activation(section, layout, size)
    if kind.feed_forward == "dense":
        return (3 if a.plain_mlp else kept) * a.feed_forward
    experts = a.experts
    assert experts is not None
    shared = kept * experts.shared.feed_forward if experts.shared else 0
    kept += 2 if experts.limit is not None else 0
    return shared + experts.chosen * (kept * experts.feed_forward + 2 * a.hidden * layout.expert_parts)


def _kept_of_activation(section: RoleSection, layout: Layout, size: int) -> int:
    """Return the numbers for each column of a gated feed-forward layer; Transformer Engine is taken to be installed."""
    fused = section.transformer_implementation != "local" and transformer_engine_can(layout.context, size == 4)
    return 3 if fused else 5


def _delta_net(a: Architecture, size: int) -> float:
    """Return the numbers of the weights' type that a delta net keeps around its rule, whose arguments are among them.

    Of its convolution the input of each tap, its sum and its output; queries and keys, in float32 before their norm and
    again for each value head; decays and strengths; of the gated norm behind the rule 11 times the values, those in
    float32 twice. With context parallelism a rank has as many times the tokens as it has fewer heads, and keeps as
    much; the buffers of the exchange are gone when the rule is computed.
    """
    net = a.delta_net
    assert net is not None
    outside = (net.taps + 2) * (2 * net.keys + net.values) + 11 * net.values
    return outside + 2 * net.keys * 4 / size + net.value_heads * (2 * net.key_dim + 2 * 4 / size)


def _delta_rule(a: Architecture, size: int) -> float:
    """Return the numbers of the weights' type in which a delta net's rule is computed again for the backward pass, in
    float32.

    By plain torch, which takes most (``models.delta_rule``). For each value head of d columns of keys and e of values:
    8 d and 3 e in the forms that its products take, the squares of a chunk, and a state [d, e] for each chunk.
    """
    net = a.delta_net
    assert net is not None
    state = net.key_dim * net.value_dim / _CHUNK
    return net.value_heads * (8 * net.key_dim + 3 * net.value_dim + 5 * _CHUNK + state) * 4 / size
