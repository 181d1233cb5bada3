"""Tasksets of the `verifiers` library as environments: `id = "verifiers:TASKSET"`.

    our rollout ── verifiers' episode ── harness ── verifiers' interception ── SessionClient ── our session

Every model call of an episode ends in the session of the rollout, in this process: token ids, logprobs,
policy versions, request ids, cancellation and the ledger are those of any other environment. Rewards,
metrics, stops, tools and scoring are verifiers' own.

`verifiers` is imported when the first such environment is made: it takes seconds.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from pellucid.config.imports import describe
from pellucid.errors import ConfigError, UserCodeError

PREFIX = "verifiers:"


def is_taskset(env_id: str) -> bool:
    return env_id.startswith(PREFIX)


def require_verifiers(env_id: str, key: str) -> None:
    if find_spec("verifiers") is None:
        raise ConfigError(
            f"{key} = {env_id!r} needs the verifiers library, which is not installed; "
            "pip install 'pellucid[verifiers]'"
        )


def taskset_environment(env_id: str, key: str) -> Callable[..., Any]:
    """Returns the function that makes the environment of `verifiers:TASKSET`."""
    require_verifiers(env_id, key)
    from verifiers.v1 import import_taskset

    from pellucid.orchestrator.verifiers.environment import TasksetEnvironment

    taskset_id = env_id.removeprefix(PREFIX)
    try:
        import_taskset(taskset_id)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key} = {env_id!r} cannot be imported: {str(error).partition('. ')[0]}; a taskset is a "
            "package, or a file on PYTHONPATH, whose `__all__` names its Taskset"
        ) from error
    except Exception as error:  # of somebody's own module
        raise UserCodeError(f"{key} = {env_id!r} cannot be imported: {describe(error)}") from error
    return partial(TasksetEnvironment, taskset_id)
