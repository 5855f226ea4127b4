"""bench optim: it checks before it times, counts bytes right, judges right, and writes what it
is asked for.
"""

import json

import pytest

from gradcomp.bench import optim

pytestmark = pytest.mark.slow


def test_it_runs_small_and_counts_bytes(tmp_path, capsys):
    status = optim.main(
        [
            "--numel",
            "65600",
            "--repeat",
            "1",
            "--json",
            str(tmp_path / "o.json"),
            "--plot",
            str(tmp_path / "o.png"),
        ]
    )
    assert status == 0
    assert "bytes a weight" in capsys.readouterr().out
    found = json.loads((tmp_path / "o.json").read_text())
    nbytes = {
        (r["optimizer"], r["contender"]): (
            round(r["weight_bytes"], 1),
            round(r["state_bytes"], 1),
            round(r["gradient_bytes"], 1),
        )
        for r in found["rows"]
    }
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
    """The check before the clock starts notices a learning rate that is off by a bit."""
    monkeypatch.setitem(
        optim.OURS, "AdamW", lambda p: optim.SplitAdamW(p, lr=optim.LR * (1 + 1e-6))
    )
    with pytest.raises(SystemExit, match="split AdamW differs from the reference"):
        optim.main(["--numel", "64"])


def test_verdicts():
    row = optim.Row("SGD", "split", 1.0, 1.0, 4.001, 0.0, 2.0, 1.0)
    ratios = {(name, beside): limit for name, beside, limit, _ in optim.LIMITS}
    assert all(v["pass"] for v in optim.verdicts([row], ratios))
    worse = {place: value * 1.01 for place, value in ratios.items()}
    found = optim.verdicts([optim.Row("SGD", "split", 1.0, 1.0, 4.0, 4.0, 2.0, 1.0)], worse)
    assert not any(v["pass"] for v in found)
    assert len(found) == len(optim.LIMITS) + 1


@pytest.mark.parametrize("argv", [["--numel", "3"], ["--threads", "0"], ["--repeat", "0"]])
def test_wrong_usage(argv):
    with pytest.raises(SystemExit) as error:
        optim.main(argv)
    assert error.value.code == 2
