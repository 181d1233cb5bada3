"""Starts and supervises the processes of a run on one machine. No torch here: it has to start at once."""
