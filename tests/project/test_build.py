"""The build: one abi3 module, and one sentence when there is no compiler."""

import os
import re
import runpy
import sys
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest import mock

import hypothesis
import pytest
from _ranks import output_of

import gradcomp
import gradcomp._gc
from gradcomp.version import TRIED_TORCH, warn_about_torch

ROOT = Path(__file__).parents[2]


def test_no_compiler_is_one_sentence(tmp_path):
    build = [sys.executable, "setup.py", "-q", "build_ext"]
    command = [*build, "--build-temp", tmp_path, "--build-lib", tmp_path]
    out = output_of(*command, cwd=ROOT, env=os.environ | {"CC": "no-such-compiler"})
    assert out.returncode != 0
    last = out.stderr.strip().splitlines()[-1]
    assert "C compiler" in last and "no-such-compiler" in last and "Traceback" not in out.stderr


def test_one_module_for_every_python():
    assert Path(gradcomp._gc.__file__).name.startswith("_gc.abi3.")


def test_a_source_tree_that_was_never_installed_has_a_version(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", mock.Mock(side_effect=PackageNotFoundError))
    found = runpy.run_path(str(ROOT / "gradcomp/version.py"))
    assert found["__version__"] == "0+unknown"


def test_one_version_everywhere():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.+)"$', project, re.MULTILINE) == [gradcomp.__version__]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (?:Unreleased: )?(\S+)", changes, re.MULTILINE)
    assert newest and newest[1] == gradcomp.__version__


def pins_of(path):
    """Return {package: version} of a file of pins."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_ci_knows_the_hash_of_every_package():
    pins = pins_of("constraints.txt")
    del pins["torch"]  # from another index, or from disk
    assert pins_of(".ci/hashes.txt") == pins, "make hashes"


@pytest.mark.parametrize("version", ["1.13.1", "2.7.1", "2.16.0", "3.0.0a0+git1234", "unknown"])
def test_a_torch_that_was_not_tried_is_named(version):
    with pytest.warns(UserWarning, match=r"2\.8 to 2\.15") as caught:
        warn_about_torch(version)
    assert version in str(caught[0].message)


@pytest.mark.parametrize("version", ["2.8.0", "2.13.0+cpu", "2.15.1"])
def test_a_torch_that_was_tried_is_not(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_torch(version)


def test_what_the_package_asks_for_is_what_was_tried():
    """pyproject.toml, the warning and the page with the results name the same versions of torch."""
    (oldest, newest), next_minor = TRIED_TORCH, TRIED_TORCH[1][1] + 1
    wanted = f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{next_minor}"
    assert f'"{wanted}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    page = (ROOT / "docs/reference/torch-versions.md").read_text(encoding="utf-8")
    tried = re.findall(r"^\| (\d+\.\d+)\.\d+ \|", page, re.MULTILINE)
    assert sorted(tried, key=lambda v: int(v.split(".")[1])) == [
        f"2.{m}" for m in range(oldest[1], next_minor)
    ]


def test_the_demo_installs_only_what_it_needs(tmp_path):
    """It installed lightning, transformers, ray, sphinx and mypy: 1.9 GB for LeNet."""

    def installs(target):
        command = ["make", "-n", target, "INSTALLER=", f"VENV={tmp_path / 'venv'}"]
        done = output_of(*command, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return "\n".join(line for line in done.stdout.splitlines() if "pip install" in line)

    heavy = ("lightning", "accelerate", "transformers", "ray", "torchft", "docs", "dev")
    assert "-e '.[bench]'" in installs("demo")
    assert not [extra for extra in heavy if extra in installs("demo")]
    assert all(extra in installs("lint") for extra in heavy)


def test_lint_is_a_target_of_its_own_and_contributing_says_so():
    """`make test` stopped at a long line before it ran a test."""

    def runs(target):
        command = ["make", "-n", target, "INSTALLER="]
        return re.findall(
            r"bin/(ruff|mypy|python -m pytest)\b", output_of(*command, cwd=ROOT).stdout
        )

    assert set(runs("test")) == {"python -m pytest"} and runs("lint") == ["ruff", "mypy"]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.search(r"^make lint ", text, re.MULTILINE)
    assert "make lint " in (ROOT / ".ci/run").read_text(encoding="utf-8")
    examples = hypothesis.settings.get_profile("short").max_examples
    assert f"Hypothesis draws {examples} examples, " in text
