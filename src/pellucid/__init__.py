"""Asynchronous RL post-training for language models in which every token is accounted for."""

__version__ = "0.1.0"
