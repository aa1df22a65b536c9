# NCCL over plain TCP, where there is no RDMA. Read by launch/slurm/node.sh; a variable that is set already stays.
# What each one means: NVIDIA's NCCL documentation, "Environment Variables".
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-1}"
# Several connections share the load: one rarely fills a link of 25 Gbit/s or more. Their product is 64 at most.
export NCCL_SOCKET_NTHREADS="${NCCL_SOCKET_NTHREADS:-4}"
export NCCL_NSOCKS_PERTHREAD="${NCCL_NSOCKS_PERTHREAD:-4}"
if [[ -n ${NCCL_SOCKET_IFNAME:-} ]]; then export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$NCCL_SOCKET_IFNAME}"; fi
