"""Which torch `make` installs, asked of a real pip with package indexes made on the spot."""

import importlib.util
import os
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent.parent / "install_torch.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("install_torch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_wheel(index: Path, name: str, version: str, *requirements: str) -> None:
    """An installable package without contents, listed as a package index lists it."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {each}" for each in requirements]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    links = [f'<a href="{path.name}">{path.name}</a>' for path in sorted(folder.glob("*.whl"))]
    (folder / "index.html").write_text("<!DOCTYPE html><html><body>" + "\n".join(links) + "</body></html>")


@pytest.fixture(scope="module")
def indexes(tmp_path_factory, script) -> Path:
    """`pypi`: torch as a CUDA build; `plain`: as a CPU build; `pytorch`: a CPU build alone; `empty`."""
    folder = tmp_path_factory.mktemp("indexes")
    version = script.requirement().partition("==")[2]
    cuda = ["nvidia-cudnn-cu13==9.1; platform_system == 'Linux'", "cuda-bindings>=13", "tiny-part"]
    add_wheel(folder / "pypi", "torch", version, *cuda)
    for name in ("nvidia-cudnn-cu13", "cuda-bindings", "tiny-part"):
        add_wheel(folder / "pypi", name, "13.0" if name == "cuda-bindings" else "9.1")
    add_wheel(folder / "plain", "torch", version, "tiny-part")
    add_wheel(folder / "plain", "tiny-part", "9.1")
    add_wheel(folder / "pytorch", "torch", f"{version}+cpu", "tiny-part")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def install(script, indexes, tmp_path, monkeypatch, capfd):
    """`install(index, gpu=…, TORCH=…)`: exit code or message, what was printed, and what is installed."""
    for name in ("TORCH", "TORCH_CPU_INDEX", *(name for name in os.environ if name[:4] == "PIP_")):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "installed"))

    def run(index: str, *, gpu: bool = False, cpu_index: str = "pytorch", **variables: str):
        monkeypatch.setenv("PIP_INDEX_URL", (indexes / index).as_uri())
        monkeypatch.setenv("TORCH_CPU_INDEX", (indexes / cpu_index).as_uri())
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(script, "has_gpu", lambda: gpu)
        try:
            script.main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code
        found = sorted(path.name.split(".dist")[0] for path in tmp_path.glob("installed/*.dist-info"))
        return code, capfd.readouterr().out, found

    return run


VERSION = "2.13.0"


def test_without_a_gpu_the_cpu_build_is_taken_from_pytorch(install, indexes) -> None:
    code, printed, installed = install("pypi")
    assert (code, installed) == (0, [f"torch-{VERSION}+cpu"])
    where = (indexes / "pytorch").as_uri()
    reason = "(no NVIDIA GPU found; TORCH=cuda for CUDA's)"
    assert printed == f"installing torch=={VERSION}: the CPU build of {where} {reason}\n"


def test_a_cpu_build_of_the_usual_index_is_taken_as_it_is(install) -> None:
    code, printed, installed = install("plain", cpu_index="empty")
    assert (code, installed) == (0, ["tiny_part-9.1", f"torch-{VERSION}"])
    assert printed == f"installing torch=={VERSION}: a CPU build (no NVIDIA GPU found)\n"


@pytest.mark.parametrize(
    ("gpu", "variables", "reason"),
    [(True, {}, "an NVIDIA GPU found"), (False, {"TORCH": "cuda"}, "TORCH=cuda")],
)
def test_a_gpu_or_a_wish_takes_the_cuda_build(install, gpu, variables, reason) -> None:
    code, printed, installed = install("pypi", gpu=gpu, **variables)
    names = ["cuda_bindings-13.0", "nvidia_cudnn_cu13-9.1", "tiny_part-9.1", f"torch-{VERSION}"]
    assert (code, installed) == (0, names)
    assert printed == f"installing torch=={VERSION}: a CUDA build, several gigabytes ({reason})\n"


def test_a_wish_for_the_cpu_build_holds_on_a_machine_with_a_gpu(install) -> None:
    code, _, installed = install("pypi", gpu=True, TORCH="cpu")
    assert (code, installed) == (0, [f"torch-{VERSION}+cpu"])


def test_where_there_is_no_cpu_build_nothing_is_installed(install, indexes) -> None:
    code, _, installed = install("pypi", cpu_index="empty")
    assert installed == []
    where = (indexes / "empty").as_uri()
    assert code == (
        f"error: the package index offers torch=={VERSION} as a CUDA build only (with cuda-bindings), and "
        f"pip finds no CPU build at {where} (no NVIDIA GPU found); set TORCH_CPU_INDEX=URL to an index that "
        "has one, or TORCH=cuda to download the CUDA build after all"
    )


def test_an_unknown_build_is_refused(install) -> None:
    code, printed, installed = install("pypi", TORCH="rocm")
    assert code == "error: TORCH = 'rocm' is no build of torch; set cpu or cuda, or leave it out"
    assert (printed, installed) == ("", [])


def test_a_tag_or_a_library_tells_a_cuda_build(script) -> None:
    assert script.cuda_packages({"torch": "2.13.0+cu130", "tiny-part": "1"}) == ["torch"]
    assert script.cuda_packages({"torch": "2.13.0", "nvidia-nccl-cu13": "2"}) == ["nvidia-nccl-cu13"]
    assert script.cuda_packages({"torch": "2.13.0+cpu", "tiny-part": "1"}) == []


def test_a_gpu_is_a_device_or_one_that_the_driver_lists(script, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not script.has_gpu(tmp_path)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\nprint('GPU 0: something')\n")
    tool.chmod(0o755)
    assert script.has_gpu(tmp_path / "dev")
    tool.write_text(f"#!{sys.executable}\nprint('No devices were found')\n")
    assert not script.has_gpu(tmp_path / "dev")
    (tmp_path / "nvidia0").touch()
    assert script.has_gpu(tmp_path)


def test_every_environment_of_make_gets_its_torch_from_the_script() -> None:
    makefile = (SCRIPT.parent / "Makefile").read_text()
    assert makefile.count("install_torch.py") >= 3
    assert "torch==" not in makefile
