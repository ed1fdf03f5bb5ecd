"""Running one's own code as a job: pack, submit, follow, collect, observe."""
