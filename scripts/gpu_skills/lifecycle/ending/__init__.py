"""Stopping and destroying, each called so only once it is seen."""
