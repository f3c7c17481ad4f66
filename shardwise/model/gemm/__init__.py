"""GEMMs by the algorithm that is fastest on this machine: cuBLASLt's proposals are timed, and the choice is stored."""
