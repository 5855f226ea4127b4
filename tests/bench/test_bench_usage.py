"""Command lines of the benchmarks: help, and wrong words as one line with status 2."""

import gzip
import importlib
import os
import re
import signal
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from gradcomp import interrupt
from gradcomp.bench import __main__ as dispatcher

ACCURACY, PAPER = "accuracy --data /nonexistent", "paper --data /nonexistent"
WRONG = [
    ("codec --dtypes float8", "unknown name 'float8'; choose from float32, bfloat16"),
    ("codec --tiers mmx", "unknown name 'mmx'; choose from portable"),
    ("codec --sizes 0", "'0' is not a positive integer"),
    ("codec --threads 1,x", "'x' is not a positive integer"),
    ("codec --device gpu", "--device gpu: not here; cuda or cuda:1 is a GPU"),
    ("optim --numel 3", "--numel must be at least 64, got 3"),
    ("optim --threads 0", "'0' is not a positive integer"),
    ("optim --json /nowhere/file", "--json: /nowhere/file: there is no such folder"),
    ("ratio --plot /nowhere/file.png", "--plot: /nowhere/file.png: there is no such folder"),
    ("ratio --no-verify --models LeNet --plot x.zip", "Format 'zip' is not supported"),
    ("train --json /nowhere/file", "--json: /nowhere/file: there is no such folder"),
    ("optim --repeat -1", "'-1' is not a positive integer"),
    ("ratio --models AlexNet", "unknown name 'AlexNet'; choose from LeNet, ResNet-50"),
    ("ratio --models ,", "choose from LeNet, ResNet-50"),
    ("demo --codecs fp32,int8", "unknown name 'int8'; choose from fp32, ternary, onebit, terngrad"),
    ("demo --codecs onebit,onebit", "give different names"),
    ("demo --steps 0", "--steps: '0' is not a positive integer"),
    ("demo --ranks 1", "--ranks: '1' is not an integer of at least 2"),
    ("demo --batch 63", "--batch 63: must be a multiple of the 2 ranks"),
    ("demo --lr nan", "--lr nan: must be above 0"),
    ("train --methods ternery", "no method named 'ternery'"),
    ("train --methods onebit:prec", "unknown option 'prec'"),
    ("train --workload lenett", "no workload named 'lenett'"),
    ("train --workload random:5", "at least 1024"),
    ("train --workload gpt-1m --data /nonexistent", "no prose.txt"),
    ("train --link fast", "a rate like 100mbit"),
    ("train --hosts 1", "--hosts takes 0 or numbers of at least 2"),
    ("train --hosts 0 2", "--hosts takes 0 or numbers of at least 2"),
    ("train --steps 3", "--steps: '3' is not an integer of at least 5"),
    ("train --ranks 1", "--ranks: '1' is not an integer of at least 2"),
    ("train --hang 0", "--hang must be more than 0, got 0"),
    ("train --batch 0", "--batch: '0' is not a positive integer"),
    ("train --points 0", "--points: '0' is not a positive integer"),
    ("train --workload mlp --optimizer muon --hosts 0", "mlp has no rate for muon"),
    (ACCURACY, "prose.txt"),
    (f"{ACCURACY} --workloads mlp --out /dev/null", "File exists: '/dev/null'"),
    (f"{ACCURACY} --seeds 0", "--seeds: '0' is not a positive integer"),
    (f"{ACCURACY} --workloads mlp --methods nonsense", "no method named"),
    (f"{PAPER} ef-sign", "cifar10_jpeg.npz"),
    ("report /tmp --out /nowhere/x.md", "--out: /nowhere/x.md: there is no such folder"),
]


