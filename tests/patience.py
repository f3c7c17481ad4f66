"""How long a test waits before it calls something hung: longer than anything takes that is only slow, also where ten other programs
want the same cores. No test asserts that something is quick by the clock on the wall; time limits are on counts or on CPU time."""

HANG_SECONDS = 600.0
