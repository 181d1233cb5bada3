"""The harness `pellucid-chat`. verifiers finds a harness by the name of a top-level package; this is it."""

from pellucid.orchestrator.verifiers.harness import ChatHarness

__all__ = ["ChatHarness"]
