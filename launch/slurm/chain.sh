#!/usr/bin/env bash
# A run that is longer than the time limit, as a chain of jobs: each starts when the one before has ended and resumes
# from its checkpoint; once the island is complete the rest end at once. Use it where sites forbid --requeue.
#
#   ISLAND_ID=0 LIGHTHOUSE=http://10.0.0.1:29510 CONFIG=configs/run.yaml \
#       launch/slurm/chain.sh 5 --nodes=2 launch/slurm/island.sbatch
#
# The same as an array: sbatch --array=1-5%1 launch/slurm/island.sbatch
set -euo pipefail

length=${1:?usage: chain.sh LENGTH [sbatch options] SCRIPT}
shift
export AT_LIMIT=exit
dependency=()
for ((link = 1; link <= length; link++)); do
    job=$(sbatch --parsable "${dependency[@]}" "$@")
    job=${job%%;*}
    echo "job $job (${link} of $length)${dependency[*]:+, after ${dependency[*]#*:}}"
    dependency=(--dependency="afterany:$job")
done
