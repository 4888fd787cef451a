#!/usr/bin/env bash
# One island on this node. Start it once on each site; the islands meet at the lighthouse:
#
#   dilocox lighthouse --bind '[::]:29510'                          # once, on a host that all islands reach
#   ISLAND_ID=0 RANKS_PER_NODE=8 LIGHTHOUSE=http://10.0.0.1:29510 \
#       launch/torchrun/one_node.sh configs/run.yaml [--set section.leaf=value ...]
#
# Ctrl-C or SIGTERM: the ranks finish their step, save a checkpoint and end. Start it again to continue.
set -euo pipefail

CONFIG=${1:?usage: one_node.sh CONFIG [--set section.leaf=value ...]}
shift

# Which of the parallel.num_islands islands this is: 0, 1, ...
ISLAND_ID=${ISLAND_ID:?set ISLAND_ID to 0, 1, ...}
# Ranks on this node = parallel.ranks_per_island of the config; on GPUs one rank a GPU.
RANKS_PER_NODE=${RANKS_PER_NODE:?set RANKS_PER_NODE to parallel.ranks_per_island}
# http://HOST:PORT of `dilocox lighthouse`. Empty: what the config says in wan.lighthouse.
LIGHTHOUSE=${LIGHTHOUSE:-}
# Interface that reaches the other islands, e.g. eth0. Empty: the one that routes to the lighthouse.
INTERFACE=${INTERFACE:-}
# Address under which others reach this host, where it is not the interface's own (NAT). Empty: the interface's.
ADVERTISE_ADDRESS=${ADVERTISE_ADDRESS:-}
# LOW-HIGH: ports on which the other islands may connect to this host; open them in the firewall.
PORT_RANGE=${PORT_RANGE:-}
# The Python that has dilocox installed.
PYTHON=${PYTHON:-python}
# Seconds that the ranks get for their last step and checkpoint after SIGTERM (torchrun's default is 30).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${STOP_TIMEOUT_S:-300}

overrides=()
[[ -z $LIGHTHOUSE ]] || overrides+=(--set "wan.lighthouse=$LIGHTHOUSE")
[[ -z $INTERFACE ]] || overrides+=(--set "wan.interface=$INTERFACE")
[[ -z $ADVERTISE_ADDRESS ]] || overrides+=(--set "wan.advertise_address=$ADVERTISE_ADDRESS")
[[ -z $PORT_RANGE ]] || overrides+=(--set "wan.port_range=$PORT_RANGE")

# The ranks of one node meet on loopback, on any free port (0): several islands fit on one host.
exec "$PYTHON" -m torch.distributed.run \
    --nnodes=1 --nproc-per-node="$RANKS_PER_NODE" \
    --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1 \
    -m dilocox train "$CONFIG" --island-id "$ISLAND_ID" "${overrides[@]}" --resume "$@"
