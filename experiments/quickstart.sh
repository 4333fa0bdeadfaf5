#!/usr/bin/env bash
# From nothing to a trained model and its figures: bash experiments/quickstart.sh [MODEL_DIR [FLAG ...]]
#
# Trains on 8x8 digits with learned per-example weights (no download, no GPU), evaluates on the test
# images, draws the learning curve and the weights, and writes a page about them. MODEL_DIR (default: runs/quickstart in the
# checkout) keeps all of it; run again, the finished training is not repeated. Further arguments are
# flags of the training.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
model_dir="${1:-$root/runs/quickstart}"
[[ "$model_dir" == /* ]] || model_dir="$PWD/$model_dir"
source "$root/experiments/environment.sh"
ensure_environment

cd "$root"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
"$VENV_PYTHON" -m experiments.uda_cifar \
  --flagfile=experiments/flagfiles/quickstart.flags --model_dir="$model_dir" "${@:2}"
"$VENV_PYTHON" -m experiments.evaluate --model_dir="$model_dir"
"$VENV_PYTHON" -m experiments.draw --model_dir="$model_dir"
"$VENV_PYTHON" -m experiments.report --model_dir="$model_dir" --html="$model_dir/report.html"
echo "Look at $model_dir/report.html (a page for your browser), $model_dir/curve.png and $model_dir/weights.png"
