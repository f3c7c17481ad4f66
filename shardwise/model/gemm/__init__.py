"""GEMMs by the algorithm that is fastest on this machine: cuBLASLt's proposals, timed, and the choice remembered."""
