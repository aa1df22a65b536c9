# NCCL over RDMA on Ethernet (RoCE v2). Read by launch/slurm/node.sh; a variable that is set already stays as it is.
# What each one means: NVIDIA's NCCL documentation, "Environment Variables".
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
export NCCL_IB_HCA="${NCCL_IB_HCA:-mlx5}"
# The entry of the adapter's address table that is RoCE v2 over IPv4: 3 on most systems; `show_gids` lists them.
export NCCL_IB_GID_INDEX="${NCCL_IB_GID_INDEX:-3}"
# The traffic class that the switches treat as lossless: DSCP 26, shifted by two bits, on most of them.
export NCCL_IB_TC="${NCCL_IB_TC:-106}"
export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT:-22}"
export NCCL_IB_RETRY_CNT="${NCCL_IB_RETRY_CNT:-7}"
if [[ -n ${NCCL_SOCKET_IFNAME:-} ]]; then export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$NCCL_SOCKET_IFNAME}"; fi
