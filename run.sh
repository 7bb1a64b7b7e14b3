#!/usr/bin/env bash
# Sets up a virtual environment on first use, then runs something in it:
#   bash run.sh example [args]        python example.py
#   bash run.sh test [pytest args]    the tests
#   bash run.sh lint                  ruff and mypy
#   bash run.sh python [args]         the environment's python
# PYTHON=python3.12  which python makes the environment       VENV=folder   where it is (.venv)
# TORCH=2.11.0       another torch than constraints.txt's     WORKERS=4     processes of `test` (0: no workers)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-python3}"
VENV="${VENV:-$ROOT/.venv}"
TORCH="${TORCH:-}"
# Threads that wait for the next matrix product sleep: spinning, they cost ten times the work where a core is shared.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac

usage() { sed -n '2,8s/^# //p' "${BASH_SOURCE[0]}"; }

ensure_environment() {
    local wanted constraints
    wanted="$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum) root=$ROOT torch=$TORCH"
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/installed" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then # none yet, or half made
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
            echo "nanovllm needs Python 3.10 or newer; $PYTHON is $("$PYTHON" --version 2>&1). Set PYTHON=..." >&2
            exit 1
        }
        echo "Making the virtual environment $VENV" >&2
        "$PYTHON" -m venv --clear "$VENV"
    fi
    echo "Installing nanovllm and what it needs (some minutes the first time)" >&2
    rm -f "$VENV/installed"
    constraints="$VENV/constraints.txt"
    if [ -n "$TORCH" ]; then
        sed "s/^torch==.*/torch==$TORCH/" "$ROOT/constraints.txt" >"$constraints"
    else
        cp "$ROOT/constraints.txt" "$constraints"
    fi
    "$VENV/bin/python" -m pip install -q -c "$constraints" --config-settings editable_mode=compat -e "$ROOT[test]" >&2
    echo "$wanted" >"$VENV/installed"
}

run_tests() {
    # One thread a process, one process a core. On a GPU they share it; what measures the whole of it runs afterwards.
    local workers dist=loadfile has_gpu="" status=0
    workers="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
    if [ "$workers" -gt 8 ]; then workers=8; fi
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then has_gpu=1 dist=worksteal; fi
    workers="${WORKERS:-$workers}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
    cd "$ROOT"
    "$VENV/bin/python" -m pytest -n "$workers" --dist "$dist" "$@" || status=$?
    if [ -n "$has_gpu" ] && [ "$workers" != 0 ]; then
        "$VENV/bin/python" -m pytest -n 0 "$@" -m gpu_alone || [ $? = 5 ] || status=1 # 5: none of these were asked for
    fi
    return "$status"
}

run_lint() {
    cd "$ROOT"
    local status=0 # all three, whatever the first says
    "$VENV/bin/python" -m ruff check . || status=1
    "$VENV/bin/python" -m ruff format --check . || status=1
    "$VENV/bin/python" -m mypy || status=1
    return "$status"
}

command="${1:-}"
case "$command" in
example | test | lint | python) ;;
-h | --help | help)
    usage
    exit
    ;;
*)
    usage >&2
    exit 2
    ;;
esac
shift
ensure_environment # not in an && list, where bash would go on after an error in it
case "$command" in
example) exec "$VENV/bin/python" "$ROOT/example.py" "$@" ;;
python) exec "$VENV/bin/python" "$@" ;;
test) run_tests "$@" ;;
lint) run_lint ;;
esac
