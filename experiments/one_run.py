"""What the binaries that train one run share: its flags, and training it."""

from absl import flags

from experiments import command, flags as shared_flags

flags.disclaim_key_flags()


def define_flags(defaults: dict) -> None:
    """The shared flags, with these defaults where they differ, and --model_dir."""
    shared_flags.define_model_dir()
    shared_flags.define(defaults)


def main(program: str) -> int:
    """Trains the run that the flags describe, or goes on with it; returns the exit code."""
    config, model_dir = shared_flags.to_config(), shared_flags.model_dir()
    from experiments import launch

    finished = launch.train(launch.build(config), model_dir, program)
    return 0 if finished else command.STOPPED
