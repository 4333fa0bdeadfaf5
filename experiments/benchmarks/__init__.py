"""The suites of `experiments.benchmark`, each a module of the suite's name.

A suite holds

- CASES: what is measured in a process of its own, in this order;
- RATIOS: name -> `timing.Ratio` over the rows;
- DEFAULTS, where it has any: flag -> text that takes the place of the shared flag's own default;
- check(config): raises ConfigError where the suite cannot follow the settings;
- measure(case, config, repeats): row -> quantity -> number. It imports TensorFlow, the module does
  not: the parent process is to stay small, since a new process inherits its peak memory.
"""

SUITES = (
    "train_step",
    "inner_steps",
    "augment",
    "m_adam",
    "shards",
    "per_example",
    "influence",
    "text",
    "flops",
)
