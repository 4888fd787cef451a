# shellcheck shell=bash
# What the job scripts share. Sourced after their settings; needs CONFIG, OUTPUT_DIR, RUN_NAME, LAUNCH_DIR.

# shellcheck source=environment.sh
source "$LAUNCH_DIR/slurm/environment.sh"

RUN_DIR=$OUTPUT_DIR/$RUN_NAME
# shellcheck disable=SC2034 # read by the job scripts
stop_reason= # empty, `limit` (SIGUSR1, see --signal) or `ended` (SIGTERM: scancel, requeue or preemption)
steps=()     # process ids of the srun commands of islands
export HEAD_ADDRESS ISLAND_ID NUM_NODES HEAD_PORT RENDEZVOUS_ID LOG_DIR

say() { echo "$(date '+%F %T') job $SLURM_JOB_ID: $*"; }

# node_address NODE: the address that SLURM uses for it; its host name may mean something else on other nodes.
node_address() { scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'; }

# find_lighthouse: sets LIGHTHOUSE from LIGHTHOUSE_FILE, which the lighthouse job writes when it starts.
find_lighthouse() {
    local waited=0
    [[ -z $LIGHTHOUSE && -n $LIGHTHOUSE_FILE ]] || return 0
    until [[ -s $LIGHTHOUSE_FILE ]]; do
        ((waited % 60)) || say "waiting for the lighthouse job to write $LIGHTHOUSE_FILE"
        ((waited < 3600)) || { say "no $LIGHTHOUSE_FILE after an hour; is the lighthouse job running?"; exit 1; }
        sleep 2
        waited=$((waited + 2))
    done
    LIGHTHOUSE=$(<"$LIGHTHOUSE_FILE")
}

# has_status ISLAND STATUS: what the island's summary says after it ended.
has_status() { grep -qs "\"status\": \"$2\"" "$RUN_DIR/island_$1/summary.json"; }

# start_island ISLAND NODE...: one job step with one torchrun agent a node, in the background.
start_island() {
    ISLAND_ID=$1
    shift
    NUM_NODES=$#
    HEAD_ADDRESS=$(node_address "$1")
    # Jobs of several users may share a node; ports below the range of outgoing connections.
    HEAD_PORT=$((20000 + (SLURM_JOB_ID * 8 + ISLAND_ID) % 10000))
    RENDEZVOUS_ID=dilocox-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$ISLAND_ID
    LOG_DIR=$RUN_DIR/logs/island_$ISLAND_ID/job_$SLURM_JOB_ID
    local options=(--nodes="$NUM_NODES" --ntasks="$NUM_NODES" --ntasks-per-node=1 --nodelist="$(IFS=, && echo "$*")"
        --kill-on-bad-exit=1 --job-name="island_$ISLAND_ID" "${container_srun[@]}")
    # srun does not take it over from sbatch by itself.
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    say "island $ISLAND_ID starts on $* ($RANKS_PER_NODE ranks a node), lighthouse ${LIGHTHOUSE:-as in $CONFIG}"
    say "ranks print to $LOG_DIR and log to $RUN_DIR/island_$ISLAND_ID"
    srun "${options[@]}" bash "$LAUNCH_DIR/slurm/node.sh" "$CONFIG" \
        --set "run.output_dir=$OUTPUT_DIR" --set "run.name=$RUN_NAME" "${TRAIN_ARGUMENTS[@]}" &
    steps+=($!)
}

# forward_signals: SIGUSR1 and SIGTERM reach the ranks; they finish the step, save a checkpoint and end.
forward_signals() {
    trap 'stop_reason=limit; say "time limit is near: checkpoint, then end"; stop_ranks' USR1
    # scancel, requeue and preemption send SIGTERM to every process of the job and SIGKILL after SLURM's KillWait
    # or GraceTime; `scancel --batch --signal=TERM JOB` comes here alone and leaves all the time that is needed.
    trap 'stop_reason=ended; say "asked to end: checkpoint, then end"; stop_ranks' TERM
}

# stop_ranks: srun hands SIGUSR1 on to every process of its step; on SIGTERM it would kill them instead. Repeated,
# because ranks that are still starting ignore it; once is enough for those that train.
stop_ranks() {
    kill -USR1 "${steps[@]}" 2>/dev/null || return 0
    while sleep 10 && kill -USR1 "${steps[@]}" 2>/dev/null; do :; done &
}

# wait_for_step PID: waits to its end although signals arrive; returns its exit code.
wait_for_step() {
    local code
    while true; do
        code=0
        wait "$1" || code=$?
        kill -0 "$1" 2>/dev/null || break
    done
    if ((code > 128)); then # perhaps a signal's code, not the step's
        local last=0
        wait "$1" || last=$?
        ((last == 127)) || code=$last
    fi
    return "$code"
}

# go_on_later: after the time limit, this job again or the next one of its chain.
go_on_later() {
    if [[ $AT_LIMIT == requeue && -z ${SLURM_ARRAY_JOB_ID:-} ]]; then
        say "requeued; it will resume from its checkpoint"
        scontrol requeue "$SLURM_JOB_ID"
    else
        say "ends here; the next job of the chain resumes from the checkpoint"
    fi
}
