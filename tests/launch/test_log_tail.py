"""The lines of a log that say why its process ended."""

from pellucid.launch.supervisor import NUM_TAIL_BYTES, find_cause, read_cause

TRACEBACK = """\
Traceback (most recent call last):
  File "a.py", line 1, in outer
    inner()
  File "a.py", line 2, in inner
    raise ValueError("no")
ValueError: no
"""


def test_the_error_line_with_its_indented_lines():
    log = "INFO step 1\nerror: old\nerror: trainer.optim.lr = 0\n       raise it\nINFO bye\n"

    assert find_cause(log) == ["error: trainer.optim.lr = 0", "       raise it"]


def test_without_one_the_end_of_the_last_traceback():
    log = "Traceback (most recent call last):\nKeyError: 1\n\n" + TRACEBACK + "a second line\n"

    assert find_cause(log) == [*TRACEBACK.splitlines(), "a second line"]


def test_a_long_traceback_is_cut_to_its_innermost_frames():
    frames = "".join(f'  File "a.py", line {n}, in f\n    f()\n' for n in range(50))
    log = f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n" + "noise\n" * 50

    lines = find_cause(log)

    assert len(lines) == 12
    assert lines[:2] == ['  File "a.py", line 47, in f', "    f()"]
    assert lines[6:8] == ["RecursionError: too deep", "noise"]


def test_without_either_the_last_lines():
    assert find_cause("".join(f"line {n}\n\n" for n in range(20))) == [f"line {n}" for n in range(8, 20)]
    assert find_cause("") == []


def test_only_the_end_of_a_log_is_read(tmp_path):
    path = tmp_path / "trainer.log"
    path.write_bytes(b"error: long ago\n" + b"x" * NUM_TAIL_BYTES + b"\n\xff last\n")

    assert read_cause(path)[-1] == "� last"
    assert "error: long ago" not in read_cause(path)
