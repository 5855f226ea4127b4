"""MPI as a communicator (mpi4py buffer calls): one duplicated communicator a channel."""
