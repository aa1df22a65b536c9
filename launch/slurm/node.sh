#!/usr/bin/env bash
# One node of a job: starts torchrun on it. Called by srun, once per node, from the script of launch/submit.py.
#   node.sh RANKS RESTARTS LAUNCHER HANG_SECONDS HOST:PORT NETWORK SETUP_SCRIPT PYTHON SCRIPT [ARGUMENTS...]
# LAUNCHER is torchrun or ft_launcher; NETWORK and SETUP_SCRIPT may be empty.
set -euo pipefail
ranks=$1 restarts=$2 launcher=$3 hang_seconds=$4 rendezvous=$5 network=$6 setup=$7 python=$8
shift 8
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Slurm's warnings reach every process of the node. The ranks act on them; torchrun, which would end its ranks half a
# minute after a SIGTERM, must not see them.
trap '' TERM USR1
# A store of its own for each attempt: in a shared one the ranks would find the addresses of the dead.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

if [[ -n $setup ]]; then
    # shellcheck source=/dev/null
    source "$setup"
fi
if [[ -n $network ]]; then
    # shellcheck source=/dev/null
    source "$here/../env/$network.sh"
fi

# Compilers of several jobs, or of two nodes that are one machine, must not write over each other.
# A folder of a name that nobody can foresee, and of this user alone: what is in it is run.
cache=$(mktemp -d "${TMPDIR:-/tmp}/rlhf_megatron-$SLURM_JOB_ID-$SLURM_NODEID.XXXXXXXXXX") ||
    { echo "error: no folder can be made in ${TMPDIR:-/tmp}, where this node's caches lie; set TMPDIR" >&2; exit 2; }
trap 'rm -rf "$cache"' EXIT
export TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor VLLM_CACHE_ROOT=$cache/vllm

if [[ $launcher == ft_launcher ]]; then
    # It passes a SIGTERM on to the ranks, and gives them half an hour to end.
    command=(-m nvidia_resiliency_ext.fault_tolerance.launcher --rdzv-conf "is_host=$((SLURM_NODEID == 0))")
    command+=(--ft-initial-rank-heartbeat-timeout "$hang_seconds" --ft-rank-heartbeat-timeout "$hang_seconds")
else
    command=("$here/../torchrun.py" --signals-to-handle SIGINT,SIGHUP,SIGQUIT)
fi

"$python" -P "${command[@]}" --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks" --rdzv-backend c10d \
    --rdzv-endpoint "$rendezvous" --rdzv-id "$SLURM_JOB_ID" --max-restarts "$restarts" "$@"
