"""``python -m gradcomp.local``: the coordinator of `gradcomp.local.ElasticDiLoCo`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from gradcomp.arguments import Parser
from gradcomp.local.coordinator import PORT, RENAMED, Coordinator

EXAMPLES = """\
examples (docs/howto/sites.md has more):
  three sites; the first sync waits for all of them, later ones a minute for a silent one:
    python -m gradcomp.local --sites 3

  never train on with fewer than two:
    python -m gradcomp.local --sites 3 --min-sites 2
"""


OPTIONS = f"""\
coordinator
--host ADDRESS: address to listen at (default: all addresses of this machine)
--port PORT: port to listen at (default: {PORT})
--store-port PORT: port of the store of addresses (default: the port after --port)
--sites N: number of sites for which the first sync waits (default: 1)
--min-sites N: smallest number of sites for a sync (default: 1)
--sync-timeout S: longest wait of a sync for a silent site, in seconds (default: 60)
--min-sites-timeout S: longest wait for --min-sites sites, in seconds (default: 3600)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C; return the exit status."""
    parser = Parser(
        prog="python -m gradcomp.local",
        description="Decide which sites of gradcomp.local.ElasticDiLoCo take part in each sync. Run"
        " it on one machine that stays up, and give the sites its address.",
        epilog=EXAMPLES,
    )
    parser.add_groups(OPTIONS, {"PORT": int, "N": int, "S": float})
    for old in RENAMED:
        parser.add_argument(_option(old), nargs="?", const=True, help=argparse.SUPPRESS)
    parser.set_defaults(host="", port=PORT, sites=1, min_sites=1)
    parser.set_defaults(sync_timeout=60.0, min_sites_timeout=3600.0)
    options = parser.parse_args(argv)
    for old, now in RENAMED.items():
        if getattr(options, old.removesuffix("_s")) is not None:
            parser.error(f"{_option(old)} is called {_option(now)}")
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("gradcomp").setLevel(logging.INFO)
    try:
        coordinator = Coordinator(
            options.host,
            options.port,
            store_port=options.store_port,
            sites=options.sites,
            min_sites=options.min_sites,
            sync_timeout_s=options.sync_timeout,
            min_sites_timeout_s=options.min_sites_timeout,
        )
    except (ValueError, OSError, OverflowError) as error:
        parser.error(str(error))
    print(f"coordinator of sites, at port {coordinator.port}", flush=True)
    with coordinator:
        coordinator.wait()
    return 0


def _option(name: str) -> str:
    """Return the option of an argument of `Coordinator` in seconds."""
    return f"--{name.removesuffix('_s').replace('_', '-')}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
