"""One rank of an MpiPool: runs what comes down a socket; mpirun starts it."""

import os
import sys
from multiprocessing.connection import Client


def main(address, key):
    from _ranks import serve
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    pipe = Client(address, authkey=bytes.fromhex(key))
    pipe.send(rank)
    serve(pipe, rank, os.path.dirname(address))


if __name__ == "__main__":
    main(*sys.argv[1:])
