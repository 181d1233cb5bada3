"""Sampling: the client protocol, the HTTP client, the embedded engine and its server.

Nothing is imported here, so that a client does not pay for torch.
"""
