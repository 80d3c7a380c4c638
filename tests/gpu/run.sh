#!/usr/bin/env bash
# Everything that a machine with a GPU can say about this package, in one command:
#
#     tests/gpu/run.sh [--venv] [--no-install] RESULTS
#
# RESULTS is a directory, made if it is not there; each stage leaves its output in it, and
# summary.txt says how each ended. A stage that fails or takes too long does not stop
# the others; the status is 0 when all passed. It ends within 8 minutes, and needs no
# network as long as the tools are there.
#
#   --venv          make RESULTS/venv on top of the current Python and use that
#   --no-install    test the numpy_rmm that the current Python has
#   PYTHON          the interpreter; python3 when not set
#   NUMPY_RMM_WHEEL a wheel to install in place of building this tree
#   TOTAL           seconds for all of it; 470 when not set
set -u
cd "$(dirname "$0")/../.." || exit 2

usage() {
    sed -n '2,/^set -u/s/^#\( \|$\)//p' "tests/gpu/run.sh"
    exit 2
}

use_venv=no
install=yes
results=
for argument in "$@"; do
    case $argument in
    --venv) use_venv=yes ;;
    --no-install) install=no ;;
    -*) usage ;;
    *) [ -z "$results" ] && results=$argument || usage ;;
    esac
done
[ -n "$results" ] || usage
mkdir -p "$results" || exit 2
results=$(cd "$results" && pwd)
summary=$results/summary.txt
: >"$summary"
python=${PYTHON:-python3}
total=${TOTAL:-470}

note() {
    echo "$*" | tee -a "$summary"
}

# stage NAME SECONDS COMMAND...: at most so long, then it is killed with its children.
stage() {
    local name=$1 limit=$2 start=$SECONDS status
    local left=$((total - SECONDS))
    shift 2
    if [ $left -lt 5 ]; then
        note "FAILED  $name: not started, $total s are over"
        return 1
    fi
    [ "$limit" -le $left ] || limit=$left
    echo "== $name"
    timeout --kill-after=5 "$limit" "$@" >"$results/$name.txt" 2>&1
    status=$?
    case $status in
    0) note "ok      $name ($((SECONDS - start)) s)" ;;
    124 | 137) note "FAILED  $name: not done after $limit s" ;;
    *) note "FAILED  $name: status $status ($((SECONDS - start)) s)" ;;
    esac
    if [ $status -ne 0 ]; then
        tail -n 15 "$results/$name.txt" | sed 's/^/    /'
    fi
    return $status
}

has_module() {
    "$python" -P -c "import sys, importlib.util as u; sys.exit(u.find_spec('$1') is None)"
}

skip() {
    note "MISSING $1: $2"
}

# ---- the interpreter and the package -------------------------------------------------

"$python" -P -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    note "FAILED  $python is no Python of 3.11 or later"
    exit 1
}
if [ $use_venv = yes ]; then
    stage venv 60 "$python" -m venv --system-site-packages "$results/venv" &&
        python=$results/venv/bin/python
fi
# Tools that lie beside the interpreter, as in a virtual environment, come first.
PATH=$(dirname "$("$python" -P -c 'import sys; print(sys.executable)')"):$PATH
export PATH

if [ $install = yes ]; then
    missing=
    if [ -z "${NUMPY_RMM_WHEEL:-}" ]; then
        for module in mesonpy mesonbuild; do
            has_module $module || missing="$missing $module"
        done
        for tool in ninja "${CC:-cc}"; do
            command -v "$tool" >/dev/null || missing="$missing $tool"
        done
    fi
    if [ -n "$missing" ]; then
        skip install "needs$missing (pip install meson-python ninja), or NUMPY_RMM_WHEEL"
    elif [ -n "${NUMPY_RMM_WHEEL:-}" ]; then
        stage install 60 "$python" -m pip install --force-reinstall --no-deps \
            --no-index "$NUMPY_RMM_WHEEL"
    else
        stage install 120 "$python" -m pip install --no-build-isolation --no-deps \
            --no-index .
    fi
fi
# From elsewhere: the package in this folder has no extension.
if ! (cd "$results" && "$python" -c 'import numpy_rmm'); then
    note "FAILED  numpy_rmm cannot be imported: nothing else can run"
    exit 1
fi
stage info 30 "$python" -P -m numpy_rmm info

# ---- the tests -----------------------------------------------------------------------

if command -v "${CC:-cc}" >/dev/null; then
    stage rules 60 tests/gpu/rules/run.sh
else
    skip rules "needs a C compiler"
fi
for module in torch cupy numba cuda.core; do
    has_module $module 2>/dev/null || note "note    $module is not installed: its rows are left out"
done
stage proof 200 "$python" tests/gpu/proof.py --json "$results/proof.json" --limit 180
stage forks 120 "$python" tests/gpu/forks.py --json "$results/forks.json"
stage copies 80 "$python" benchmarks/copies.py --json "$results/copies.json"
if has_module pytest; then
    export NUMPY_RMM_TEST_GPU=1
    run_pytest=("$python" -P -m pytest -q --durations=10 -p no:cacheprovider)
    has_module pytest_timeout && run_pytest+=(--timeout=100)
    workers=()
    has_module xdist && workers=(-n 8 -p no:benchmark)
    # Side by side, as most of the suite needs one core and no GPU; but what holds a
    # stream, or counts the free memory of the device, must have the GPU for itself.
    alone="tests/test_safe_reuse.py tests/test_rules.py"
    shared=(--ignore=tests/gpu)
    for file in $alone; do shared+=("--ignore=$file"); done
    stage suite 240 "${run_pytest[@]}" "${workers[@]}" "${shared[@]}" \
        --junitxml="$results/suite.xml"
    stage held 200 "${run_pytest[@]}" $alone --junitxml="$results/held.xml"
    stage libraries 240 "${run_pytest[@]}" tests/gpu --ignore=tests/gpu/test_fork.py \
        --junitxml="$results/libraries.xml"
    unset NUMPY_RMM_TEST_GPU
else
    skip tests "needs pytest (pip install pytest pytest-timeout)"
fi

# ---- the other benchmarks, the longest last ------------------------------------------

for name in import_time first_fill arithmetic; do
    stage "$name" 160 "$python" "benchmarks/$name.py" --json "$results/$name.json"
done

failed=$(grep -c '^FAILED\|^MISSING' "$summary")
note "$([ "$failed" -eq 0 ] && echo "all passed" || echo "$failed did not pass")," \
    "$((SECONDS / 60)) min $((SECONDS % 60)) s"
[ -s "$results/proof.txt" ] && cat "$results/proof.txt"
[ -s "$results/copies.txt" ] && cat "$results/copies.txt"
exit $((failed != 0))
