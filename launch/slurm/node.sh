#!/usr/bin/env bash
# What srun starts once on every node of an island: one torchrun agent, which starts the ranks of the node.
# Everything comes by environment from island.sbatch or islands.sbatch; arguments go to `dilocox train`.
set -euo pipefail

launch_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=environment.sh
source "$launch_dir/slurm/environment.sh"

# SLURM forwards SIGUSR1 (the time limit is near) to every process of the step. It is for the ranks, which save a
# checkpoint and end; agent and shell must survive it and wait for them.
trap '' USR1

# Every node of the island announces itself by the address that SLURM uses for it, as the host name may
# resolve to loopback.
if [[ -z ${NODE_ADDRESS:-} ]]; then
    NODE_ADDRESS=$(scontrol show node --oneliner "$SLURMD_NODENAME" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p') || true
fi
export NODE_ADDRESS
# What the first rank of each node prints also goes to the log of the job, behind the node's name.
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="$SLURMD_NODENAME: "
if [[ -n ${LOG_DIR:-} ]]; then export LOG_DIR=$LOG_DIR/$SLURMD_NODENAME; fi

exec "${container_exec[@]}" bash "$launch_dir/torchrun/several_nodes.sh" "$@"
