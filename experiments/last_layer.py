"""Does the last layer suffice? Its influence beside that of all variables, along a training run.

    python -m experiments.last_layer --model_dir=/tmp/run

The paper takes the influence of an example weight over the last layer alone and suspects that this
becomes accurate once the layers below have converged. For each regular checkpoint of a finished run
(its settings are read from flags.txt) this compares, on one fixed batch,

    -c_u grad L_V^T (H + damping I)^-1 grad ell_U(u)

over the last layer, as training computes it, and over all trainable variables, by conjugate
gradients in float64. The batch holds all labeled rows, --examples unlabeled rows with augmentation
of their own, and all validation rows; Lambda is the checkpoint's. BatchNorm is in inference mode,
so that the objective is a plain function of the variables. H is the generalized Gauss-Newton
matrix, exact in the last layer but for Brier and entropy rows, or the true Hessian
(--curvature=hessian), which need not be positive away from a minimum: conjugate gradients then
stop, and the table says so.

Prints a table and writes last_layer.json and last_layer.png into the run's directory. Masked rows,
whose influence is exactly 0, take part in no number. The columns:

    rows        unlabeled examples that the mask lets count
    spearman    rank correlation of the last layer's influence with that of all variables
    pearson     correlation of the same
    same sign   share of examples that both would move in the same direction
    identity    rank correlation with all variables of their identity approximation, grad L_V^T grad
    id. last    ell_U(u), over all variables, and over the last layer
    below       what the layers below contribute to the influence: sum |theirs| / sum (|theirs| +
                |the last layer's own|), both parts of one solve over all variables
    features    |X - X_end| / |X_end|, how far the batch's features are from those of the last step
    steps       of conjugate gradients; then the relative residual they reached; "negative" where
                they met negative curvature, "unmet" where they fell short of --tolerance

Seconds a checkpoint for the MLP of experiments.synthetic. For the quickstart run on digits one and
a half minutes of CPU with --examples=300 --tolerance=1e-4, and a rank correlation of 0.41 at step
50 and 0.32 at step 1500.
"""

from absl import flags

from experiments import command, flags as shared_flags
from ssl_influence import config as config_lib, files

_CURVATURES = ("gauss_newton", "hessian")  # of all_variables, whose import takes seconds

shared_flags.define_model_dir()
_STEPS = flags.DEFINE_list("steps", [], "Steps of the checkpoints (default: all regular ones).")
_EXAMPLES = flags.DEFINE_integer(
    "examples", 500, "Unlabeled examples of the batch; at most all there are.", lower_bound=3
)
_CURVATURE = flags.DEFINE_enum("curvature", _CURVATURES[0], _CURVATURES, "The matrix H.")
_DAMPING = flags.DEFINE_float(
    "damping", None, "Added to the diagonal of H, in both (default: the run's).", lower_bound=0.0
)
_TOLERANCE = flags.DEFINE_float(
    "tolerance", 1e-5, "Relative residual of conjugate gradients.", lower_bound=0.0
)
_MAX_ITERATIONS = flags.DEFINE_integer(
    "max_iterations", 2000, "Most steps of conjugate gradients.", lower_bound=1
)


def main() -> None:
    model_dir = shared_flags.model_dir()
    shared_flags.require_of_run(model_dir, "flags.txt")
    config = shared_flags.read_flagfile(model_dir / "flags.txt")
    if config.model.name == "bert":
        raise config_lib.ConfigError(
            f"--model_dir={model_dir} is of texts, which this study does not follow: name a run "
            "on images or vectors."
        )
    if config.method.name == "supervised":
        raise config_lib.ConfigError(
            f"--model_dir={model_dir} holds a supervised run, which has no example weights: name "
            "another."
        )
    paths = _checkpoints(model_dir, config.train.checkpoint_every)
    if _DAMPING.value is not None:
        config = config.replace(weights={"damping": _DAMPING.value})
    from experiments import last_layer_study

    study = last_layer_study.Study(
        config,
        model_dir,
        examples=_EXAMPLES.value,
        curvature=_CURVATURE.value,
        tolerance=_TOLERANCE.value,
        max_iterations=_MAX_ITERATIONS.value,
    )
    print(study.description, flush=True)
    measured = {}
    for step, path in paths.items():
        measured[step] = study.measure(path)
        print(f"step {step}: {last_layer_study.describe_solve(measured[step].solve)}", flush=True)
    rows = last_layer_study.statistics(measured)
    last_layer_study.write(rows, study.settings, model_dir / "last_layer.json")
    last_layer_study.draw(rows, measured, model_dir / "last_layer.png")
    print(last_layer_study.table(rows))


def _checkpoints(model_dir: files.AnyPath, every: int) -> dict[int, str]:
    """Step -> path of the checkpoints to look at: those of --steps, or all regular ones."""
    from ssl_influence import checkpoints

    found = checkpoints.list_checkpoints(model_dir / "checkpoints")
    if not found:
        raise config_lib.ConfigError(
            f"{model_dir / 'checkpoints'} holds no checkpoint: train there first."
        )
    if not _STEPS.value:
        return checkpoints.on_schedule(found, every, max(found))
    missing = [text for text in _STEPS.value if text not in map(str, found)]
    if missing:
        raise config_lib.ConfigError(
            f"steps={','.join(missing)}: {model_dir} holds checkpoints of the steps "
            f"{', '.join(map(str, found))}."
        )
    return {k: found[k] for k in sorted(map(int, _STEPS.value))}


if __name__ == "__main__":
    command.run(main)
