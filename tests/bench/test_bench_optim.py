"""bench optim: it checks before it times, counts bytes right, judges right, and writes what it
is asked for.
"""

import json

import pytest

from gradcomp.bench import optim

pytestmark = pytest.mark.slow


def test_it_runs_small_and_counts_bytes(tmp_path, capsys):
    files = ["--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.png")]
    assert optim.main(["--numel", "65600", "--repeat", "1", *files]) == 0
    assert "bytes a weight" in capsys.readouterr().out
    found = json.loads((tmp_path / "o.json").read_text())
    parts = ("weight_bytes", "state_bytes", "gradient_bytes")
    rows = {(r["optimizer"], r["contender"]): r for r in found["rows"]}
    nbytes = {key: tuple(round(r[part], 1) for part in parts) for key, r in rows.items()}
    assert found["numel"] == 65600
    assert nbytes["SGD", "torch fused fp32"] == (4, 0, 4)
    assert nbytes["AdamW", "torch foreach fp32"] == (4, 8, 4)
    weights, state, gradient = nbytes["Adagrad", "split"]
    assert (state, gradient) == (4, 2)
    assert 4 <= weights < 4.2  # trails begin up to 4 KB into their memory
    assert nbytes["SGD from payloads", "2 payloads, straight"][2] == 0
    assert all(r["ms"] > 0 and r["memcpys"] > 0 for r in found["rows"])
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_optimizer_is_not_timed(monkeypatch):
    """The check before the clock starts notices a learning rate that is off in one tier."""
    rates = iter([optim.LR, optim.LR * (1 + 1e-6)])
    monkeypatch.setitem(optim.OURS, "AdamW", lambda p: optim.SplitAdamW(p, lr=next(rates)))
    with pytest.raises(SystemExit, match="split AdamW differs from the portable tier"):
        optim.main(["--numel", "64"])


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_verdicts(factor):
    """The limit is 1.5 times what a step moves over what the other one moves, and 4.01 bytes."""
    state, copies = 0.02 * (factor > 1), 1.875 * factor
    rows = [optim.Row(n, "split", 1.0, copies, 4.0, state, 2.0, 1.0) for n, *_ in optim.MOVES]
    for name, beside, moved, other in optim.MOVES:
        rows.append(optim.Row(name, beside, 1.0, 1.0, 4.0, 0, 4.0, 1.5 * factor * moved / other))
    found = optim.verdicts(rows)
    assert [v.passed for v in found] == [factor < 1] * (len(optim.MOVES) + 1)


@pytest.mark.parametrize("argv", [["--numel", "3"], ["--threads", "0"], ["--repeat", "0"]])
def test_wrong_usage(argv):
    with pytest.raises(SystemExit) as error:
        optim.main(argv)
    assert error.value.code == 2
