"""A trainer that offers what lies in its folder, in a process that has vLLM: `trainer.py RUN_DIR KEY`.

Prints its port. A version above 90 is sent with one wrong number, as by a GPU whose memory is faulty.
"""

import sys
from pathlib import Path

import torch

from pellucid.transport import weights_transfer
from pellucid.transport.weights_offer import WeightsOffer
from pellucid.transport.weights_transfer import PublishedSource, WeightsSender


class FaultySource(PublishedSource):
    def __iter__(self):
        version = int(self._folder.name.removeprefix("step_"))
        for name, tensor in super().__iter__():
            yield name, tensor + 1 if version > 90 and name == "model.norm.weight" else tensor


weights_transfer.PublishedSource = FaultySource
offer = WeightsOffer(
    Path(sys.argv[1]), "127.0.0.1", 0, sys.argv[2], WeightsSender("nccl", torch.device("cpu"))
)
offer.start()
print(offer.port, flush=True)
sys.stdin.read()
offer.close()
