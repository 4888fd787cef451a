#!/usr/bin/env bash
# Everything that must be green before a commit: format, lint, types, floors, shell scripts, all tests.
# Arguments go to pytest. Run it by `make check`, or with the tools of an environment on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."

step() {
    echo "== $*"
    "$@"
}

step ruff format --check .
step ruff check .
step mypy
step lint-imports
mapfile -t scripts < <(git ls-files --cached --others --exclude-standard -- '*.sh' '*.sbatch' .ci/run)
if command -v shellcheck >/dev/null; then
    step shellcheck "${scripts[@]}"
else
    echo "== shellcheck is not installed: ${#scripts[@]} shell scripts not checked"
fi
step python -m pytest --durations=40 "$@"
