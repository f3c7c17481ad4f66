"""Matrix products by the algorithm that is fastest on this machine: the library's proposals, timed, and the choice kept."""
