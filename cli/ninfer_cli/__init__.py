"""The command line and the servers of ninfer: clients of `ninfer_core` that use its public names only."""
