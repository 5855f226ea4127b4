"""What `make coverage` has every Python import first (sitecustomize): measure this process, threads
that `_thread` starts included, which coverage leaves out.
"""

import _thread
import sys
import threading

import coverage

coverage.process_startup()
start = _thread.start_new_thread


def start_measured(function, args, kwargs=None):
    def run(*args, **kwargs):
        sys.settrace(threading.gettrace())
        function(*args, **kwargs)

    return start(run, args, kwargs or {})


_thread.start_new_thread = start_measured
