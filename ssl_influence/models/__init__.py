"""Networks that give features and logits."""
