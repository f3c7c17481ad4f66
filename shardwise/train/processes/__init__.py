"""How the ranks of a run start: detecting the launcher, checks before any rank starts, and one process per rank."""
