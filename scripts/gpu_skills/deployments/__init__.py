"""Models that are served: set up on a machine, proven, registered under a stable handle, and given back."""
