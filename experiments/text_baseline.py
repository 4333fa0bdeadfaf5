"""TF-IDF and logistic regression on the labeled texts alone: what a text model has to beat.

    python -m experiments.text_baseline --dataset=movie_snippets.1@50-50 --seeds=1-5

On the splits that the other binaries draw: words and pairs of words of the labeled texts, by
scikit-learn, weighted by TF-IDF of these and the unlabeled texts; the inverse penalty C of
--penalties with the lowest error on the validation examples (the smallest C of several). Prints the
test error of each seed, and mean +- standard deviation.
"""

import dataclasses
import statistics

from absl import flags

from experiments import command, comparison, flags as shared_flags
from ssl_influence import config as config_lib
from ssl_influence.data import sources

shared_flags.define({"dataset": "movie_snippets.1@50-50"})
flags.DEFINE_list("seeds", ["1-5"], "Seeds of the split, as 1-5 or 1,2,7.")
flags.DEFINE_list("penalties", ["0.1", "1", "10", "100"], "Values of C to choose among.")


def main() -> None:
    config = shared_flags.to_config()
    try:
        penalties = sorted(float(text) for text in flags.FLAGS.penalties)
    except ValueError as error:
        raise config_lib.ConfigError(
            f"penalties={','.join(flags.FLAGS.penalties)} is not a list of numbers."
        ) from error
    if not penalties or not all(0 < penalty < float("inf") for penalty in penalties):
        raise config_lib.ConfigError("penalties must be numbers above 0.")
    seeds = comparison.parse_seeds(flags.FLAGS.seeds)
    if not seeds:
        raise config_lib.ConfigError("seeds: name one or more.")
    errors = []
    for seed in seeds:
        name = dataclasses.replace(sources.parse_name(config.data.dataset), seed=seed)
        error, penalty = _error(config.replace(data={"dataset": str(name)}), penalties)
        errors.append(error)
        print(f"seed {seed}: {error:.2f}% (C = {penalty:g})", flush=True)
    spread = f" +- {statistics.stdev(errors):.2f}" if len(errors) > 1 else ""
    print(f"TF-IDF and logistic regression: {statistics.mean(errors):.2f}{spread}%")


def _error(config: config_lib.Config, penalties: list[float]) -> tuple[float, float]:
    """(test error in percent, the C chosen)."""
    import numpy as np
    from sklearn import feature_extraction, linear_model

    from experiments import launch

    source, split, _, _ = launch.load_data(config)
    if source.kind != "text" or not len(source.test_labels):
        raise config_lib.ConfigError(
            f"dataset={config.data.dataset} holds {source.kind}s"
            f"{'' if len(source.test_labels) else ' and no test part'}: name texts to test on."
        )
    vectors = feature_extraction.text.TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    vectors.fit(source.inputs[np.concatenate([split.labeled, split.unlabeled])])
    train, validation = (
        (vectors.transform(source.inputs[ids]), source.labels[ids])
        for ids in (split.labeled, split.validation)
    )
    test = vectors.transform(source.test_inputs), source.test_labels

    def fit(penalty):
        return linear_model.LogisticRegression(C=penalty, max_iter=1000).fit(*train)

    chosen = max(penalties, key=lambda penalty: fit(penalty).score(*validation))
    return 100.0 * (1.0 - fit(chosen).score(*test)), chosen


if __name__ == "__main__":
    command.run(main)
