"""A bar while sizes are tried and a table at the end, where rich is installed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from gradcomp.onebit_sgd.choice import BatchSizeChoice


class Progress:
    """Shows how far the trials are, on stderr; does nothing unless `shown`, or without rich.

    Args:
        sizes: that will be tried, in this order.
        samples: of each trial.
        shown: False: be quiet.
    """

    def __init__(self, sizes: Sequence[int], samples: int, *, shown: bool) -> None:
        self._stack, self._bar, self._tasks, self._console = ExitStack(), None, {}, None
        self._sizes, self._samples, self._shown = sizes, samples, shown

    _bar: Any
    _console: Any
    _tasks: dict[int, Any]

    def __enter__(self) -> Progress:  # noqa: PYI034 - Self is of Python 3.11
        if not self._shown:
            return self
        try:
            from rich.console import Console
            from rich.progress import Progress as RichProgress
        except ImportError:
            return self
        self._console = Console(stderr=True)
        self._bar = self._stack.enter_context(RichProgress(console=self._console, transient=True))
        for size in self._sizes:
            self._tasks[size] = self._bar.add_task(
                f"minibatch {size}", total=self._samples, start=False
            )
        return self

    def show(self, size: int, done: int) -> None:
        """Show that a trial has seen so many samples."""
        if self._bar is not None:
            self._bar.start_task(self._tasks[size])
            self._bar.update(self._tasks[size], completed=min(done, self._samples))

    def table(self, choice: BatchSizeChoice) -> None:
        """Print all trials."""
        if self._console is None:
            return
        from rich.table import Table

        heading, *rows = choice.rows()
        table = Table(title=f"minibatch {choice.minibatch}")
        for name in heading:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*row, style="bold" if row[0] else None)
        self._console.print(table)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
