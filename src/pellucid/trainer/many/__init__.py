"""Several runs, one model: each has an adapter, an optimizer, a denominator and a folder of its own."""
