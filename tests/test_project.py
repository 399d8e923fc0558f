"""The project as a whole: linters, types, import rules, packaging, and documents that match the tree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command: str, timeout: float = 250) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("arguments", [("check", "."), ("format", "--check", ".")], ids=["lint", "format"])
def test_ruff(arguments: tuple[str, ...]) -> None:
    run(sys.executable, "-m", "ruff", *arguments)


def test_import_contracts() -> None:
    run(str(Path(sys.executable).with_name("lint-imports")))


def test_types_of_the_public_surface() -> None:
    run(sys.executable, "-m", "mypy")


def test_import_loads_neither_torch_nor_triton() -> None:
    code = (
        "import sys, ninfer_core, ninfer_core.types, ninfer_core.errors, ninfer_core.config, ninfer_cli.main\n"
        "bad = {'torch', 'triton', 'transformers', 'langchain_core', 'llama_index'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    run(sys.executable, "-c", code)


def test_every_public_name_resolves() -> None:
    import ninfer_core

    for name in ninfer_core.__all__:
        assert getattr(ninfer_core, name) is not None, name
    with pytest.raises(AttributeError, match="nonsense"):
        ninfer_core.nonsense


def test_triton_is_a_linux_dependency_only() -> None:
    triton = [d for d in PYPROJECT["project"]["dependencies"] if d.startswith("triton")]
    assert len(triton) == 1 and "platform_system == 'Linux'" in triton[0]


def test_the_namespace_package_has_no_init_file() -> None:
    assert not (ROOT / "integrations/llama_index/__init__.py").exists()
    assert not (ROOT / "integrations/llama_index/llms/__init__.py").exists()


def test_wheel_holds_the_packages_and_the_demo_model_and_nothing_else(tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 16e6, f"the wheel has grown to {wheel.stat().st_size:,} bytes"
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"ninfer_core", "ninfer_cli", "langchain_ninfer", "llama_index", "ray_ninfer"}
    assert "ninfer_core/demo/artifact/manifest.json" in names
    assert "ninfer_core/demo/artifact/chat_template.jinja" in names
    assert "ninfer_core/py.typed" in names
    assert not [name for name in names if "demo/make" in name or name.endswith(".pyc")]


def test_file_map_of_contributing_matches_the_tree() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"```text\n(.*?)```", text, re.S)
    assert block, "CONTRIBUTING.md has no file map"
    paths = [line.split()[0] for line in block[1].splitlines() if line.strip() and not line.startswith(" ")]
    assert len(paths) > 15
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"CONTRIBUTING.md maps paths that do not exist: {missing}"


def test_readme_opens_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    first = re.search(r"```bash\n(.*?)```", text, re.S)
    assert first
    commands = [line.split("#")[0].strip() for line in first[1].splitlines() if line.strip()]
    assert commands == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in ("demo", "test"))
