"""How the ranks of a run start: which launcher there is, what is wrong before any rank starts, one process a rank."""
