"""What verbs share: types of arguments, letters and progress on a terminal, versions, what a fork server imports."""
