# shellcheck shell=bash
# What a site's nodes need before Python starts. Sourced by the job scripts and by node.sh on every node.
# Everything is off until its variable is set: here, in the job's head, or by a site file of `dilocox submit`.

# --- Environment modules, e.g. MODULES="gcc/12 cuda/12.4 nccl" ------------------------------------------
MODULES=${MODULES:-}
if [[ -n $MODULES ]]; then
    for name in $MODULES; do module load "$name"; done
fi

# --- Python: a virtual environment (VENV=/path/.venv) or a conda one (CONDA_ENV=name) -------------------
# Installed on a file system that all nodes see. Without either, PYTHON must have dilocox.
VENV=${VENV:-}
CONDA_ENV=${CONDA_ENV:-}
set +u # activation scripts read unset variables
if [[ -n $VENV ]]; then
    # shellcheck source=/dev/null
    source "$VENV/bin/activate"
elif [[ -n $CONDA_ENV ]]; then
    eval "$(conda shell.bash hook)"
    conda activate "$CONDA_ENV"
fi
set -u
export PYTHON=${PYTHON:-python}

# --- Containers: CONTAINER=apptainer or pyxis (enroot), CONTAINER_IMAGE, CONTAINER_MOUNTS=/a:/a,/b:/b ---
CONTAINER=${CONTAINER:-}
CONTAINER_IMAGE=${CONTAINER_IMAGE:-}
CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-$PWD:$PWD}
container_exec=() # put before the command on a node
container_srun=() # given to srun
case $CONTAINER in
    "") ;;
    apptainer)
        container_exec=(apptainer exec --bind "$CONTAINER_MOUNTS" --pwd "$PWD")
        if [[ -e /dev/nvidiactl ]]; then container_exec+=(--nv); fi
        container_exec+=("${CONTAINER_IMAGE:?set CONTAINER_IMAGE}")
        ;;
    pyxis)
        container_srun=(--container-image="${CONTAINER_IMAGE:?set CONTAINER_IMAGE}"
            --container-mounts="$CONTAINER_MOUNTS" --container-workdir="$PWD")
        ;;
    *)
        echo "CONTAINER=$CONTAINER: must be apptainer, pyxis or empty" >&2
        exit 2
        ;;
esac
export CONTAINER CONTAINER_IMAGE CONTAINER_MOUNTS
# Used by the scripts that source this file.
: "${container_exec[*]-}" "${container_srun[*]-}"

# --- Networks inside the island -------------------------------------------------------------------------
# FABRIC_INTERFACE sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (see ../torchrun/several_nodes.sh); the
# interface between islands is INTERFACE, never one of these. More of NCCL's own, where a site asks for it:
#   export NCCL_DEBUG=WARN            # INFO prints the networks that NCCL found
#   export NCCL_IB_HCA=mlx5           # InfiniBand adapters to use
#   export NCCL_IB_DISABLE=1          # no InfiniBand: sockets only
#   export NCCL_NET="AWS Libfabric"   # plugin for Slingshot or EFA
#   export NCCL_CROSS_NIC=0           # rail-optimised fabrics

# --- CPU ------------------------------------------------------------------------------------------------
# Without a GPU each rank computes with OMP_NUM_THREADS threads (run.threads_per_rank wins).
if [[ -n ${THREADS_PER_RANK:-} ]]; then export OMP_NUM_THREADS=$THREADS_PER_RANK; fi
