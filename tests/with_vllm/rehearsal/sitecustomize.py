"""What takes the place of GPUs in a Python that starts with this folder on its path; the rest is vLLM's own.

- NCCL: the tensors go through the store in which vLLM's own process group meets, one by one, not packed.
- `weights_transfer.why_no_transfer` finds nothing missing.
"""

import importlib.abc
import importlib.util
import sys


def transfer(module):
    module.why_no_transfer = lambda backend: ""


class OverStore:
    """vLLM's `PyNcclCommunicator`, as far as a transfer uses it."""

    def __init__(self, group, device):
        self.group = group

    def send(self, tensor):
        self.group.broadcast(tensor, src=0)

    def receive(self):
        return self.group.broadcast(None, src=0)

    def destroy(self):
        self.group = None


def nccl_common(module):
    import torch

    def init(master_address, master_port, rank, world_size, device):
        from vllm.distributed.utils import StatelessProcessGroup

        made = StatelessProcessGroup.create(
            host=master_address, port=master_port, rank=rank, world_size=world_size
        )
        return OverStore(made, device)

    module.stateless_init_process_group = init
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda: None


def nccl_engine(module):
    def produce(iterator, group, src, post_iter_func, buffer_size_bytes, num_buffers):
        for item in iterator:
            group.send(post_iter_func(item))

    def consume(iterator, group, src, post_unpack_func, buffer_size_bytes, num_buffers, device):
        for name, (shape, dtype) in iterator:
            tensor = group.receive()
            assert (list(tensor.shape), tensor.dtype) == (list(shape), dtype)
            post_unpack_func([(name, tensor)])

    module.packed_nccl_broadcast_producer = produce
    module.packed_nccl_broadcast_consumer = consume


CHANGED = {
    "pellucid.transport.weights_transfer": transfer,
    "vllm.distributed.weight_transfer.nccl_common": nccl_common,
    "vllm.distributed.weight_transfer.nccl_engine": nccl_engine,
}


class Finder(importlib.abc.MetaPathFinder):
    """Changes a module once it has been executed."""

    def find_spec(self, name, path, target=None):
        if name not in CHANGED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            CHANGED[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
