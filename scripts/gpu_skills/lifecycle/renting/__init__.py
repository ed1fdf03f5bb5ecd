"""From an approved plan, or a stopped machine, to one that is ready and has its fuse."""
