"""Trained models in use: predictions for new inputs, and files that other programs load."""

# Which weights of a checkpoint: their moving average, or they themselves.
WEIGHTS = ("ema", "raw")
# Of tables of predictions.
FORMATS = ("csv", "json")
