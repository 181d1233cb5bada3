"""Commands that check a run: the promises, as something to run."""
