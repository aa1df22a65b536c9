#!/usr/bin/env bash
# One node of a job: starts torchrun on it. Called by srun, once per node, from the script of launch/submit.py.
#   node.sh RANKS RESTARTS HOST:PORT NETWORK SETUP_SCRIPT PYTHON SCRIPT [ARGUMENTS...]
# NETWORK and SETUP_SCRIPT may be empty.
set -euo pipefail
ranks=$1 restarts=$2 rendezvous=$3 network=$4 setup=$5 python=$6
shift 6
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
cache=${TMPDIR:-/tmp}/rlhf_megatron-$(id -u)-$SLURM_JOB_ID-$SLURM_NODEID
export TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor VLLM_CACHE_ROOT=$cache/vllm
mkdir -p "$cache"

status=0
"$python" -P "$here/../torchrun.py" --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-endpoint "$rendezvous" --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts "$restarts" --signals-to-handle SIGINT,SIGHUP,SIGQUIT "$@" || status=$?
rm -rf "$cache"
exit "$status"
