"""A program in a fork of which a test reads what it prints as it comes."""

import json
import re
import threading

import _forks
import torch

PATIENCE_S = 180


class Spoken:
    """A program whose last line is "done" and JSON, when it has saved a state.

    Args:
        script: the program.
        out: the file of its state.
        options: what it is given, as JSON.
    """

    def __init__(self, script, out, **options):
        self.out = out
        self.program = _forks.Program(script, json.dumps({**options, "out": str(out)}))
        self.lines, self._came = [], threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.program.stdout:
            with self._came:
                self.lines.append(line.strip())
                self._came.notify_all()

    def said(self, pattern, enough=bool, wait_s=PATIENCE_S):
        """Wait for a line that the pattern matches, and whose match is enough."""

        def found():
            matches = (re.match(pattern, line) for line in self.lines)
            return next((m for m in matches if m and enough(m)), None)

        with self._came:
            match = self._came.wait_for(found, wait_s)
        assert match, (pattern, self.text())
        return match

    def text(self):
        self.program._errors.seek(0)
        return "\n".join([*self.lines[-30:], self.program._errors.read()[-6000:]])

    def result(self, wait_s=PATIENCE_S):
        """Return what the program said at its end, and the state that it has saved."""
        done = json.loads(self.said(r"done (.*)", wait_s=wait_s)[1])
        assert self.program.wait(PATIENCE_S) == 0, self.text()
        return done, torch.load(self.out, weights_only=False)
