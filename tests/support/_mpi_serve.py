"""One rank of an MpiPool: runs what comes down a socket; mpirun starts it."""

import functools
import os
import sys
from multiprocessing.connection import Client


def main(address, key):
    from _ranks import serve
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    @functools.cache
    def first(size):
        """Return the communicator of the first ranks, which all of them call for at once."""
        return world.Create_group(world.Get_group().Incl(range(size)))

    def narrow(size):
        MPI.COMM_WORLD = first(size)

    pipe = Client(address, authkey=bytes.fromhex(key))
    pipe.send(world.Get_rank())
    serve(pipe, world.Get_rank(), os.path.dirname(address), narrow)


if __name__ == "__main__":
    main(*sys.argv[1:])
