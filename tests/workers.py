"""How pytest's workers share the suite: a file is one worker's, and long files come first.

long file  ->  worker 0        every file's fixtures are made once, and a test that starts processes
long file  ->  worker 1        is not left for the end, when the other worker has nothing to do
short ...  ->  whoever is free
"""

import gc
from typing import Any

import pytest

from warm import share_cores


def pytest_configure() -> None:
    """What is imported stays: looking for garbage among it took a sixth of the time of the collection."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that are marked slow come first, otherwise in their order."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`: a test that takes its worker down has failed, and is not tried again.

    xdist itself gives what is left of the file to the next worker, the failed test included, until eight
    workers have died of it and the run is over.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class EachOnce(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            for unit in self.assigned_work[node].values():
                for test, is_done in unit.items():
                    if not is_done:
                        unit[test] = True
                        super().remove_node(node)
                        return test
            return super().remove_node(node)

        def _reschedule(self, node: Any) -> None:
            """A worker that has just replaced another gets its share once it has collected the tests."""
            if node in self.registered_collections:
                super()._reschedule(node)

    return EachOnce(config, log)


@pytest.fixture(autouse=True, scope="session")
def torch_threads() -> None:
    import torch

    torch.set_num_threads(share_cores())
