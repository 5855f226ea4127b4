"""``python -m gradcomp.local``: the coordinator of `gradcomp.local.ElasticDiLoCo`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from gradcomp.arguments import Parser
from gradcomp.local.coordinator import PORT, Coordinator

EXAMPLES = """\
examples (docs/howto/sites.md has more):
  three sites; the first sync waits for all of them, later ones a minute for a silent one:
    python -m gradcomp.local --sites 3

  never train on with fewer than two:
    python -m gradcomp.local --sites 3 --min-sites 2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C; return the exit status."""
    parser = Parser(
        prog="python -m gradcomp.local",
        description="Decide which sites of gradcomp.local.ElasticDiLoCo take part in each sync. Run"
        " it on one machine that stays up, and give the sites its address.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--host", default="", help="address to listen at (default: all)")
    parser.add_value("port", int, PORT, "port to listen at")
    parser.add_argument("--store-port", type=int, help="port of the store (default: the next one)")
    parser.add_value("sites", int, 1, "number of sites for which the first sync waits")
    parser.add_value("min-sites", int, 1, "smallest number of sites for a sync")
    parser.add_value("patience", float, 60.0, "how long a sync waits for a silent site, in seconds")
    parser.add_value("give-up", float, 3600.0, "how long to wait for that many sites, in seconds")
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("gradcomp").setLevel(logging.INFO)
    try:
        coordinator = Coordinator(
            options.host,
            options.port,
            store_port=options.store_port,
            sites=options.sites,
            min_sites=options.min_sites,
            patience_s=options.patience,
            give_up_s=options.give_up,
        )
    except (ValueError, OSError, OverflowError) as error:
        parser.error(str(error))
    print(f"coordinator of sites, at port {coordinator.port}", flush=True)
    with coordinator:
        coordinator.wait()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
