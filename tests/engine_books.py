"""The journal that an engine would keep of what a fake one sampled."""

from pathlib import Path

from pellucid.inference.fake import FakeInferenceClient
from pellucid.ledger import Flow, Journal, Stage, State


def close_engine_books(run_dir: Path, client: FakeInferenceClient, name: str = "inference") -> None:
    journal = Journal(run_dir / "ledger" / f"{name}.jsonl", Stage.INFERENCE)
    for account, num_sampled in client.sampled.items():
        num_delivered = client.delivered[account]
        journal.count(account.run, account.env, Flow.SAMPLED, num_sampled)
        journal.count(account.run, account.env, Flow.DELIVERED, num_delivered)
        journal.count(account.run, account.env, State.CANCELLED, num_sampled - num_delivered)
    journal.close(0)
