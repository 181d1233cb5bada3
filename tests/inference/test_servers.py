"""What a run refuses of a server, and what it says."""

from dataclasses import replace
from typing import Any

import pytest

from pellucid.errors import ConfigError
from pellucid.inference.client import Expected, Health

POLICY = Expected("policy server", "my/model", "abc", 200, run="mine-1", model_fingerprint="f0")
TEACHER = Expected("teacher", "my/model", "abc", 200)
URL = "http://box:8000"


def health(**changes: Any) -> Health:
    values = {"model": "a/model", "vocabulary": "abc", "max_model_len": 200, "policy_version": 0}
    return Health(**{**values, **changes})


def refusal(expected: Expected, **changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        expected.check(URL, health(**changes))
    return str(refused.value)


@pytest.mark.parametrize("expected", [POLICY, TEACHER])
def test_vocabulary_and_length_are_those_of_the_run(expected: Expected) -> None:
    expected.check(URL, health(max_model_len=201))
    assert refusal(expected, vocabulary="xyz") == (
        f"the {expected.role} 'a/model' at {URL} has another vocabulary than model.name = 'my/model': a "
        "token id would not mean the same to both; take one with the same tokenizer"
    )
    assert refusal(expected, max_model_len=100) == (
        f"the {expected.role} 'a/model' at {URL} takes 100 tokens, less than inference.max_model_len "
        "= 200; start it with a larger inference.max_model_len, or lower that of the run"
    )


def test_a_server_takes_the_key_that_the_run_shows() -> None:
    scoring = replace(TEACHER, access="sampling", key_setting="orchestrator.teacher.key_file")
    for expected, enough in ((POLICY, {"all"}), (TEACHER, {"all"}), (scoring, {"all", "sampling"})):
        for access in ("all", "sampling", "none"):
            if access in enough:
                expected.check(URL, health(access=access))
            else:
                assert refusal(expected, access=access) == (
                    f"the {expected.role} 'a/model' at {URL} was started with another key than this run "
                    f"shows; start it with the run's output_dir, or set {expected.key_setting} to the file "
                    "`key` in the folder that it was started with"
                )
    assert "was started with another key" in refusal(POLICY, access="none", vocabulary="xyz")


def test_a_policy_server_was_started_with_the_model_of_the_run() -> None:
    POLICY.check(URL, health(model_fingerprint="f0"))
    POLICY.check(URL, health(model_fingerprint=""))  # neither side can tell: the vocabulary has to do
    replace(POLICY, model_fingerprint="").check(URL, health(model_fingerprint="f1"))
    assert refusal(POLICY, model_fingerprint="f1") == (
        "the policy server 'a/model' at http://box:8000 was started with another model (weights f1) than "
        "model.name = 'my/model' (weights f0); start it with the run's model, or set model.name to its"
    )


def test_a_longer_server_has_the_rotary_positions_of_the_run() -> None:
    expected = replace(POLICY, longrope_limits=frozenset({100, 4096}))
    expected.check(URL, health(max_model_len=4096))
    assert refusal(expected, max_model_len=4097) == (
        "the policy server 'a/model' at http://box:8000 takes 4097 tokens, more than 4096, above which its "
        "model has other rotary positions (longrope) than with inference.max_model_len = 200 of the run; "
        "start it with the same inference.max_model_len"
    )
    replace(TEACHER, longrope_limits=frozenset({4096})).check(URL, health(max_model_len=4097))


def test_a_policy_server_has_no_weights_but_this_runs() -> None:
    resumed = replace(POLICY, has_weights=True)
    resumed.check(URL, health(policy_version=9, run="mine-1"))
    assert "of this run, which has published none (it began anew)" in refusal(
        POLICY, policy_version=9, run="mine-1"
    )
    for expected in (POLICY, resumed):
        assert "version 400 of run 'theirs-2', not of this run, 'mine-1'" in refusal(
            expected, policy_version=400, run="theirs-2"
        )
        assert "version 3 of a run that it cannot name" in refusal(expected, policy_version=3)


def test_a_teacher_serves_what_it_likes() -> None:
    TEACHER.check(URL, health(policy_version=400, run="theirs-2", model_fingerprint="f1"))