@pytest.mark.parametrize(("command", "said"), WRONG, ids=[command for command, _ in WRONG])
def test_wrong_words_are_one_line_and_status_2(command, said, capsys):
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    try:
        status = dispatcher.main(command.split())
    except SystemExit as error:
        status = error.code
    shown = capsys.readouterr().err
    assert status == 2 and said in shown and shown.count("\n") == 1
    name = command.partition(" ")[0]
    assert shown.startswith((f"python -m gradcomp.bench {name}: ", f"gradcomp.bench {name}: "))
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    ("command", "file", "said"),
    [
        ("train --hosts 0 --workload gpt-1m", "prose.txt.gz", "not a whole gzip file"),
        ("accuracy --workloads gpt-1m", "prose.txt.gz", "not a whole gzip file"),
        ("train --hosts 0 --workload resnet", "cifar10_jpeg.npz", "not a whole file of CIFAR-10"),
        ("paper ef-sign", "cifar10_jpeg.npz", "not a whole file of CIFAR-10"),
    ],
)
def test_a_damaged_data_file_is_named(command, file, said, tmp_path, capsys):
    """It ended in the traceback of gzip or zipfile."""
    (tmp_path / file).write_bytes(gzip.compress(bytes(1000))[:-9])
    assert dispatcher.main([*command.split(), "--data", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert f"{tmp_path / file}: {said}" in shown and shown.count("\n") == 1


def test_a_file_that_cannot_be_opened_is_one_line(tmp_path, capsys):
    (tmp_path / "prose.txt").mkdir()
    command = "train --hosts 0 --workload gpt-1m --steps 5 --data"
    assert dispatcher.main([*command.split(), str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "Is a directory" in shown and "prose.txt" in shown and shown.count("\n") == 1


def test_help_teaches(capsys):
    assert dispatcher.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in dispatcher.BENCHMARKS)
    with pytest.raises(SystemExit) as caught:
        dispatcher.main(["demo", "--help"])
    assert caught.value.code == 0
    assert "--data DIR" in capsys.readouterr().out


PROGRAMS = (*dispatcher.BENCHMARKS, "doctor", "launch", "local")
FRAGMENTS = ("of ", "that ", "to ", "for ", "from ", "instead", "(", "the same", "also after")
# nothing is written, or it must be given or replaces another
NO_DEFAULT = {"--json", "--plot", "--data", "--shapes", "-n"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_option_says_what_it_is_and_its_default(program, monkeypatch, capsys):
    """Help read "of a rank; below 2 ..." and "that share a node's link ... (1)"."""
    monkeypatch.setenv("COLUMNS", "500")
    main = {
        "doctor": importlib.import_module("gradcomp.doctor.options").parse,
        "launch": importlib.import_module("gradcomp.launch.cli").main,
        "local": importlib.import_module("gradcomp.local.__main__").main,
    }.get(program, lambda words: dispatcher.main([program, *words]))
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "python -m gradcomp." in text[text.index("example") :]
    options = re.findall(r"^  (-\S.*?)(?:  +|\n {20,})(\S.*)$", text, re.MULTILINE)
    assert len(options) == len(re.findall(r"^  -", text, re.MULTILINE)), "an option says nothing"
    for option, said in options:
        name, _, value = option.split(",")[0].partition(" ")
        assert len(said.split()) >= 4 and not said.startswith(FRAGMENTS), (option, said)
        if value and name not in NO_DEFAULT:
            assert "(default: " in said, (option, said)


def test_unknown_benchmark_is_refused(capsys):
    assert dispatcher.main(["dmeo"]) == 2
    assert (
        "no benchmark named 'dmeo'; there are demo, codec, accuracy, paper, train, report,"
        " optim, ratio, plan; did you mean demo?" in capsys.readouterr().err
    )
    assert dispatcher.main(["allreduce"]) == 2
    assert "it is gone: bench train measures exchanges" in capsys.readouterr().err


def test_missing_library_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    for name in [n for n in sys.modules if n.startswith(("rich.", "gradcomp.bench.demo"))]:
        monkeypatch.delitem(sys.modules, name)
    assert dispatcher.main(["demo"]) == 2
    assert "pip install 'gradcomp[bench]'" in capsys.readouterr().err


def test_a_library_that_is_missing_and_ctrl_c_are_one_line(monkeypatch, capfd):
    program = SimpleNamespace(main=mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setitem(sys.modules, "a_program", program)
    monkeypatch.setitem(sys.modules, "no_library", None)
    assert interrupt.run("gradcomp.bench x", "no_library", []) == 2
    assert "gradcomp.bench x needs no_library: pip install" in capfd.readouterr().err
    assert interrupt.run("gradcomp.bench x", "a_program", []) == interrupt.STATUS == 130
    assert capfd.readouterr().err == "interrupted\n"
    with pytest.raises(ModuleNotFoundError):  # a defect of ours, not something to install
        interrupt.run("gradcomp.bench x", "gradcomp.no_such_module", [])
