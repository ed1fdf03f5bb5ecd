"""Arithmetic about machine time and money. Pure functions: no files, no network, no clock."""
