"""Sources, splits and the seekable input pipeline."""
