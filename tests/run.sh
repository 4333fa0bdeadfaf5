#!/usr/bin/env bash
# Runs the tests: bash tests/run.sh [pytest arguments]. Needs nothing but Python 3.10 to 3.13 and pip.
#
# Two files are tested at a time, or TEST_WORKERS of them (0: all in one process).
# Paths among the arguments are read from the root of the checkout. See experiments/environment.sh
# for PYTHON and VENV.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/experiments/environment.sh"
ensure_environment test text

cd "$root"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
exec "$VENV_PYTHON" -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile "$@"
