#!/usr/bin/env bash
# SLURM: sbatch docs/clusters/slurm.sh +model=qwen3-8b data=jsonl data.path=/shared/answers.jsonl name=mine
# One task on each machine; launch.sh starts a process on each of its GPUs and finds the others by SLURM's variables. Two
# minutes before its time is over the job is told (USR1): it saves, leaves, and is put into the queue again, where the same
# command goes on. The repository, runs/ and the cache of rows have to lie on storage that all machines see.
#SBATCH --job-name=blockdraft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --output=runs/slurm-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start it with sbatch from the repository}"
export HF_DATASETS_CACHE=${HF_DATASETS_CACHE:-$PWD/runs/rows}
./launch.sh train --help >/dev/null # installs .venv once, before the machines would do so side by side

stopping=
save() {
    stopping=1
    scancel --signal=USR1 "$SLURM_JOB_ID" # to the processes that srun started: they save and leave
}
trap save USR1
srun ./launch.sh train "$@" &
wait $! || wait $! || [[ -n $stopping ]] # a signal ends the first wait
[[ -z $stopping ]] || scontrol requeue "$SLURM_JOB_ID"
