# NCCL over InfiniBand. Read by launch/slurm/node.sh; a variable that is set already stays as it is.
# What each one means: NVIDIA's NCCL documentation, "Environment Variables".
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
# mlx5: every port of NVIDIA's adapters. Name them (mlx5_0,mlx5_1) where some carry Ethernet or storage.
export NCCL_IB_HCA="${NCCL_IB_HCA:-mlx5}"
# Lost packets on a busy fabric: 4.096 us * 2^22 = 17 s per try, seven tries, before a connection is given up.
export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT:-22}"
export NCCL_IB_RETRY_CNT="${NCCL_IB_RETRY_CNT:-7}"
# The interface for setting up connections, also gloo's; every one but loopback and docker is tried without it.
if [[ -n ${NCCL_SOCKET_IFNAME:-} ]]; then export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$NCCL_SOCKET_IFNAME}"; fi
