"""What verbs share and no user names: argument types, progress, letters of the terminal, lists of names, how ranks start."""
