"""Influence of unlabeled examples on the validation loss."""
