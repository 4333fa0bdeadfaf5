"""One HTML page about a run and the weights that it learned; nothing is fetched to show it."""

# Unlabeled examples whose picture, text or numbers are in the page.
DEFAULT_MAX_EXAMPLES = 10_000
