"""What each example of a batch contributes to a gradient."""
