"""A column costs its declaration, producer and consumer: the example of docs/architecture.md, applied."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pellucid

ROOT = Path(__file__).parents[1]

USE_IT = """
import math, sys
from pathlib import Path
import torch
import pellucid.export
from pellucid.config import TisLossConfig
from pellucid.data import Completion, Example, Rollout, TokenTable, Turn
from pellucid.data.tensors import to_tensors
from pellucid.export import TokenExporter
from pellucid.inference.engine import draw
from pellucid.loss import LossInputs, tis_loss
from pellucid.loss.script import script
from pellucid.orchestrator.verdict import build_samples
from pellucid.transport import Batch, decode_batch, encode_batch
from pellucid.viewer.frame import frame

drawn = draw(torch.tensor([[9.0, 0.0], [0.0, 0.5]]), [1.0, 1.0], [0.99999, 0.1])
tokens, logprobs, gaps = (each.tolist() for each in drawn)
assert tokens == [1, 0]
torch.testing.assert_close(torch.tensor(gaps), torch.tensor([9.0, 0.5]))
completion = Completion(tokens, logprobs, [(0, 2)], "stop", columns={"top_logprob_gap": gaps})
rollout = Rollout("r", "g", Example("e", []), "env", 1.0, [Turn([5, 6], completion, "")], reward=1.0)
[sample] = build_samples(rollout, run_id="run", advantage=1.0)
sent = encode_batch(Batch("run", 0, TokenTable.from_samples([sample])))
table = decode_batch(sent, sender="test").table
trainer = torch.tensor([math.log(0.5), math.log(0.5), *logprobs])
inputs = LossInputs.of(to_tensors(table, torch.device("cpu")), trainer)
record = tis_loss(inputs, TisLossConfig(type="tis"))
torch.testing.assert_close(record.token_loss, torch.tensor([0.0, 0.0, 0.0, -logprobs[1]]))
exporter = TokenExporter(Path(sys.argv[1]))
observed = {"trainer_logprobs": trainer, "entropy": trainer, **record.columns()}
exporter.add(table, observed, step=0, micro_step=0, denominator=2)
exporter.finish(0)
exporter.mark_stable(0)
exporter.close()
export = pellucid.export.open(sys.argv[1])
exported = torch.from_numpy(export.step(0).column("top_logprob_gap"))
torch.testing.assert_close(exported, torch.tensor([0.0, 0.0, *gaps]))
assert export.summary(0).total().metrics["top_logprob_gap"].max == gaps[0]
assert '"gap to the top"' in frame().opening
assert "t.top_logprob_gap < 5" in script()
"""


def test_the_example_of_the_docs_is_all_that_a_column_needs(tmp_path: Path) -> None:
    shutil.copytree(Path(pellucid.__file__).parent, package := tmp_path / "pellucid")
    page = (ROOT / "docs" / "architecture.md").read_text()
    blocks = re.findall(r"```diff\n--- src/pellucid/(\S+)\n(.*?)```", page, re.DOTALL)
    assert [file for file, _ in blocks] == ["data/schema.py", "inference/engine.py", "loss/functions.py"]
    for file, block in blocks:
        source = (package / file).read_text()
        for removed, added in re.findall(r"((?:^-.*\n)*)((?:^\+.*\n)+)", block, re.MULTILINE):
            old = re.sub("^-", "", removed, flags=re.MULTILINE) or "_DECLARED = (\n"
            assert source.count(old) == 1, f"{file}: {old}"
            new = re.sub(r"^\+", "", added, flags=re.MULTILINE)
            source = source.replace(old, new if removed else old + new)
        (package / file).write_text(source)
    command = [sys.executable, "-c", USE_IT, str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
