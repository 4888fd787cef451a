#!/usr/bin/env bash
# One island on several nodes: start it on every node of the island, in any order, with the same settings.
#
#   ISLAND_ID=0 NUM_NODES=2 RANKS_PER_NODE=8 HEAD_ADDRESS=node01 LIGHTHOUSE=http://10.0.0.1:29510 \
#       launch/torchrun/several_nodes.sh configs/run.yaml [--set section.leaf=value ...]
#
# launch/slurm/node.sh calls it with the settings that SLURM knows. Three networks meet here:
#   rendezvous  HEAD_ADDRESS:HEAD_PORT, where the torchrun agents of this island find each other (once, tiny)
#   fabric      FABRIC_INTERFACE, the collectives inside the island (every step, fast)
#   WAN         INTERFACE, ADVERTISE_ADDRESS, PORT_RANGE, between the islands (every sync)
set -euo pipefail

CONFIG=${1:?usage: several_nodes.sh CONFIG [--set section.leaf=value ...]}
shift

# Which of the parallel.num_islands islands this is: 0, 1, ...
ISLAND_ID=${ISLAND_ID:?set ISLAND_ID to 0, 1, ...}
# Nodes of this island = parallel.nodes_per_island.
NUM_NODES=${NUM_NODES:?set NUM_NODES to the number of nodes of this island}
# Ranks on each node; NUM_NODES * RANKS_PER_NODE = parallel.ranks_per_island. On GPUs one rank a GPU.
RANKS_PER_NODE=${RANKS_PER_NODE:?set RANKS_PER_NODE}

# Rendezvous. Address of any one node of this island, the same on all of them. That node serves it on
# HEAD_PORT; islands that share a head node need different ports, hence + ISLAND_ID.
HEAD_ADDRESS=${HEAD_ADDRESS:?set HEAD_ADDRESS to the address of one node of this island}
HEAD_PORT=${HEAD_PORT:-$((29520 + ISLAND_ID))}
# Separates runs that use the same head and port by accident.
RENDEZVOUS_ID=${RENDEZVOUS_ID:-dilocox-island-$ISLAND_ID}
# Address of this node for the other nodes of the island. Empty: its host name, which must then resolve to a
# real address on all of them (on many systems it resolves to 127.0.1.1; `dilocox doctor` checks).
NODE_ADDRESS=${NODE_ADDRESS:-}

# Fabric. Interface of the collectives inside the island, e.g. ib0 or hsn0. NCCL takes it for its sockets (its
# data goes over InfiniBand or Slingshot where it finds them), gloo for everything. Empty: they choose.
FABRIC_INTERFACE=${FABRIC_INTERFACE:-}

# WAN. See one_node.sh.
LIGHTHOUSE=${LIGHTHOUSE:-}
INTERFACE=${INTERFACE:-}
ADVERTISE_ADDRESS=${ADVERTISE_ADDRESS:-}
PORT_RANGE=${PORT_RANGE:-}

# Folder for what each rank prints; rank 0 of a node prints to the terminal as well. Empty: all to the terminal.
LOG_DIR=${LOG_DIR:-}
PYTHON=${PYTHON:-python}
# Seconds that the ranks get for their last step and checkpoint after SIGTERM (torchrun's default is 30).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${STOP_TIMEOUT_S:-300}

if [[ -n $FABRIC_INTERFACE ]]; then
    export GLOO_SOCKET_IFNAME=$FABRIC_INTERFACE NCCL_SOCKET_IFNAME=$FABRIC_INTERFACE
fi

agent=(--nnodes="$NUM_NODES" --nproc-per-node="$RANKS_PER_NODE" --max-restarts=0
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD_ADDRESS:$HEAD_PORT" --rdzv-id="$RENDEZVOUS_ID")
[[ -z $NODE_ADDRESS ]] || agent+=(--local-addr="$NODE_ADDRESS")
[[ -z $LOG_DIR ]] || agent+=(--log-dir="$LOG_DIR" --redirects=3 --tee=0:3)

overrides=()
[[ -z $LIGHTHOUSE ]] || overrides+=(--set "wan.lighthouse=$LIGHTHOUSE")
[[ -z $INTERFACE ]] || overrides+=(--set "wan.interface=$INTERFACE")
[[ -z $ADVERTISE_ADDRESS ]] || overrides+=(--set "wan.advertise_address=$ADVERTISE_ADDRESS")
[[ -z $PORT_RANGE ]] || overrides+=(--set "wan.port_range=$PORT_RANGE")

exec "$PYTHON" -m torch.distributed.run "${agent[@]}" \
    -m dilocox train "$CONFIG" --island-id "$ISLAND_ID" "${overrides[@]}" --resume "$@"
