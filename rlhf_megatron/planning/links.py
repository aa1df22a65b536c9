"""Bandwidth of links between GPUs, for estimates."""

from __future__ import annotations

from rlhf_megatron.recipe.operations import ClusterSection

SUMMED_BYTES_PER_SECOND = 275e9  # what a rank has from the others in an all-reduce of much, over NVLink
_LINK_BYTES_PER_SECOND = 40e9  # between nodes, for a GPU, where the recipe does not say


def link(cluster: ClusterSection) -> float:
    """Return bytes per second between nodes, for a GPU."""
    return _LINK_BYTES_PER_SECOND if cluster.link_gb_per_sec is None else 1e9 * cluster.link_gb_per_sec


def host_link(cluster: ClusterSection) -> float:
    """Return bytes per second between nodes, of all GPUs of one together."""
    return link(cluster) * cluster.gpus_per_node


def ring(cluster: ClusterSection, ranks: int, stride: int) -> float:
    """Return bytes per second that each of ``ranks`` has from the others in a collective of much; ``stride`` GPUs lie
    from one to the next.

    Between nodes each GPU that takes part has a link of its own.
    """
    if ranks * stride <= cluster.gpus_per_node:
        return SUMMED_BYTES_PER_SECOND
    return min(SUMMED_BYTES_PER_SECOND, link(cluster) * max(1, cluster.gpus_per_node // stride))
