"""The build: one abi3 module, and one sentence when there is no compiler."""

import os
import re
import subprocess
import sys
from pathlib import Path

import gradcomp
import gradcomp._gc

ROOT = Path(__file__).parents[1]


def test_no_compiler_is_one_sentence(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path]
    environment = {**os.environ, "CC": "no-such-compiler"}
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert out.returncode != 0
    last = out.stderr.strip().splitlines()[-1]
    assert "C compiler" in last and "no-such-compiler" in last and "Traceback" not in out.stderr


def test_one_module_for_every_python():
    assert Path(gradcomp._gc.__file__).name.startswith("_gc.abi3.")


def test_one_version_everywhere():
    (declared,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert gradcomp.__version__ == declared
    newest = re.search(r"^## (?:Unreleased: )?(\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest and newest[1] == declared
