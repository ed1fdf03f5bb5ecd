"""Records on disk: whole files, append-only files, and what can be asked of them."""
