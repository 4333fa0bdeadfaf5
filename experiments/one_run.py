"""What the binaries that train one run share: its flags, and training it."""

from absl import flags

from experiments import flags as shared_flags

flags.disclaim_key_flags()


def define_flags(defaults: dict) -> None:
    """The shared flags, with these defaults where they differ, and --model_dir."""
    shared_flags.define_model_dir()
    shared_flags.define(defaults)


def main(program: str) -> None:
    """Trains the run that the flags describe, or goes on with it."""
    config = shared_flags.to_config()
    from experiments import launch

    launch.train(launch.build(config), shared_flags.model_dir(), program)
