#!/usr/bin/env bash
# Everything to measure on a GPU, in parts of at most five minutes each and thirteen in all:
#     bash benchmarks/gpu_day.sh [PART...]       # 1 to 6; without arguments all
# Results go to $OUT, one file for each part (here, if OUT is not set). Nothing is downloaded.
# The machine needs torch for CUDA, triton, transformers, numba and pytest; hydra-core and datasets only for
# some tests of part 1, which are otherwise left out.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 PYTHONPATH=.:benchmarks${PYTHONPATH:+:$PYTHONPATH} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton}
out=${OUT:-.}
python=${PYTHON:-python3}
rounds="benchmarks/gpu_round.py --shape ${SHAPE:-qwen3-4b} --greedy-only"
tests="tests/infer/kernels tests/infer/engine/test_gpu.py"

# run NAME SECONDS COMMAND...: run a command with a time limit, and show the end of its output.
run() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout "$limit" "$@" >"$out/$name.txt" 2>&1
    status=$?
    echo "== $name: exit code $status, $((SECONDS - start)) s"
    tail -n "${LINES_SHOWN:-14}" "$out/$name.txt"
}

part() {
    case $1 in
    1) run 1-tests 150 "$python" -m pytest -q -p no:cacheprovider -o addopts=--import-mode=importlib $tests ;;
    2)
        run 2-rounds-1 110 "$python" $rounds --generate
        run 2-rounds-8 60 "$python" $rounds --rows 8
        run 2-rounds-32 80 "$python" $rounds --rows 32
        ;;
    3) LINES_SHOWN=60 run 3-kernels 120 "$python" benchmarks/gpu_kernels.py ${SMALL:+--small} ;;
    4) LINES_SHOWN=40 run 4-lossless 150 "$python" benchmarks/gpu_lossless.py --tokens 24 ;;
    5) LINES_SHOWN=60 run 5-targets 90 "$python" benchmarks/gpu_targets.py ;;
    6) run 6-training 200 "$python" benchmarks/gpu_step.py ${SMALL:+--small} ;;
    *) echo "gpu_day.sh: the parts are 1 to 6, not $1" >&2 && exit 1 ;;
    esac
}

for number in "${@:-1 2 3 4 5 6}"; do
    for each in $number; do part "$each"; done
done
