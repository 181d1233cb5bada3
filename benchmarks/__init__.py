"""Side-by-side benchmarks: two ways of doing one thing in one run; the ratio is the result."""
